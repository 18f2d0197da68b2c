"""The student to be shipped, from a finished run or a student file, with its facts and, if readable, its data."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor, nn

from letkd.data import AnySplit, Augment, Dataset
from letkd.deploy.runners import with_size
from letkd.distiller.facts import Facts, facts_from
from letkd.distiller.student import load_student, read_header
from letkd.errors import DataError, RunError
from letkd.files import must_be_utf8
from letkd.models.base import is_code
from letkd.progress import say
from letkd.runs.folder import RunFolder
from letkd.training.students import data_of

LAST, AVERAGED, PRUNED = "last epoch", "averaged weights", "after pruning"


@dataclass(frozen=True)
class Measured:
    """A measured test accuracy.

    Args:
        top1: in per cent.
        data: name of the data set.
        weights: the weights that were measured: `LAST`, `AVERAGED` or `PRUNED`.
    """

    top1: float
    data: str
    weights: str


@dataclass(frozen=True)
class Source:
    """A student to be shipped.

    Args:
        path: its file.
        student: in eval mode.
        facts: about its input and classes.
        data: the images it was trained on, with or without labels; None if they are not available.
        pruned: whether the student was pruned, so that it differs from that in the file.
        measured: test accuracy after pruning; None if the student was not pruned, or without labels.
        name: of the network, as `create_model` built it.
    """

    path: Path
    student: nn.Module
    facts: Facts
    data: Dataset | None
    pruned: bool = False
    measured: Measured | None = None
    name: str = ""


def open_source(
    what: Path,
    *,
    student: str | None = None,
    data: str | None = None,
    root: Path | None = None,
    size: tuple[int, int] | None = None,
) -> Source:
    """Open a finished run or a student file.

    Args:
        student: name of the network, if it is not in the zoo.
        data: name of the data set; default: that of the run.
        root: folder of its files, if it has moved.
        size: of the images; default: that of the data, then that of the network.
    """
    path = finished(RunFolder(what)).student if what.is_dir() else must_be_utf8(what)
    if not path.is_file():
        raise RunError(f"no run folder or student file {path}; check the path")
    network = load_student(path, model=student)
    header = read_header(path)
    facts = facts_from(header, path)
    images = None
    if data is not None or RunFolder(path.parent).exists:
        try:
            images = data_of(path, data=data, root=root)
        except DataError as error:
            if data is not None:
                raise
            say(f"the run's data could not be read ({error}); continuing without it")
    if images is not None:
        facts = facts.replace(size=facts.size or images.train.image_size, resize=facts.resize or images.train.resize)
        facts = facts.replace(classes=facts.classes or images.classes)
        facts = facts.replace(mean=facts.mean or images.mean, std=facts.std or images.std)
    facts = with_size(facts.at_size(size), network)
    return Source(path, network, facts, images, name=student or header["model"])


def measured_in_run(path: Path) -> Measured | None:
    """The test accuracy that a run measured for this student file of its folder; None for other files, and without labels."""
    run = RunFolder(path.parent)
    result = run.result if run.exists else None
    if result is None:
        return None
    top1, weights = {
        run.student.name: (result.last_test, LAST),
        run.averaged_student.name: (result.ema_test, AVERAGED),
    }.get(path.name, (None, ""))
    return None if top1 is None else Measured(top1, run.recipe.data.name, weights)


def finished(folder: RunFolder) -> RunFolder:
    """Return the folder if it holds a finished run; otherwise raise an error that says how to finish it."""
    path = folder.path
    if not folder.exists:
        runs = [run.name for run in RunFolder.children(path)]
        hint = f"; it contains the runs {', '.join(runs[:4])}: name one of them" if runs else ""
        raise RunError(f"{path} is not a run folder: it contains no {folder.RECIPE}{hint}")
    if folder.result is not None:
        return folder
    done = max((row["epoch"] for row in folder.rows()), default=0)
    epochs = folder.epochs
    state = f"not finished: {done} of {epochs} epochs are done" if done else f"not trained: none of its {epochs} epochs is done"
    networks = (folder.recipe.student, folder.recipe.teacher)
    code = [table.model for table in networks if table is not None and is_code(table.model)]
    trust = ["--trust"] if code else []
    command = shlex.join(["letkd", "train", str(folder.recipe_file), "--out", str(path), *trust])
    runs = f", which runs {' and '.join(dict.fromkeys(code))}" if code else ""
    raise RunError(f"{path} is {state}; finish it with `{command}`{runs}")


def images_at(split: AnySplit, index: Int64[Tensor, " n"]) -> UInt8[Tensor, "n 3 h w"]:
    """The images of a split at these indices, without augmentation."""
    return torch.cat(list(split.read([(index, ())], Augment())))
