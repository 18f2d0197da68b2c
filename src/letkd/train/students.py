"""Evaluating a student file, with or without the run that made it."""

from dataclasses import replace
from pathlib import Path

from letkd.data import Loader, load_data
from letkd.errors import DataError, RunError
from letkd.student import load_student, read_header
from letkd.train.build import read_data
from letkd.train.evaluate import Accuracy, evaluate
from letkd.train.runs import recipe_of


def evaluate_student(what: Path, *, data: str | None, root: Path | None, split: str, student: str | None = None) -> Accuracy:
    """Accuracy of a run's student, or of a student file, on a split of the run's data set or of the one named.

    Args:
        student: the network's name where it is not of the zoo; no code is run because a file names it.
    """
    path = what / "student.safetensors" if what.is_dir() else what
    if not path.exists():
        why = "is no finished run: it has no student.safetensors" if what.is_dir() else "does not exist"
        raise RunError(f"{what} {why}; finish it with the command that started it")
    header = read_header(path)
    if data is not None:
        images = load_data(data, root=root)
    elif (path.parent / "recipe.toml").exists():
        recipe = recipe_of(path.parent)
        if root is not None:
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": str(root)})})
        images = read_data(recipe)
    else:
        raise RunError(f"{what} lies outside a run folder: name the data set with --data")
    if images.num_classes != header["num_classes"]:
        raise DataError(
            f"{path} has {header['num_classes']} classes and {images.name} {images.num_classes}; name the data it was trained on"
        )
    images = replace(images, mean=tuple(header.get("mean", images.mean)), std=tuple(header.get("std", images.std)))
    part = getattr(images, split)
    if not len(part):
        raise DataError(f"the {split} split of {images.name} is empty in this run; choose another with --split")
    return evaluate(
        load_student(path, model=student),
        Loader(part, 128, mean=images.mean, std=images.std),
        description=f"evaluating on {split}",
    )
