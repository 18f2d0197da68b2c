"""Evaluation of a run's student, a student file, or any network with any weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from letkd.batch import input_size_of
from letkd.data import Dataset, FileSplit, Loader, load_data
from letkd.data.base import Reading, Size
from letkd.data.check import LISTS
from letkd.data.loader import eval_batch
from letkd.distiller.facts import Facts, facts_from
from letkd.distiller.student import is_student_file, load_student, read_header
from letkd.errors import DataError, RunError, nearest
from letkd.files import must_be_utf8
from letkd.models import create_model, list_models
from letkd.models.extras import set_image_size
from letkd.progress import say
from letkd.recipes.schema import Recipe
from letkd.runs.evaluation import Accuracy, evaluate
from letkd.runs.folder import RunFolder
from letkd.taps import Taps, as_logits, run_once
from letkd.training.build import read_data

Channels = Sequence[float]
LABELLED = {"unlabelled": None, "unlabelled_share": None}  # the data of a run without the images that it added without labels


def evaluate_student(
    what: Path,
    *,
    data: str | None,
    root: Path | None,
    split: str,
    student: str | None = None,
    mean: Channels | None = None,
    std: Channels | None = None,
    size: Size | None = None,
) -> Accuracy:
    """Accuracy of a run's student, or of a student file, on a split of the run's data set or of `data`.

    Args:
        student: the network's name, if it is not a built-in model (code is never run only because a file names it) or if the file holds
            plain weights.
        mean, std: per channel; default: those of the file or of the data set.
        size: of the images; default: the student's training size.
    """
    path = RunFolder(what).student if what.is_dir() else must_be_utf8(what)
    if not path.is_file():
        raise RunError(_missing_message(what, student))
    if student is not None and not is_student_file(path):
        return evaluate_network(student, path, data=data, root=root, split=split, mean=mean, std=std, size=size)
    images = data_of(path, data=data, root=root, mean=mean, std=std, size=size, labelled_only=True)
    must_have_labels(images)
    if own_recipe(path, data) is None:
        tell_default_split(images, split)
    network = load_student(path, model=student)
    known_size = size or facts_from(read_header(path), path).size
    if known_size is None and not RunFolder(path.parent).exists:
        images = _at_network_size(images, network)
    return _on_split(network, images, split)


def data_of(
    path: Path,
    *,
    data: str | None,
    root: Path | None,
    mean: Channels | None = None,
    std: Channels | None = None,
    size: Size | None = None,
    labelled_only: bool = False,
) -> Dataset:
    """The data set for a student file: `data`, or that of the run folder that contains the file. It may have no labels.

    Args:
        mean, std: per channel; default: those in the file.
        size: of the images; default: that in the file.
        labelled_only: as for `images_for`.
    """
    facts = facts_from(read_header(path), path)
    images = images_for(path, facts, data=data, root=root, size=size, labelled_only=labelled_only)
    if images.has_labels:
        must_be_the_same_classes(path, facts, images)
    return _normalised(images, mean or facts.mean, std or facts.std)


def must_be_the_same_classes(path: Path, facts: Facts, images: Dataset) -> None:
    """Raise if the data set has other classes than the student, or in another order."""
    if facts.num_classes != images.num_classes:
        raise DataError(
            f"{path} has {facts.num_classes} classes and {images.name} has {images.num_classes}; name the data set it was trained on"
        )
    for own, other in zip(facts.classes, images.classes, strict=False):
        if own != other:
            raise DataError(
                f"{path} has the class {own!r:.60} in place of {other!r:.60} in {images.name}; name the data set it was trained on"
            )


def must_have_labels(images: Dataset) -> None:
    """Raise if the data set has no labels."""
    if not images.has_labels:
        raise DataError(
            f"{images.name} has no labels, so no accuracy can be computed; name labelled images with --data, or probe the student's "
            "features with `letkd train … --probe DATA`"
        )


def own_recipe(path: Path, data: str | None) -> Recipe | None:
    """The recipe of the run folder that contains the file; None without one, or if `data` names another data set than the run's."""
    run = RunFolder(path.parent)
    recipe = run.recipe if run.exists else None
    return recipe if recipe is not None and data in (None, recipe.data.name) else None


def tell_default_split(images: Dataset, split: str) -> None:
    """Print that the split is not known to be that of the training, unless it is the test split, which never changes."""
    if split != "test":
        say(
            f"the {split} split of {images.name} is the data set's default one, not that of a run; the network may have been trained on "
            "these images"
        )


def evaluate_network(
    model: str,
    weights: Path,
    *,
    data: str | None,
    root: Path | None,
    split: str,
    mean: Channels | None = None,
    std: Channels | None = None,
    size: Size | None = None,
) -> Accuracy:
    """Accuracy of a network, by its name in `create_model`, with weights from a file.

    Args:
        mean, std: per channel, as in the training of the weights; default: those in the weights file, else those of the data set.
        size: of the images; default: that in the weights file, for `folder` also that of the network (`input_size`), else that of
            the data set.
    """
    if data is None:
        raise RunError(f"{weights} does not name its training data: name the data set with `data=`")
    facts = facts_from(read_header(weights), weights) if is_student_file(weights) else None
    images = _load(data, root, size, facts)
    must_have_labels(images)
    if facts is not None:
        must_be_the_same_classes(weights, facts, images)
        mean, std = mean or facts.mean, std or facts.std
    images = _normalised(images, mean, std)
    tell_default_split(images, split)
    network = create_model(model, num_classes=images.num_classes, weights=weights)
    if size is None and (facts is None or facts.size is None):
        images = _at_network_size(images, network)
    return _on_split(network, images, split)


