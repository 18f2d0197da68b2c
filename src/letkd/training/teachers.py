"""A recipe's teacher: built from its weights and their metadata, and evaluated before training."""

import math
from pathlib import Path

import torch
from torch import nn

from letkd.data import AnySplit, Dataset, Loader
from letkd.distiller import Distiller
from letkd.distiller.facts import Facts, facts_from
from letkd.distiller.student import is_student_file, load_student, read_header
from letkd.distiller.teacher_input import AdaptedTeacher, TeacherInput
from letkd.distributed.processes import rank, world
from letkd.errors import DataError, RecipeError
from letkd.models import create_model
from letkd.models.extras import facts_of_network, set_image_size
from letkd.models.pretrained import OWN, facts_of_weights
from letkd.models.weights import read_state_dict
from letkd.progress import say
from letkd.recipes.schema import Recipe, Teacher
from letkd.runs.evaluation import evaluate
from letkd.taps.outputs import is_backbone

IMAGENET = 1000  # default number of classes of a network
MEASURED = 2000  # images to measure the teacher's accuracy


def build_teacher(table: Teacher, data: Dataset) -> tuple[nn.Module, TeacherInput]:
    """The network with its weights, and the conversion of the data's images to its input.

    Normalisation, image size and classes of its training come from the recipe, else from the weights file or folder, else from timm
    (`pretrained_cfg`), else they are those of the data.
    """
    facts = _facts_of_weights_file(table)
    classes = _classes_named(table, data) or (facts.classes if facts else ())
    C = len(classes) or (facts.num_classes if facts else data.num_classes)
    if table.weights is not None and is_student_file(table.weights):
        model = load_student(table.weights, model=table.model)
    else:
        model = create_model(table.model, num_classes=C or _count_classes(table), weights=table.weights, headless=True)
    if facts is None:
        facts = facts_from({"num_classes": max(C, 1), **facts_of_network(model)}, table.model)
    side = (table.size, table.size) if isinstance(table.size, int) else table.size
    size = side or facts.size or data.image_size
    set_image_size(model, size)
    order, foreign = _match(classes, data)
    if is_backbone(model):
        order = None
        foreign = (
            f"{table.model} with the weights {table.weights} has no classifier; use a teacher that has one, or a method that "
            "reads only features (letkd-1, letkd-2, quest, fitnet, at, ab, fsp, sp, vid, crd, reviewkd)"
        )
    teacher_input = TeacherInput(
        mean=_three(table.mean or facts.mean or data.mean),
        std=_three(table.std or facts.std or data.std),
        from_mean=data.mean,
        from_std=data.std,
        size=None if size == data.image_size else size,
        order=order,
        foreign=foreign,
    )
    _report_input(table, data, teacher_input, headless=is_backbone(model))
    return model, teacher_input


def _count_classes(table: Teacher) -> int:
    """The teacher's number of classes if nothing states it: the number of rows of the last matrix in its weights."""
    if table.weights is None or table.weights == OWN or Path(table.weights).is_dir():
        return IMAGENET
    matrices = [value for value in read_state_dict(table.weights).values() if value.ndim == 2]
    return len(matrices[-1]) if matrices else IMAGENET


def measure_teacher(distiller: Distiller, recipe: Recipe, data: Dataset) -> float | None:
    """Top-1 accuracy (%) of the teacher on at most `MEASURED` validation images; None without a teacher or if its classes differ.

    Without a validation split, training images are used. If it is near chance, a warning lists the usual causes.
    """
    teacher, teacher_input = distiller.teacher, distiller.teacher_input
    if teacher is None or teacher_input is None or teacher_input.foreign or recipe.teacher is None or not data.has_labels:
        return None
    split, part = ("validation", data.val) if len(data.val) else ("training", _labelled(data.train))
    limit = MEASURED if recipe.train.steps is None else min(MEASURED, recipe.train.steps * recipe.data.batch_size)
    sample = part.subset(torch.linspace(0, len(part) - 1, min(limit, len(part)), dtype=torch.float64).long())
    batch = min(len(sample), max(recipe.data.batch_size, world()))
    if batch < world():
        return None
    loader = Loader(sample, batch, mean=data.mean, std=data.std, rank=rank(), world=world())
    with torch.random.fork_rng():  # a network may draw random numbers even in eval mode
        accuracy = evaluate(AdaptedTeacher(teacher, teacher_input), loader, description="evaluating the teacher")
    why = "" if len(data.val) else " (there is no validation split)"
    say(f"teacher {recipe.teacher.model}: {accuracy.top1:.2f} % on {accuracy.n:,} {split} images{why}")
    chance = 1 / data.num_classes
    if near_chance(accuracy.top1 / 100, chance, accuracy.n):
        say(
            f"warning: the teacher is hardly better than chance ({100 * chance:.2f} %). Usual causes: normalisation (it gets mean "
            f"{_short(teacher_input.mean)}, std {_short(teacher_input.std)}: teacher.mean, teacher.std), image size (it gets "
            f"{_size(teacher_input.size or data.image_size)}: teacher.size), class order ({_order(teacher_input)}: teacher.classes), or "
            f"wrong weights ({recipe.teacher.weights})"
        )
    return accuracy.top1


