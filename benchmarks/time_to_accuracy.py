"""Processor time until a student first reaches an accuracy: a common recipe, relative to `--preset fast` with the cache.

    python benchmarks/time_to_accuracy.py --root DATA --teacher-weights resnet56.safetensors [--method kd] [--student resnet20]
        [--epochs 30] [--fast-epochs 12] [--views 4] [--part-epochs 2] [--ways usual,layout,fast] [--fraction 1.0] [--batch 64]
        [--fast-set data.crop=0]

The common recipe reads images one by one through PIL, runs the teacher at every step, in single precision and NCHW, divides the
learning rate by ten after 5/8, 6/8 and 7/8 of the epochs, and computes KD layers and losses as the paper writes them. Each
further variant adds one part, so the table shows the contribution of each:

    usual     as above
    batched   + images cropped and flipped as batches of tensors
    fused     + KD layers and losses in chunks of pixels
    layout    + channels last, a folded teacher
    bf16      + bf16 for both networks, if the processor has it
    cached    + the teacher run once on each of few fixed views of the images
    fast      + the preset `fast`: few epochs, linear decay of the rate to zero, weights for short runs

All variants train in one process, one epoch each in turn. Time is processor time of all threads, without evaluation; "offline" is
the fit of the labels and the views of the cache. The target is the best validation accuracy of the common recipe. Only `usual` and
`fast` are trained to the end. The parts between them are timed for `--part-epochs` epochs: they change the student by rounding,
bf16 or fixed views, so their time to the target (~) is that of as many epochs as `usual` needs. Needs the official files of
CIFAR-10 and the teacher's weights; without them, it prints a message and ends.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from letkd.batch import Batch
from letkd.cli.memory import keep_large_blocks
from letkd.data import Loader, Split
from letkd.data.base import Dataset
from letkd.distiller.cache import TeacherCache
from letkd.errors import LetkdError
from letkd.progress import set_quiet
from letkd.recipes import Recipe, resolve
from letkd.recipes.schedule import lr_factor
from letkd.runs.evaluation import evaluate
from letkd.training.build import build_distiller, eval_loader, fit, read_data, train_loader
from letkd.training.device import has_bf16
from letkd.training.fabric import launch
from letkd.training.steps import Steps
from timing import show

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # as the teacher was trained


@dataclass(frozen=True)
class Way:
    """The parts that a variant uses."""

    batched: bool = False
    fused: bool = False
    layout: bool = False
    bf16: bool = False
    cached: bool = False
    fast: bool = False


WAYS = {
    "usual": Way(),
    "batched": Way(batched=True),
    "fused": Way(batched=True, fused=True),
    "layout": Way(batched=True, fused=True, layout=True),
    "bf16": Way(batched=True, fused=True, layout=True, bf16=True),
    "cached": Way(batched=True, fused=True, layout=True, bf16=True, cached=True),
    "fast": Way(batched=True, fused=True, layout=True, bf16=True, cached=True, fast=True),
}


class ByPIL:
    """A training set read one image at a time, as by `__getitem__`: zero padding of 4, crop, flip, normalisation."""

    def __init__(self, data: Dataset, batch: int, seed: int):
        if not isinstance(data.train, Split):
            raise TypeError("ByPIL needs images in memory")
        self.pictures = list(data.train.images.permute(0, 2, 3, 1).contiguous().numpy())
        self.labels, self.batch, self.random = data.train.labels, batch, random.Random(seed)
        self.mean, self.std = (torch.tensor(value)[:, None, None] for value in (data.mean, data.std))

    def __iter__(self) -> Iterator[Batch]:
        order = self.random.sample(range(len(self.pictures)), len(self.pictures))
        for k in range(len(order) // self.batch):
            index = torch.tensor(order[k * self.batch : (k + 1) * self.batch])
            yield Batch(torch.stack([self._image(i) for i in index.tolist()]), self.labels[index], index)

    def _image(self, i: int) -> torch.Tensor:
        picture = Image.fromarray(np.pad(self.pictures[i], ((4, 4), (4, 4), (0, 0))))
        left, top = self.random.randint(0, 8), self.random.randint(0, 8)
        picture = picture.crop((left, top, left + 32, top + 32))
        picture = ImageOps.mirror(picture) if self.random.random() < 0.5 else picture
        return (torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div_(255) - self.mean) / self.std


def recipe_of(way: Way, args: argparse.Namespace) -> Recipe:
    epochs = args.fast_epochs if way.fast else args.epochs
    settings = [
        f"data.root={str(args.root)!r}",
        "data.name='cifar10'",
        f"data.mean={MEAN}",
        f"data.std={STD}",
        "data.padding='zero'",
        "data.val=0.1",
    ]
    settings += [f"data.fraction={args.fraction}", f"data.batch_size={args.batch}", f"train.epochs={epochs}"]
    settings += [
        "teacher.model='resnet56_a'",
        f"teacher.weights={str(args.teacher_weights)!r}",
        f"student.model={args.student!r}",
    ]
    settings += [f"train.fused={str(way.fused).lower()}", f"train.channels_last={str(way.layout).lower()}"]
    settings += [f"train.fold_teacher={str(way.layout).lower()}", f"train.seed={args.seed}"]
    settings += [
        f"train.precision={'auto' if way.bf16 else '32-true'}",
        f"train.bf16_teacher={'auto' if way.bf16 else 'false'}",
    ]
    if way.cached:
        settings.append(f"train.cache_views={args.views}")
    if args.method.startswith(("letkd", "quest")) and args.K:
        settings.append(f"methods.{'quest' if args.method == 'quest' else 'letkd'}.sites.penultimate.supervision.K={args.K}")
    settings += args.fast_set if way.fast else []
    return resolve("cifar100/rn56-rn20", method=args.method, preset="fast" if way.fast else None, settings=settings)


@dataclass(frozen=True)
class Point:
    """After an epoch: processor time of the offline parts, of all epochs so far, and validation accuracy in per cent."""

    offline: float
    training: float
    accuracy: float

    @property
    def used(self) -> float:
        return self.offline + self.training


def epochs_of(way: Way, args: argparse.Namespace, shared: Path) -> Iterator[Point]:
    """Train a variant and yield after every epoch."""
    began = time.process_time()
    recipe = recipe_of(way, args)
    data = read_data(recipe)
    fabric = launch(recipe)
    fabric.seed_everything(args.seed, verbose=False)
    distiller = build_distiller(recipe, data)
    fit(distiller, recipe, data, shared)
    steps = Steps(fabric, distiller, recipe)
    loader = train_loader(recipe, data)
    batches: Loader | ByPIL = loader if way.batched else ByPIL(data, args.batch, args.seed)
    if way.cached:
        distiller.cache = TeacherCache(distiller, loader, shared / "views")
        for view in range(min(loader.views, recipe.train.epochs)):
            distiller.cache.prepare(view)
    offline, training, of = time.process_time() - began, 0.0, len(loader)
    for epoch in range(1, recipe.train.epochs + 1):
        began = time.process_time()
        steps.model.train()
        loader.set_epoch(epoch)
        for k, batch in enumerate(batches):
            steps.take(replace(batch, epoch=epoch), lr_factor((epoch - 1) * of + k, recipe, of), done=k, of=of)
            distiller.checks = False
        training += time.process_time() - began
        yield Point(offline, training, evaluate(distiller.student, eval_loader(recipe, data, data.val)).top1)


def train_in_turn(names: list[str], args: argparse.Namespace) -> dict[str, list[Point]]:
    """The points of every variant; each computes its own offline parts."""
    curves: dict[str, list[Point]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        running = {name: epochs_of(WAYS[name], args, Path(folder) / name) for name in names}
        while running:
            for name in list(running):
                is_part = name not in (names[0], "fast")
                point = None if is_part and len(curves[name]) >= args.part_epochs else next(running[name], None)
                if point is None:
                    del running[name]
                    continue
                curves[name].append(point)
                print(f"{name} epoch {len(curves[name])}: {point.accuracy:.2f} % after {point.used:.0f} s of CPU", flush=True)
    return curves


def rows_of(curves: dict[str, list[Point]]) -> tuple[float, list[list[str]]]:
    """The target, and a row of the table per variant."""
    first = next(iter(curves))
    target = max(point.accuracy for point in curves[first])
    needed = next(n for n, point in enumerate(curves[first], start=1) if point.accuracy >= target)
    base = curves[first][needed - 1].used
    rows = []
    for name, curve in curves.items():
        per_epoch = curve[-1].training / len(curve)
        whole = name in (first, "fast")
        used = (
            next((point.used for point in curve if point.accuracy >= target), None)
            if whole
            else curve[-1].offline + needed * per_epoch
        )
        rows.append([
            name,
            f"{curve[-1].offline:.0f}",
            f"{per_epoch:.1f}",
            f"{max(point.accuracy for point in curve):.2f} ({len(curve)})" if whole else "",
            "not reached" if used is None else f"{'' if whole else '~'}{used:.0f}",
            "" if used is None else f"{'' if whole else '~'}{used / base:.2f}",
        ])  # fmt: skip
    return target, rows


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--root", type=Path, required=True)
    made.add_argument("--teacher-weights", type=Path, required=True)
    made.add_argument("--method", default="kd")
    made.add_argument("--student", default="resnet20")
    made.add_argument("--epochs", type=int, default=30, help="for `usual`")
    made.add_argument("--fast-epochs", type=int, default=12)
    made.add_argument(
        "--fast-set", action="append", default=[], metavar="KEY=VALUE", help="another setting of `fast`; repeatable"
    )
    made.add_argument("--views", type=int, default=4, help="fixed views of every image, for `cached` and `fast`")
    made.add_argument("--part-epochs", type=int, default=2, help="for the variants between `usual` and `fast`")
    made.add_argument("--ways", default=",".join(WAYS))
    made.add_argument("--fraction", type=float, default=1.0, help="share of the training images")
    made.add_argument("--batch", type=int, default=64)
    made.add_argument("--K", type=int, default=512, help="number of templates of letKD and QUEST at the penultimate layer")
    made.add_argument("--seed", type=int, default=0)
    args = made.parse_args()
    keep_large_blocks()
    set_quiet(True)
    if not args.teacher_weights.is_file():
        print(f"skipped: there is no file {args.teacher_weights} with the teacher's weights")
        return
    try:
        read_data(recipe_of(Way(), args))
    except LetkdError as error:
        print(f"skipped: CIFAR-10 could not be read ({error})")
        return
    target, rows = rows_of(train_in_turn(args.ways.split(","), args))
    show(
        f"{args.method}, resnet56_a → {args.student}, CIFAR-10, target {target:.2f} % on validation; CPU time, "
        f"{torch.get_num_threads()} thread(s), {'bf16' if has_bf16() else 'no bf16'}",
        ["way", "offline, s", "s per epoch", "best % (epochs)", "s to the target", "/ usual"],
        rows,
    )


if __name__ == "__main__":
    main()
