"""Pruning a student by its own data: which images decide, and what is lost and won."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from letkd.data import AnySplit, Dataset, Loader
from letkd.data.base import stratified
from letkd.data.loader import eval_batch
from letkd.deploy.prune import Pruned, prune_auto, prune_never, prune_to
from letkd.deploy.source import Source
from letkd.deploy.speed import interleaved
from letkd.errors import ExportError
from letkd.layer.folded import fold_student
from letkd.progress import say
from letkd.runs.evaluation import evaluate

BATCHES = (1, 128)


@dataclass(frozen=True)
class Shrunk:
    """What pruning did.

    Args:
        layers: that were pruned.
        held: which images decided.
        accuracy: in per cent before and after, by split.
        seconds: of a forward before and after, by batch size.
    """

    layers: list[Pruned]
    held: str
    accuracy: dict[str, tuple[float, float]]
    seconds: dict[int, tuple[float, float]]


def shrink(source: Source, ask: str, *, tolerance: float = 0.1) -> tuple[Source, Shrunk]:
    """Fold a student and prune its KD layers.

    Args:
        ask: `never` drops the templates that never fire on the training images; `auto` finds the fewest within the tolerance; a
            number keeps so many in every layer.
        tolerance: points of accuracy that `auto` may lose on the validation split.
    """
    if source.data is None:
        raise ExportError("pruning needs the training images, and they are not there; name them with `data=` and `root=`")
    train, held, name = hold_out(source.data)
    loader = partial(Loader, batch_size=eval_batch(source.data.image_size), mean=source.data.mean, std=source.data.std)

    def accuracy(student: nn.Module, split: AnySplit = held) -> float:
        return evaluate(student, loader(split), description="accuracy").top1

    ways: dict[str, Callable] = {"never": prune_never, "auto": partial(prune_auto, accuracy=accuracy, tolerance=tolerance)}
    if ask not in ways and not ask.isdecimal():
        raise ExportError(f"`prune={ask}`: say {', '.join(ways)}, or how many templates to keep in a layer")
    prune = ways[ask] if ask in ways else partial(prune_to, K=int(ask))
    before = fold_student(source.student)
    after, layers = prune(before, loader(train))
    splits = {name: held, "test": source.data.test}
    seconds = {}
    for batch in BATCHES:
        x = next(iter(Loader(train, min(batch, len(train)), mean=source.data.mean, std=source.data.std))).x
        taken = interleaved({"before": partial(before, x), "after": partial(after, x)})
        seconds[len(x)] = (taken["before"], taken["after"])
    report = Shrunk(
        layers, name, {key: (accuracy(before, part), accuracy(after, part)) for key, part in splits.items()}, seconds
    )
    return replace(source, student=after), report


def hold_out(data: Dataset) -> tuple[AnySplit, AnySplit, str]:
    """Training images and those that decide: the validation split or, where there is none, a tenth of the training images."""
    if len(data.val):
        return data.train, data.val, "validation"
    mask = stratified(data.train.labels, lambda n: max(int(0.1 * n + 0.5), 1), seed=(0, 3))
    say("there is no validation split: a tenth of the training images, which the student has seen, decides in its place")
    return data.train.subset(~mask), data.train.subset(mask), "a tenth of the training split"
