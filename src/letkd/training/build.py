"""Builds what a recipe names: data, loaders, networks, the distiller and its offline parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from letkd.data import (
    AnySplit,
    Augment,
    Chain,
    CropFlip,
    Dataset,
    Erase,
    Loader,
    Mix,
    RandAugment,
    ResizedCropFlip,
    RotateFlip,
    Strong,
    TrivialAugment,
    load_data,
)
from letkd.data.loader import eval_batch
from letkd.distiller import Distiller
from letkd.distiller.student import is_student_file, load_student
from letkd.distributed.processes import rank, world
from letkd.errors import LetkdError, RecipeError, UnsupportedPair, nearest
from letkd.methods import METHODS
from letkd.methods.base import collected
from letkd.models import create_model
from letkd.models.extras import set_image_size
from letkd.progress import say
from letkd.recipes.schema import Data, Network, Recipe
from letkd.taps import Tap, Taps, as_taps, run_once
from letkd.taps.find import proposed_taps
from letkd.taps.fold_bn import fold_teacher
from letkd.taps.outputs import is_backbone, logits_in
from letkd.training.device import choices
from letkd.training.optim import freeze
from letkd.training.teachers import build_teacher

AUGMENTS: dict[str, Callable[[Data, bool], Augment]] = {
    "none": lambda table, flip: Augment(),
    "crop": lambda table, flip: CropFlip(pad=table.crop, mode=table.padding, flip=flip),
    "rotate": lambda table, flip: RotateFlip(degrees=table.rotation, flip=flip),
    "resized-crop": lambda table, flip: ResizedCropFlip(flip=flip),
    "randaugment": lambda table, flip: RandAugment(operations=table.operations, magnitude=table.magnitude),
    "trivial": lambda table, flip: TrivialAugment(),
}
HEAD = 2  # classes of a student trained without labels or logits: fine-tuning replaces its classifier
SECOND_VIEWS: dict[str, Callable[[Augment], Augment]] = {"same": lambda augment: augment, "strong": Strong}


def read_data(recipe: Recipe) -> Dataset:
    """The recipe's data set, with the recipe's normalisation if it sets one."""
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
        unlabelled=table.unlabelled,
    )
    flip = data.flip if table.flip is None else table.flip
    return replace(data, mean=table.mean or data.mean, std=table.std or data.std, flip=flip)


def train_loader(recipe: Recipe, data: Dataset, *, rank: int = 0, world: int = 1) -> Loader:
    """Shuffled, augmented batches without the last incomplete one, as in the authors' code; with several processes, the share of `rank`."""
    size = min(recipe.data.batch_size, len(data.train))
    if size % world:
        raise RecipeError(
            f"data.batch_size is {size}, which cannot be divided evenly among {world} processes; choose a multiple of {world}"
        )
    augment = build_augment(recipe.data, data.flip)
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
        second=SECOND_VIEWS[recipe.data.second_view](augment) if recipe.data.second_view else None,
        mix=None if recipe.data.mix == "none" else Mix(recipe.data.mix, recipe.data.mix_alpha),
        unlabelled_share=recipe.data.unlabelled_share,
    )


def build_augment(table: Data, flip: bool) -> Augment:
    """The augmentations that the recipe names, in order, followed by erasing."""
    parts = [AUGMENTS[name](table, flip) for name in table.augment.split("+")]
    parts += [Erase(table.erase)] if table.erase else []
    return parts[0] if len(parts) == 1 else Chain(tuple(parts))


def eval_loader(recipe: Recipe, data: Dataset, split: AnySplit, *, rank: int = 0, world: int = 1) -> Loader:
    """Each image once, in order, not augmented: for evaluation and offline fits; with several processes, the share of `rank`."""
    size = max(eval_batch(split.image_size, recipe.data.batch_size), world)
    return Loader(split, size, mean=data.mean, std=data.std, rank=rank, world=world)


