"""Damaged image files, CIFAR files and recipes, as many as asked for: each is read or refused in one sentence, and counted.

    python -m tests.support.fuzz_data 4000 [first seed]

Ends with 1 if any case ended in another way; the case is printed with its seed.
"""

import gzip
import io
import os
import pickle
import random
import sys
import tarfile
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tomli_w
from PIL import Image

from letkd.data import load_data
from letkd.data.pictures import as_tensor, centred, read_picture
from letkd.errors import LetkdError
from letkd.recipes import resolve

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM")
EXTREMES = [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\1", b"\1\0\0\0", b"\x80\0\0\0"]
WORDS = [
    *(
        "nan",
        "inf",
        "-inf",
        "-1",
        "0",
        "1e400",
        "9" * 400,
        "true",
        '""',
        "[]",
        "{}",
        "[[[[]]]]",
        "1979-05-27",
        "'''x",
        "0x",
        "é",
    ),
    *("data", "size", "[data]", "[[phases]]", "=", "\0", "\\", '"\\ud800"', "[48, 64]", '"48x64"', "\n", ".", "#"),
]


def mutate(r: random.Random, content: bytes) -> bytes:
    """One to four changes: cut, flipped, overwritten, removed or repeated bytes."""
    found = bytearray(content)
    for _ in range(r.randint(1, 4)):
        if not found:
            break
        at = r.randrange(len(found)) if r.random() < 0.6 else r.randrange(min(len(found), 200))  # headers more often
        span = r.randint(1, 40)
        match r.randrange(7):
            case 0:
                del found[at:]
            case 1:
                found[at] ^= 1 << r.randrange(8)
            case 2:
                found[at] = r.randrange(256)
            case 3:
                found[at : at + 4] = r.choice(EXTREMES)
            case 4:
                found[at : at + span] = r.randbytes(span)
            case 5:
                del found[at : at + span]
            case 6:
                found[at:at] = found[at : at + span] * r.randint(1, 3)
    return bytes(found)


def image_case(r: random.Random, folder: Path) -> Callable[[], object]:
    mode, size = r.choice(["RGB", "L", "P", "RGBA", "1", "I;16"]), (r.randint(1, 40), r.randint(1, 40))
    kind = r.choice(FORMATS)
    if mode == "I;16":
        picture = Image.fromarray(np.frombuffer(r.randbytes(2 * size[0] * size[1]), np.uint16).reshape(size).copy())
        kind = r.choice(["PNG", "TIFF"])
    else:
        picture = Image.frombytes("RGB", size, r.randbytes(3 * size[0] * size[1]))
        picture = picture.convert("RGB" if kind in ("JPEG", "BMP", "PPM", "WEBP") else mode)
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = r.randint(1, 8)  # libtiff writes no other
    options = {"compression": r.choice(["raw", "tiff_lzw", "tiff_adobe_deflate"])} if kind == "TIFF" else {}
    picture.save(stream, kind, **({"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "TIFF") else {}), **options)
    path = folder / "x.png"
    path.write_bytes(mutate(r, stream.getvalue()))
    wanted = r.randint(1, 50), r.randint(1, 50)

    def read() -> None:
        got = as_tensor(centred(read_picture(path), wanted))
        assert got.shape == (3, *wanted)

    return read


def cifar_case(r: random.Random, folder: Path) -> Callable[[], object]:
    binary, packed = r.random() < 0.5, r.random() < 0.5
    home = "cifar-10-batches-bin" if binary else "cifar-10-batches-py"
    files = {}
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        pixels, labels = np.frombuffer(r.randbytes(2 * 3072), np.uint8).reshape(2, 3072), [r.randrange(10) for _ in range(2)]
        if binary:
            files[f"{name}.bin"] = b"".join(bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True))
        else:
            files[name] = pickle.dumps({"data": pixels, "labels": labels}, r.choice([2, 3, 4]))
    names = [f"class{c}" for c in range(10)]
    meta = (
        ("batches.meta.txt", "\n".join(names).encode()) if binary else ("batches.meta", pickle.dumps({"label_names": names}, 2))
    )
    files[meta[0]] = meta[1]
    bad = r.choice(sorted(files))
    if not packed or r.random() < 0.7:
        files[bad] = mutate(r, files[bad])
    root = Path(tempfile.mkdtemp(dir=folder))
    if not packed:
        (root / home).mkdir()
        for name, content in files.items():
            (root / home / name).write_bytes(content)
        return lambda: load_data("cifar10", root=root)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=r.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{home}/{name}")
            member.size = len(content)
            if r.random() < 0.2:
                member.pax_headers = {"comment": "x" * r.randint(1, 2000)}
            archive.addfile(member, io.BytesIO(content))
    inside = mutate(r, stream.getvalue()) if r.random() < 0.5 else stream.getvalue()
    outside = gzip.compress(inside, 1)
    path = root / f"cifar-10-{'binary' if binary else 'python'}.tar.gz"
    path.write_bytes(mutate(r, outside) if r.random() < 0.5 else outside)
    return lambda: load_data("cifar10", root=root)


def recipe_case(r: random.Random, folder: Path) -> Callable[[], object]:
    cell = r.choice(["cifar100/rn56-rn20/letkd-2", "imagenet/rn34-rn18/kd", "digits/tiny/ce", "cifar100/wrn40-2-snv1/crd"])
    text = tomli_w.dumps(resolve(cell).model_dump(exclude_none=True))
    for _ in range(r.randint(1, 4)):
        lines = text.split("\n")
        at = r.randrange(len(lines))
        match r.randrange(5):
            case 0 if "=" in lines[at]:
                lines[at] = f"{lines[at].partition('=')[0]}= {r.choice(WORDS)}"
            case 1:
                lines.insert(at, r.choice(WORDS))
            case 2:
                lines.insert(at, r.choice(lines))
            case 3:
                del lines[at]
            case 4:
                spot = r.randint(0, len(lines[at]))
                lines[at] = lines[at][:spot] + r.choice(WORDS) + lines[at][spot:]
        text = "\n".join(lines)
    content = text.encode("utf-8", "surrogatepass")
    path = folder / "own.toml"
    path.write_bytes(mutate(r, content) if r.random() < 0.5 else content)
    return lambda: resolve(path, method=r.choice([None, "kd", "letkd-1"]))


CASES = {"image": image_case, "cifar": cifar_case, "recipe": recipe_case}


def run(kind: str, seed: int, folder: Path) -> str:
    """`read`, `refused`, or what went wrong."""
    case = CASES[kind](random.Random(f"{kind} {seed}"), folder)
    try:
        case()
        return "read"
    except LetkdError as error:
        return "refused" if str(error).strip() and len(str(error)) < 5000 else "a bad sentence"
    except Exception:
        return traceback.format_exc()


def main(count: int, first: int = 0) -> int:
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in range(first, first + count):
        kind = list(CASES)[seed % len(CASES)]
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(kind, seed, Path(folder))
        if outcome not in ("read", "refused"):
            print(f"{kind} {seed}: {outcome}", file=sys.stderr)
            outcome = "unexpected"
        outcomes[kind, outcome] += 1
    for (kind, outcome), n in sorted(outcomes.items()):
        print(f"{kind:8} {outcome:12} {n:,}")
    return int(any(outcome == "unexpected" for _, outcome in outcomes))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(*map(int, sys.argv[1:])))
