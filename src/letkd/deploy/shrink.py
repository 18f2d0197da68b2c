"""Pruning a student on its own data: choice of the images, and effect on accuracy and speed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from letkd.data import AnySplit, Dataset, Loader
from letkd.data.base import stratified
from letkd.data.loader import eval_batch
from letkd.deploy.prune import Pruned, prune_auto, prune_to, prune_unused
from letkd.deploy.source import PRUNED, Measured, Source
from letkd.deploy.speed import interleaved
from letkd.errors import ExportError
from letkd.layer.folded import fold_student
from letkd.progress import say
from letkd.runs.evaluation import evaluate

BATCHES = (1, 128)


@dataclass(frozen=True)
class Shrunk:
    """Effect of pruning.

    Args:
        layers: the pruned layers.
        accuracy: in per cent before and after, by split; empty without labels.
        seconds: per forward pass before and after, by batch size.
    """

    layers: list[Pruned]
    accuracy: dict[str, tuple[float, float]]
    seconds: dict[int, tuple[float, float]]


def shrink(source: Source, ask: str, *, tolerance: float = 0.1) -> tuple[Source, Shrunk]:
    """Fold a student and prune its KD layers.

    Args:
        ask: `unused` removes the templates that never fire on the training images; `auto` keeps the fewest within the tolerance; a
            number keeps that many in every layer.
        tolerance: percentage points of validation accuracy that `auto` may lose.

    Only `auto` needs labels. Without them, no accuracy is measured.
    """
    if source.data is None:
        raise ExportError("pruning needs the training images, but they are not available; name them with `data=` and `root=`")
    data = source.data
    if ask == "auto" and not data.has_labels:
        raise ExportError(
            f"`prune=auto` needs labels to measure the accuracy, and {data.name} has none; use `prune=unused` or a number, or name "
            "labelled images with `data=` and `root=`"
        )
    train, validation, name = hold_out(data) if data.has_labels else (data.train, data.val, "")
    loader = partial(Loader, batch_size=eval_batch(data.image_size), mean=data.mean, std=data.std)

    def accuracy(student: nn.Module, split: AnySplit = validation) -> float:
        return evaluate(student, loader(split), description="accuracy").top1

    ways: dict[str, Callable] = {"unused": prune_unused, "auto": partial(prune_auto, accuracy=accuracy, tolerance=tolerance)}
    if ask not in ways and not ask.isdecimal():
        raise ExportError(f"`prune={ask}`: use {', '.join(ways)}, or the number of templates to keep per layer")
    prune = ways[ask] if ask in ways else partial(prune_to, K=int(ask))
    before = fold_student(source.student)
    after, layers = prune(before, loader(train))
    splits = {key: part for key, part in ((name, validation), ("test", data.test)) if data.has_labels and len(part)}
    accuracies = {key: (accuracy(before, part), accuracy(after, part)) for key, part in splits.items()}
    seconds = {}
    for batch in BATCHES:
        x = next(iter(Loader(train, min(batch, len(train)), mean=data.mean, std=data.std))).x
        taken = interleaved({"before": partial(before, x), "after": partial(after, x)})
        seconds[len(x)] = (taken["before"], taken["after"])
    measured = Measured(accuracies["test"][1], data.name, PRUNED) if "test" in accuracies else None
    return replace(source, student=after, pruned=True, measured=measured), Shrunk(layers, accuracies, seconds)


def hold_out(data: Dataset) -> tuple[AnySplit, AnySplit, str]:
    """Training and validation images; a tenth of the labelled training images if there is no validation split."""
    if len(data.val):
        return data.train, data.val, "validation"
    mask = stratified(data.train.labels, lambda n: max(int(0.1 * n + 0.5), 1), seed=(0, 3)) & (data.train.labels >= 0)
    say("there is no validation split: a tenth of the training images, which the student was trained on, is used instead")
    return data.train.subset(~mask), data.train.subset(mask), "a tenth of the training split"
