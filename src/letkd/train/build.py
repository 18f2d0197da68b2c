"""From a recipe to what a run works with: data, loaders, networks, the distiller and its offline parts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from letkd.data import AnySplit, Augment, CropFlip, Dataset, Loader, ResizedCropFlip, RotateFlip, load_data
from letkd.distiller import Distiller
from letkd.errors import RecipeError, nearest
from letkd.methods import METHODS
from letkd.methods.base import collected
from letkd.models import create_model
from letkd.processes import rank, world
from letkd.recipes.schema import Data, Network, Recipe
from letkd.taps import as_taps
from letkd.teacher import fold_teacher
from letkd.train.optim import freeze

AUGMENTS: dict[str, Callable[[Data, bool], Augment]] = {
    "none": lambda table, flip: Augment(),
    "crop": lambda table, flip: CropFlip(pad=table.crop, mode=table.padding, flip=flip),
    "rotate": lambda table, flip: RotateFlip(degrees=table.rotation, flip=flip),
    "resized-crop": lambda table, flip: ResizedCropFlip(flip=flip),
}


def read_data(recipe: Recipe) -> Dataset:
    """The recipe's data set, with the recipe's normalisation where it has one of its own."""
    table = recipe.data
    data = load_data(
        table.name,
        root=table.root,
        val=table.val,
        fraction=table.fraction,
        size=table.size,
        resize=table.resize,
        workers=table.workers,
        corrupt=table.corrupt,
    )
    flip = data.flip if table.flip is None else table.flip
    return replace(data, mean=table.mean or data.mean, std=table.std or data.std, flip=flip)


def train_loader(recipe: Recipe, data: Dataset, *, rank: int = 0, world: int = 1) -> Loader:
    """Shuffled and augmented, the last incomplete batch dropped, as the authors do; of several processes, one's part."""
    size = min(recipe.data.batch_size, len(data.train))
    if size % world:
        raise RecipeError(
            f"data.batch_size is {size}, which {world} processes cannot share evenly; choose a multiple of {world}"
        )
    augment = AUGMENTS[recipe.data.augment](recipe.data, data.flip)
    augment.check(*data.image_size)
    return Loader(
        data.train,
        size,
        mean=data.mean,
        std=data.std,
        augment=augment,
        shuffle=True,
        drop_last=True,
        seed=recipe.train.seed,
        rank=rank,
        world=world,
        views=recipe.train.cache_views or 0,
    )


def eval_loader(recipe: Recipe, data: Dataset, split: AnySplit, *, rank: int = 0, world: int = 1) -> Loader:
    """In order, not augmented, each image once: for evaluation and for the offline fits; of several processes, one's part."""
    size = max(recipe.data.batch_size, 128)
    return Loader(split, size, mean=data.mean, std=data.std, rank=rank, world=world)


def build_distiller(recipe: Recipe, data: Dataset) -> Distiller:
    """Student, teacher and methods as the recipe names them."""
    methods, wrong = [], []
    for name, table in recipe.methods.items():
        with collected(wrong):
            if name not in METHODS:
                raise RecipeError(f"there is no method {name!r} (nearest: {nearest(name, METHODS)})")
            methods.append(METHODS[name].from_recipe(table))
    if wrong:
        raise RecipeError("; ".join(wrong))
    student = build_network(recipe.student, data)
    freeze(student, recipe.student.freeze)
    example = torch.zeros(1, 3, *data.image_size)
    if not methods:
        return _laid_out(Distiller(student, weights=recipe.weights, example=example), recipe)
    if recipe.teacher is None or recipe.teacher.weights is None:
        raise RecipeError(
            f"{', '.join(recipe.methods)} needs a trained teacher: name its weights with --teacher-weights (train one with "
            f"`letkd train --student {recipe.teacher.model if recipe.teacher else 'MODEL'} --method ce …`)"
        )
    teacher = build_network(recipe.teacher, data)
    if recipe.train.fold_teacher:
        teacher = fold_teacher(teacher, as_taps(teacher, recipe.teacher.taps), example)
    distiller = Distiller(
        student,
        teacher,
        methods,
        weights=recipe.weights,
        student_taps=recipe.student.taps,
        teacher_taps=recipe.teacher.taps,
        example=example,
        images=len(data.train),
        fused=recipe.train.fused,
    )
    if recipe.train.cache_views:
        distiller.lessons()  # a method that no cache serves is told before any work
    return _laid_out(distiller, recipe)


def _laid_out(distiller: Distiller, recipe: Recipe) -> Distiller:
    if recipe.train.channels_last:
        distiller.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - torch's own stub lacks this form
    return distiller


def build_network(table: Network, data: Dataset) -> nn.Module:
    """A network with its weights, if it has any."""
    return create_model(table.model, num_classes=data.num_classes, weights=table.weights)


def fit(distiller: Distiller, recipe: Recipe, data: Dataset, folder: str | Path, *, force: bool = False) -> None:
    """Run, or find on disk, the offline parts: one pass over the training images, in order, not augmented."""
    if not distiller.fittings():
        return
    name = f"{data.name} {data.train.fingerprint()} mean {data.mean} std {data.std}"
    weights = [recipe.weights, *(phase.weights for phase in recipe.phases)]
    terms = {part.term for part in distiller.fittings().values() if any(table.get(part.term, 1.0) for table in weights)}
    loader = eval_loader(recipe, data, data.train, rank=rank(), world=world())
    distiller.fit(loader, folder=folder, data=name, force=force, terms=terms)