def build_distiller(recipe: Recipe, data: Dataset) -> Distiller:
    """Student, teacher and methods as the recipe names them."""
    methods, wrong = [], []
    for name, table in recipe.methods.items():
        with collected(wrong):
            if name not in METHODS:
                raise RecipeError(f"unknown method {name!r} (nearest: {nearest(name, METHODS)})")
            methods.append(METHODS[name].from_recipe(table))
    if wrong:
        raise RecipeError("; ".join(wrong))
    example = torch.zeros(1, 3, *data.image_size)
    built = None
    if not data.has_labels and recipe.teacher is not None and recipe.teacher.weights is not None:
        built = build_teacher(recipe.teacher, data)  # before the student, which gets as many classes
    head = None if built is None else count_logits(built[0], built[1](example))
    student = build_student(recipe.student, data, data.num_classes or head or HEAD)
    _check_classes(recipe.student.model, student, data, example)
    freeze(student, recipe.student.freeze)
    smoothing = recipe.train.label_smoothing
    criterion = nn.CrossEntropyLoss(label_smoothing=smoothing) if smoothing else None
    if not methods:
        return _with_layout(Distiller(student, weights=recipe.weights, example=example, criterion=criterion), recipe)
    if recipe.teacher is None or recipe.teacher.weights is None:
        raise RecipeError(
            f"{', '.join(recipe.methods)} needs a trained teacher: name its weights with --teacher-weights FILE, or --teacher-weights own "
            "if your callable loads them itself (train one with "
            f"`letkd train --student {recipe.teacher.model if recipe.teacher else 'MODEL'} --method ce …`)"
        )
    teacher, teacher_input = built or build_teacher(recipe.teacher, data)
    student_taps = _NetworkTaps.of("student", recipe.student, student, example)
    teacher_taps = _NetworkTaps.of("teacher", recipe.teacher, teacher, teacher_input(example))
    if choices(recipe)["fold_teacher"]:
        teacher = fold_teacher(teacher, as_taps(teacher, teacher_taps.taps), teacher_input(example))
    try:
        distiller = Distiller(
            student,
            teacher,
            methods,
            weights=recipe.weights,
            student_taps=student_taps.taps,
            teacher_taps=teacher_taps.taps,
            teacher_input=teacher_input,
            bf16_teacher=choices(recipe)["bf16_teacher"],
            example=example,
            criterion=criterion,
            images=len(data.train),
            fused=recipe.train.fused,
        )
    except LetkdError:
        student_taps.report()
        teacher_taps.report()
        raise
    if any(method.reads.student for method in methods):
        student_taps.report()
    if any(method.reads.teacher for method in methods):
        teacher_taps.report()
    if not bool((data.train.labels >= 0).any()):
        for method in methods:
            if why := method.why_labels():
                raise UnsupportedPair(
                    f"{method.name} cannot learn from {data.name}, which has no labels: {why}; use a method that reads only features "
                    "(letkd-1, quest), or add labelled images"
                )
    if recipe.data.mix != "none":
        distiller.check_mix()  # raises here, before any work
    if recipe.train.cache_views and recipe.train.cache_teacher:
        distiller.lessons()  # raises here if a method cannot use the cache
    return _with_layout(distiller, recipe)


@dataclass(frozen=True)
class _NetworkTaps:
    """A network's taps: those in the recipe or, if it has none and the network has no table, the proposed ones."""

    taps: Mapping[str, Tap | str]
    line: str = ""

    @classmethod
    def of(cls, side: str, table: Network, model: nn.Module, example: Tensor) -> "_NetworkTaps":
        if table.taps or as_taps(model):
            return cls(table.taps)
        taps, trouble = proposed_taps(model, example)
        shown = ", ".join(f"{role}={tap}" for role, tap in taps.items()) or "none"
        return cls(
            taps,
            f"{side} {table.model}: no taps named, using those that `letkd taps` proposes: {shown}{trouble and f' ({trouble})'}",
        )

    def report(self) -> None:
        if self.line:
            say(self.line)


def _check_classes(name: str, student: nn.Module, data: Dataset, example: Tensor) -> None:
    """Raise if the data has labels and the student another number of logits."""
    count = count_logits(student, example) if data.has_labels else None
    if count not in (None, data.num_classes):
        raise RecipeError(
            f"{name} returns {count} logits, and {data.name} has {data.num_classes} classes; let the callable take `num_classes`"
        )


def _with_layout(distiller: Distiller, recipe: Recipe) -> Distiller:
    if choices(recipe)["channels_last"]:
        distiller.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - torch's own stub lacks this form
    return distiller


def count_logits(model: nn.Module, example: Tensor) -> int | None:
    """Number of logits of a network; None if it has none."""
    like = next(model.parameters(), example)
    output, _ = run_once(Taps(model, {}), example.to(like.device, like.dtype))
    logits = None if is_backbone(model) else logits_in(output)
    return None if logits is None or logits.ndim != 2 else logits.shape[1]


def build_student(table: Network, data: Dataset, num_classes: int | None = None) -> nn.Module:
    """The student, with its weights if the recipe names any; weights for other classes are loaded except for the classifier.

    Args:
        num_classes: default: the number of classes in the data.
    """
    num_classes = num_classes or data.num_classes
    if table.weights is not None and is_student_file(table.weights):
        student = load_student(table.weights, model=table.model, num_classes=num_classes).train()
    else:
        student = create_model(table.model, num_classes=num_classes, weights=table.weights, new_head=True)
    return set_image_size(student, data.image_size)


def fit(distiller: Distiller, recipe: Recipe, data: Dataset, folder: str | Path, *, force: bool = False) -> None:
    """Fit the offline parts or load them from disk: one pass over the training images, in order, not augmented."""
    if not distiller.fittings():
        return
    name = f"{data.name} {data.train.fingerprint()} mean {data.mean} std {data.std}"
    weights = [recipe.weights, *(phase.weights for phase in recipe.phases)]
    terms = {part.term for part in distiller.fittings().values() if any(table.get(part.term, 1.0) for table in weights)}
    loader = eval_loader(recipe, data, data.train, rank=rank(), world=world())
    distiller.fit(loader, folder=folder, data=name, force=force, terms=terms)
