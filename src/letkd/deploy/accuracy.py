"""The accuracy of an exported file."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.data import AnySplit, Augment
from letkd.deploy.process import SECONDS
from letkd.deploy.runners import Runner, open_model
from letkd.errors import DataError
from letkd.runs.evaluation import Accuracy, evaluate
from letkd.training.students import images_for, must_be_the_same_classes, must_have_labels, own_recipe, tell_default_split

BATCH = 64


class _OfFloats(nn.Module):
    """A runner that takes float images in the range 0 to 255."""

    def __init__(self, runner: Runner):
        super().__init__()
        self.runner = runner

    def forward(self, x: Tensor) -> Tensor:
        return self.runner(x.to(torch.uint8))


def evaluate_runner(runner: Runner, split: AnySplit, *, description: str = "evaluating") -> Accuracy:
    """Accuracy of a shipped model on the raw images of a split; the model normalises them itself."""
    parts = torch.arange(len(split)).split(BATCH)

    def batches() -> Iterator[Batch]:
        for index, images in zip(parts, split.read([(part, ()) for part in parts], Augment()), strict=True):
            yield Batch(images.float(), split.labels[index], index)

    return evaluate(_OfFloats(runner), batches(), description=description)


def evaluate_file(
    path: Path, *, data: str | None, root: Path | None, split: str, trust: bool = False, seconds: float = SECONDS
) -> Accuracy:
    """Accuracy of an `.onnx` file, or with `trust` of a `.pt2` file, on a split of a data set.

    Args:
        data: name of the data set; default: that of the run folder that contains the file. The run's own data set is split as in
            the run.
        trust, seconds: as for `open_model`.
    """
    runner = open_model(path, trust=trust, seconds=seconds)
    images = images_for(path, runner.facts, data=data, root=root, labelled_only=True)
    must_have_labels(images)
    must_be_the_same_classes(path, runner.facts, images)
    part = getattr(images, split)
    if not len(part):
        raise DataError(f"the {split} split of {images.name} is empty here; choose another with `split=`")
    if own_recipe(path, data) is None:
        tell_default_split(images, split)
    return evaluate_runner(runner, part, description=f"evaluating on {split}")
