"""Model files damaged and forged at random: `python -m tests.support.fuzz_models --cases 5000` counts what came of them.

Every file either opens and gives logits for an image, or is refused by an error that the command line turns into one sentence.
"""

import argparse
import io
import json
import random
import sys
import tempfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from letkd.cli.main import _explain
from letkd.deploy.runners import open_model
from letkd.distiller.student import save_student
from letkd.models import create_model, load_weights
from tests.support import hostile

Case = Callable[[random.Random], bytes]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 10**6, 10**12, 10**400, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf")),
    *("", "x", "3", "\ud800", "\x1b[2J", "a" * 2000, "resnet8_tiny", "os:abort", "KDLayer", "uint8", "normalised"),
    *([], [1], [1, 2], [0.5] * 3, [0, 0, 0], ["a", "b", "c"], [[]], {}, {"a": 1}, [{}], [None] * 3, ["batch"], [10**9, 10**9]),
]
X = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)


def damaged(content: bytes, random: random.Random, *, head: int = 2000) -> bytes:
    """Cut, flipped, filled, repeated or left out somewhere, more often near the start, where headers are."""
    data = bytearray(content)
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        if not data:
            break
        at = random.randrange(len(data) if random.random() < 0.5 else min(head, len(data)))
        n = random.choice([1, 1, 2, 8, 64])
        match random.choice(["cut", "flip", "flip", "fill", "repeat", "omit"]):
            case "cut":
                del data[at:]
            case "flip":
                data[at] ^= 1 << random.randrange(8)
            case "fill":
                data[at : at + n] = bytes([random.choice([0, 255, random.randrange(256)])]) * len(data[at : at + n])
            case "repeat":
                data[at:at] = data[at : at + n]
            case "omit":
                del data[at : at + n]
    return bytes(data)


def forged(table: Any, random: random.Random) -> Any:
    """The same JSON with another value somewhere, a key too many or one too few."""
    if isinstance(table, dict) and table and random.random() < 0.9:
        key = random.choice(list(table))
        match random.choice(["inside", "inside", "omit", "more"]):
            case "inside":
                return {**table, key: forged(table[key], random)}
            case "omit":
                return {other: value for other, value in table.items() if other != key}
            case "more":
                return {**table, random.choice(["x", "batch", "dynamic", "input"]): random.choice(VALUES)}
    if isinstance(table, list) and table and random.random() < 0.5:
        at = random.randrange(len(table))
        return [*table[:at], forged(table[at], random), *table[at + 1 :]]
    return random.choice(VALUES)


def student_cases(folder: Path) -> Case:
    """Headers and bytes of a student file with a KD layer; half of them without the checksum that would show the damage."""
    from letkd import KDLayer, graft
    from letkd.distiller.student import _changes

    torch.manual_seed(0)
    student = create_model("resnet8_tiny", num_classes=3)
    graft(student, KDLayer(32, 4), after="layer3")
    facts = {"classes": ["a", "b", "c"], "mean": [0.5] * 3, "std": [0.2] * 3, "size": [8, 8], "resize": 9}
    save_student(student, folder / "honest.safetensors", model="resnet8_tiny", num_classes=3, **facts)
    whole = (folder / "honest.safetensors").read_bytes()
    header = {"format": "letkd-student-2", "model": "resnet8_tiny", "num_classes": 3, "changes": _changes(student), **facts}
    tensors = {name: value.contiguous() for name, value in student.state_dict().items()}
    bare = save(tensors, metadata={"letkd": json.dumps(header)})

    def case(random: random.Random) -> bytes:
        match random.choice(["facts", "facts", "text", "bytes", "bare"]):
            case "facts":
                return save(tensors, metadata={"letkd": json.dumps(forged(header, random))})
            case "text":
                text = damaged(json.dumps(header).encode(), random).decode("utf-8", "replace")
                return save(tensors, metadata={"letkd": text})
            case "bytes":
                return damaged(whole, random)
            case _:
                return damaged(bare, random, head=9000)

    return case


def onnx_cases(folder: Path) -> Case:
    whole, facts = hostile.honest_onnx(), json.loads(hostile.FACTS.as_json())

    def case(random: random.Random) -> bytes:
        if random.random() < 0.5:
            return damaged(whole, random, head=len(whole))
        return hostile.honest_onnx(json.dumps(forged(facts, random)))

    return case


def torch_cases(folder: Path) -> Case:
    """Zip files and, inside of them, pickles; with and without zip."""
    torch.manual_seed(0)
    state = create_model("resnet8_tiny", num_classes=3).state_dict()
    whole, legacy = hostile.torch_file(state), io.BytesIO()
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = (name for name in parts if name.endswith("data.pkl"))

    def case(random: random.Random) -> bytes:
        match random.choice(["zip", "pickle", "pickle", "legacy"]):
            case "zip":
                return damaged(whole, random)
            case "pickle":
                return hostile.as_program({**parts, pickled: damaged(parts[pickled], random, head=20_000)})
            case _:
                return damaged(legacy.getvalue(), random, head=20_000)

    return case


def program_cases(folder: Path) -> Case:
    whole = hostile.as_program(hostile.honest_program())
    return lambda random: damaged(whole, random)


def run(path: Path) -> None:
    """What the command line does with a file of this kind."""
    if path.suffix == ".pth":
        load_weights(create_model("resnet8_tiny", num_classes=3), path)
        return
    logits = open_model(path, seconds=30.0)(X)
    assert logits.shape == (1, 3)
    assert torch.isfinite(logits).all()


# File kind: how files are made, and the share of all cases. An ONNX file starts a process, which takes half a second.
KINDS: dict[str, tuple[Callable[[Path], Case], float]] = {
    ".safetensors": (student_cases, 0.42),
    ".pth": (torch_cases, 0.42),
    ".onnx": (onnx_cases, 0.08),
    ".pt2": (program_cases, 0.08),
}


def outcome(path: Path) -> str:
    """`opened`, `refused`, or `unexpected` with the error."""
    try:
        run(path)
    except Exception as error:
        if _explain(error)[1] == 2:
            return "refused"
        return f"unexpected: {''.join(traceback.format_exception(error))}"
    return "opened"


def fuzz(suffix: str, cases: int, folder: Path, seed: int = 0) -> Counter:
    """Outcomes of so many files of a kind; what is unexpected is printed, and its file kept."""
    case, counts = KINDS[suffix][0](folder), Counter()
    for number in range(cases):
        path = folder / f"case{suffix}"
        path.write_bytes(case(random.Random(f"{seed} {suffix} {number}")))
        found = outcome(path)
        counts[found.partition(":")[0]] += 1
        if found.startswith("unexpected"):
            path.rename(folder / f"unexpected-{number}{suffix}")
            print(f"case {number}{suffix}: {found}", file=sys.stderr)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    kept = Path(tempfile.mkdtemp(prefix="fuzz-"))
    total = Counter()
    for kind, (_, share) in KINDS.items():
        found = fuzz(kind, round(share * given.cases), kept, given.seed)
        print(f"{kind:<14}{dict(found)}", flush=True)
        total += found
    print(f"{'all':<14}{dict(total)}; files in {kept}")
    sys.exit(total["unexpected"] > 0)