def _missing_message(what: Path, student: str | None) -> str:
    name = str(what)
    if name in list_models() or ":" in name:
        return f"{name} is a network without weights; name them with `weights=FILE`"
    if what.is_dir():
        if runs := [run.name for run in RunFolder.children(what)]:
            return f"{what} is not a run but contains the runs {', '.join(runs[:4])}: name one of them"
        name = RunFolder(what).student.name
        return f"{what} is not a finished run: it has no {name}; run the command that started it again to finish it"
    known = f"; the nearest networks are {nearest(name, list_models())}" if student is None and what.parent == Path() else ""
    state = "is not a plain file" if what.exists() else "does not exist"
    return f"{what} {state}{known}; name a run folder, the file of a student, or a network with `weights=FILE`"


def _load(data: str, root: Path | None, size: Size | None, facts: Facts | None) -> Dataset:
    """A data set at `size`, or at the training size of the weights, or at its own size."""
    if facts is not None and facts.size is not None and data in LISTS:
        facts = facts.at_size(_sides(size))
        return load_data(data, root=root, size=facts.size, resize=facts.resize)
    trained = None if facts is None or size is not None else facts.size
    images = load_data(data, root=root, size=size)
    if trained is not None and trained != images.image_size:
        say(
            f"the weights were trained on images of {_size_text(trained)}, but those of {data} are {_size_text(images.image_size)}"
        )
    return images


def _at_network_size(images: Dataset, network: nn.Module) -> Dataset:
    """A folder of images, which has no fixed size, at the input size of the network."""
    if images.name != "folder":
        return images
    size = input_size_of(network)
    if size is None:
        now = _size_text(images.image_size)
        say(f"{type(network).__name__} does not define its input size: evaluated at {now}; set another with `size=`")
        return images
    splits = {name: getattr(images, name) for name in ("train", "val", "test")}
    sized = {name: replace(split, size=size[1:]) for name, split in splits.items() if isinstance(split, FileSplit)}
    return replace(images, **sized)


def _size_text(size: tuple[int, int]) -> str:
    return "x".join(map(str, size))


def images_for(
    path: Path,
    facts: Facts,
    *,
    data: str | None,
    root: Path | None,
    size: Size | None = None,
    labelled_only: bool = False,
) -> Dataset:
    """The data set for a student or exported file, split as in the run that the file belongs to.

    Args:
        facts: those in the file.
        data: its name; default: that of the run folder that contains the file.
        size: of image files; default: that in the file.
        labelled_only: leave out images that the run added without labels (`data.unlabelled`).
    """
    recipe = own_recipe(path, data)
    if recipe is None and data is not None:
        return _load(data, root, size, facts)
    if recipe is None:
        raise RunError(f"{path} is not in a run folder: name the data set with `data=`")
    # The run's own data set: split as in the run, so that no training image counts as held out.
    of_file = facts.size if recipe.data.name in LISTS else None
    given = {"root": None if root is None else str(root), "size": size or of_file, "resize": _resize(recipe, facts, size)}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if recipe.data.unlabelled is not None and not labelled_only:
        try:
            return read_data(_with_data(recipe, changes))
        except DataError as error:
            images = read_data(_with_data(recipe, changes | LABELLED))
            say(f"the images without labels could not be read ({error}); continuing without them")
            return images
    return read_data(_with_data(recipe, changes | LABELLED))


def _resize(recipe: Recipe, facts: Facts, size: Size | None) -> int | None:
    """The recipe's `resize`, in proportion to `size` or to the size in the file; None if the recipe sets none."""
    if recipe.data.resize is None or recipe.data.name not in LISTS:
        return recipe.data.resize
    of_run = facts.replace(size=_sides(recipe.data.size) or facts.size, resize=recipe.data.resize)
    return of_run.at_size(_sides(size) or facts.size).resize


def _sides(size: Size | None) -> tuple[int, int] | None:
    return None if size is None else Reading(size=size).sides


def _with_data(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})


def _normalised(images: Dataset, mean: Channels | None, std: Channels | None) -> Dataset:
    values = {"mean": mean, "std": std}
    for name, given in values.items():
        if given is not None and (len(given) != 3 or (name == "std" and min(given) <= 0)):
            raise DataError(
                f"{name} is {', '.join(f'{value:g}' for value in given)}, but it must be 3 numbers, one per channel"
                f"{', above 0' if name == 'std' else ''}"
            )
    return replace(images, **{name: tuple(given) for name, given in values.items() if given is not None})


def _on_split(model: nn.Module, images: Dataset, split: str) -> Accuracy:
    part = getattr(images, split)
    if not len(part):
        raise DataError(f"the {split} split of {images.name} is empty here; choose another with `split=`")
    example = torch.zeros(1, 3, *part.image_size)
    set_image_size(model, part.image_size)
    C = as_logits(run_once(Taps(model, {}), example)[0], model).shape[1]
    if images.num_classes != C:
        raise DataError(f"{type(model).__name__} gives {C} logits and {images.name} has {images.num_classes} classes")
    loader = Loader(part, eval_batch(part.image_size), mean=images.mean, std=images.std)
    return evaluate(model, loader, description=f"evaluating on {split}")