def near_chance(accuracy: float, chance: float, n: int) -> bool:
    """Whether an accuracy on n images is within three standard deviations of chance, or a tenth of the way from there to 1.

    With few images, half of the way: a perfect teacher is never near chance.
    """
    margin = max(3 * math.sqrt(chance * (1 - chance) / n), 0.1 * (1 - chance))
    return accuracy < chance + min(margin, 0.5 * (1 - chance))


def _labelled(split: AnySplit) -> AnySplit:
    with_label = split.labels >= 0
    return split if bool(with_label.all()) else split.subset(with_label)


def _facts_of_weights_file(table: Teacher) -> Facts | None:
    if table.weights is None:
        return None
    if is_student_file(table.weights):
        return facts_from(read_header(table.weights), table.weights)
    found = facts_of_weights(table.model, table.weights)
    return facts_from(found, table.weights) if found else None


def _classes_named(table: Teacher, data: Dataset) -> tuple[str, ...]:
    """The classes that the recipe names; `data` means the classes of the data, in the same order."""
    if table.classes is None or isinstance(table.classes, list):
        return tuple(table.classes or ())
    if table.classes == "data":
        return data.classes
    try:
        lines = Path(table.classes).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise DataError(f"teacher.classes names the file {table.classes}, which cannot be read: {error}") from None
    return tuple(line.strip() for line in lines if line.strip())


def _match(classes: tuple[str, ...], data: Dataset) -> tuple[tuple[int, ...] | None, str]:
    """The teacher's index of each class of the data (None if the order is the same), or why they cannot be matched."""
    if not classes or not data.classes or classes == data.classes:
        return None, ""
    if len(set(classes)) == len(classes) and set(classes) == set(data.classes):
        return tuple(classes.index(name) for name in data.classes), ""
    return None, (
        f"the teacher's classes are not those of {data.name}: it has {_first_names(classes)} and the data {_first_names(data.classes)}; "
        "use a teacher with the same classes, or a method that reads only features. If only the names differ, list them in the "
        'order of its logits as teacher.classes, or set teacher.classes = "data" if the order is the same'
    )


def _report_input(table: Teacher, data: Dataset, teacher_input: TeacherInput, *, headless: bool) -> None:
    found = teacher_input.differences()
    parts = []
    if "mean" in found:
        parts.append(
            f"mean {_short(teacher_input.mean)} and std {_short(teacher_input.std)} instead of {_short(data.mean)} and {_short(data.std)}"
        )
    if "size" in found:
        parts.append(f"images of {_size(found['size'])} instead of {_size(data.image_size)}")
    if "order" in found:
        parts.append("its classes in another order, matched by name")
    if teacher_input.foreign and not headless:
        parts.append(f"classes of its own (its logits are not used: {_first_names(data.classes)} in the data)")
    if parts:
        say(f"teacher {table.model}: gets {'; '.join(parts)}")


def _three(values: tuple[float, ...]) -> tuple[float, float, float]:
    if len(values) != 3:
        raise RecipeError(f"a normalisation has 3 numbers, one per channel, and the teacher's has {len(values)}")
    return values[0], values[1], values[2]


def _short(values: tuple[float, ...]) -> str:
    return "/".join(f"{value:.3g}" for value in values)


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _order(teacher_input: TeacherInput) -> str:
    return "as in the data" if teacher_input.order is None else "matched by name"


def _first_names(classes: tuple[str, ...], n: int = 3) -> str:
    return f"{len(classes)} ({', '.join(classes[:n])}{', …' if len(classes) > n else ''})"
