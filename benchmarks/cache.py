"""An epoch that reads from a `TeacherCache`, relative to the same epoch without and with the teacher.

    python benchmarks/cache.py [--teacher resnet56] [--student resnet20] [--K 4096] [--batch 64] [--rounds 7]
                               [--rows letkd-1,letkd-2,kd,crd] [--check | --record]

`given` is the same step with the teacher's answers already in memory: student, KD layers and losses only. Images come from the
loader in all cases. Every round runs one epoch of every case in turn; the table shows medians. It also shows the disk space per
view of CIFAR-100's 50,000 images, extrapolated from the images used here, and the difference between the cached and the
uncached loss. Images and teacher are random; the labels are about as sharp as those of a trained teacher (see `step.py`).
"""

import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch

import letkd
from letkd.data import CropFlip, Loader, Split
from letkd.distiller.cache import TeacherCache
from step import distiller
from timing import begin, compare_with_recorded, device_title, interleaved, parser, show

C, IMAGES, ALL = 100, 200, 50_000  # IMAGES: as many as `step.distiller` fits to


class Given:
    """Replaces the cache: the teacher's answers for a few batches, in turn, already in memory."""

    def __init__(self, cache: TeacherCache, batches: list[letkd.Batch]):
        self.answers = cycle([cache.read(batch) for batch in batches])

    def read(self, batch: letkd.Batch) -> tuple[dict, dict]:
        return next(self.answers)


def epoch(made: letkd.Distiller, loader: Loader, source: object) -> Callable[[], None]:
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-7, momentum=0.9)
    device = next(made.parameters()).device

    def run() -> None:
        made.cache = source  # pyright: ignore[reportAttributeAccessIssue] - only its `read` is called
        for batch in loader:
            made(batch.to(device)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def main() -> None:
    arguments = parser(__doc__, rounds=7)
    arguments.add_argument("--teacher", default="resnet56")
    arguments.add_argument("--student", default="resnet20")
    arguments.add_argument("--K", type=int, default=4096)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--rows", default="letkd-1,letkd-2,kd,crd")
    args = begin(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = letkd.create_model(args.teacher, num_classes=C)
    split = Split(torch.randint(256, (IMAGES, 3, 32, 32), dtype=torch.uint8), torch.arange(IMAGES) % C)
    options = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "augment": CropFlip(), "shuffle": True, "views": 10}
    loader = Loader(split, args.batch, drop_last=True, **options)
    shown, ratios = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for row in args.rows.split(","):
            made = distiller(row, teacher, args.student, args.K, fused=True).to(device).train()
            cache = TeacherCache(made, loader, Path(folder) / row)
            cache.prepare(0)
            bytes_ = sum(path.stat().st_size for path in (Path(folder) / row).rglob("*.safetensors"))
            batches = [batch.to(device) for batch in loader]
            cases = {
                "given": epoch(made, loader, Given(cache, batches)),
                "cache": epoch(made, loader, cache),
                "teacher": epoch(made, loader, None),
            }
            times = interleaved(cases, args.rounds)
            made.eval()
            losses = []
            for source in (None, cache):
                made.cache = source
                losses.append([made(batch).loss.item() for batch in batches])
            off = max(abs(one - two) / abs(one) for one, two in zip(*losses, strict=True))
            ratios[row] = times["cache"] / times["given"]
            ms = [f"{1e3 * times[name] / len(loader):.0f}" for name in cases]
            without = f"{times['cache'] / times['teacher']:.2f}"
            shown.append([row, *ms, f"{ratios[row]:.3f}", without, f"{bytes_ / IMAGES * ALL / 1e6:.0f}", f"{off:.1e}"])
    show(
        f"{args.teacher} → {args.student}, K={args.K}, batch {args.batch}; {device_title()}",
        ["step", "given, ms", "cache, ms", "teacher, ms", "cache / given", "cache / teacher", "MB a view", "loss off by"],
        shown,
    )
    compare_with_recorded(args, "cache", ratios)


if __name__ == "__main__":
    main()
