"""Evaluating a network: a run's student, a student file, or any network with any weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from letkd.data import Dataset, Loader, load_data
from letkd.errors import DataError, RunError, nearest
from letkd.files import must_be_utf8
from letkd.models import create_model, list_models
from letkd.runs.evaluate import Accuracy, evaluate
from letkd.runs.folder import RunFolder
from letkd.student import load_student, read_header
from letkd.taps import Taps, as_logits, run_once
from letkd.train.build import read_data

Channels = Sequence[float]


def evaluate_student(
    what: Path,
    *,
    data: str | None,
    root: Path | None,
    split: str,
    student: str | None = None,
    mean: Channels | None = None,
    std: Channels | None = None,
) -> Accuracy:
    """Accuracy of a run's student, or of a student file, on a split of the run's data set or of the one named.

    Args:
        student: the network's name where it is not of the zoo (no code is run because a file names it), or where the file
            holds plain weights.
        mean, std: of each channel, where the file's own or the data set's are not meant.
    """
    path = RunFolder(what).student if what.is_dir() else must_be_utf8(what)
    if not path.is_file():
        raise RunError(_nothing_there(what, student))
    if student is not None and not _is_student_file(path):
        return evaluate_network(student, path, data=data, root=root, split=split, mean=mean, std=std)
    images = data_of(path, data=data, root=root, mean=mean, std=std)
    return _on_split(load_student(path, model=student), images, split)


def data_of(
    path: Path, *, data: str | None, root: Path | None, mean: Channels | None = None, std: Channels | None = None
) -> Dataset:
    """The data set of a student file: the one named, or that of the run in whose folder it lies.

    Args:
        mean, std: of each channel; the file's where not given.
    """
    header = read_header(path)
    images = _images(path, data, root)
    if images.num_classes != header["num_classes"]:
        raise DataError(
            f"{path} has {header['num_classes']} classes and {images.name} {images.num_classes}; name the data it was trained on"
        )
    return _normalised(images, mean or header.get("mean"), std or header.get("std"))


def evaluate_network(
    model: str,
    weights: Path,
    *,
    data: str | None,
    root: Path | None,
    split: str,
    mean: Channels | None = None,
    std: Channels | None = None,
) -> Accuracy:
    """Accuracy of a network, by the name that `create_model` knows it by, with weights from a file.

    Args:
        mean, std: of each channel, as the weights were trained with; the data set's where not given.
    """
    if data is None:
        raise RunError(f"{weights} does not say what it was trained on: name the data set with --data")
    images = _normalised(load_data(data, root=root), mean, std)
    return _on_split(create_model(model, num_classes=images.num_classes, weights=weights), images, split)


def _nothing_there(what: Path, student: str | None) -> str:
    name = str(what)
    if name in list_models() or ":" in name:
        return f"{name} is a network without weights; name them with --weights FILE"
    if what.is_dir():
        name = RunFolder(what).student.name
        return f"{what} is no finished run: it has no {name}; finish it with the command that started it"
    known = f"; the nearest networks are {nearest(name, list_models())}" if student is None and what.parent == Path() else ""
    state = "is not a plain file" if what.exists() else "does not exist"
    return f"{what} {state}{known}; name a run folder, the file of a student, or a network with --weights FILE"


def _images(path: Path, data: str | None, root: Path | None) -> Dataset:
    run = RunFolder(path.parent)
    recipe = run.recipe if run.exists else None
    if data is not None and (recipe is None or data != recipe.data.name):
        return load_data(data, root=root)
    if recipe is None:
        raise RunError(f"{path} lies outside a run folder: name the data set with --data")
    # its own data set, though it is named: split as the run did, so that no image it learnt from counts as held out
    if root is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": str(root)})})
    return read_data(recipe)


def _normalised(images: Dataset, mean: Channels | None, std: Channels | None) -> Dataset:
    values = {"mean": mean, "std": std}
    for name, given in values.items():
        if given is not None and (len(given) != 3 or (name == "std" and min(given) <= 0)):
            raise DataError(
                f"{name} is {', '.join(f'{value:g}' for value in given)}, and it must be 3 numbers, one a channel"
                f"{', above 0' if name == 'std' else ''}"
            )
    return replace(images, **{name: tuple(given) for name, given in values.items() if given is not None})


def _on_split(model: nn.Module, images: Dataset, split: str) -> Accuracy:
    part = getattr(images, split)
    if not len(part):
        raise DataError(f"the {split} split of {images.name} is empty in this run; choose another with --split")
    example = torch.zeros(1, 3, *part.image_size)
    C = as_logits(run_once(Taps(model, {}), example)[0], model).shape[1]
    if images.num_classes != C:
        raise DataError(f"{type(model).__name__} gives {C} logits and {images.name} has {images.num_classes} classes")
    loader = Loader(part, 128, mean=images.mean, std=images.std)
    return evaluate(model, loader, description=f"evaluating on {split}")


def _is_student_file(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            return "letkd" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False
