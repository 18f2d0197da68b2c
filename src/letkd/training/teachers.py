"""A recipe's teacher: built by what its weights say of themselves, and measured before it teaches."""

import math
from pathlib import Path

import torch
from torch import nn

from letkd.data import AnySplit, Dataset, Loader
from letkd.distiller import Distiller
from letkd.distiller.facts import Facts, facts_from
from letkd.distiller.student import is_student_file, load_student, read_header
from letkd.distiller.teacher_input import SeenTeacher, TeacherInput
from letkd.distributed.processes import rank, world
from letkd.errors import DataError, RecipeError
from letkd.models import create_model
from letkd.models.extras import facts_of_network
from letkd.models.pretrained import OWN, facts_of_weights
from letkd.models.weights import read_state_dict
from letkd.progress import say
from letkd.recipes.schema import Recipe, Teacher
from letkd.runs.evaluation import evaluate
from letkd.taps.outputs import is_backbone

IMAGENET = 1000  # classes that a network is asked for if nothing says how many it has
MEASURED = 2000  # images that the teacher's accuracy is measured on


def build_teacher(table: Teacher, data: Dataset) -> tuple[nn.Module, TeacherInput]:
    """The network with its weights, and how it sees the data's images.

    What it was trained on is what the recipe says, else what the weights' file or folder says of itself, else what timm says of the
    network (`pretrained_cfg`), else the same as the data.
    """
    told = _told_by_weights(table)
    classes = _classes_named(table, data) or (told.classes if told else ())
    C = len(classes) or (told.num_classes if told else data.num_classes)
    if table.weights is not None and is_student_file(table.weights):
        model = load_student(table.weights, model=table.model)
    else:
        model = create_model(table.model, num_classes=C or _count(table), weights=table.weights, headless=True)
    if told is None:
        told = facts_from({"num_classes": max(C, 1), **facts_of_network(model)}, table.model)
    side = (table.size, table.size) if isinstance(table.size, int) else table.size
    size = side or told.size or data.image_size
    order, foreign = _match(classes, data)
    if is_backbone(model):
        order = None
        foreign = (
            f"{table.model} with the weights {table.weights} has no classifier; give a teacher that has one, or use a method that "
            "reads features alone (letkd-1, letkd-2, quest, fitnet, at, sp, vid, crd)"
        )
    seen = TeacherInput(
        mean=_three(table.mean or told.mean or data.mean),
        std=_three(table.std or told.std or data.std),
        from_mean=data.mean,
        from_std=data.std,
        size=None if size == data.image_size else size,
        order=order,
        foreign=foreign,
    )
    _tell(table, data, seen, headless=is_backbone(model))
    return model, seen


def _count(table: Teacher) -> int:
    """How many classes the teacher has if nothing says so: as many as the last matrix of its weights has rows."""
    if table.weights is None or table.weights == OWN or Path(table.weights).is_dir():
        return IMAGENET
    matrices = [value for value in read_state_dict(table.weights).values() if value.ndim == 2]
    return len(matrices[-1]) if matrices else IMAGENET


def measure_teacher(distiller: Distiller, recipe: Recipe, data: Dataset) -> float | None:
    """Top-1 accuracy (%) of the teacher on validation images, at most `MEASURED`; None if there is none, or it knows other classes.

    Without a validation split training images serve. Near chance a warning names what may be wrong.
    """
    teacher, seen = distiller.teacher, distiller.teacher_input
    if teacher is None or seen is None or seen.foreign or recipe.teacher is None or not data.has_labels:
        return None
    split, part = ("validation", data.val) if len(data.val) else ("training", _labelled(data.train))
    most = MEASURED if recipe.train.steps is None else min(MEASURED, recipe.train.steps * recipe.data.batch_size)
    some = part.subset(torch.linspace(0, len(part) - 1, min(most, len(part)), dtype=torch.float64).long())
    batch = min(len(some), max(recipe.data.batch_size, world()))
    if batch < world():
        return None
    loader = Loader(some, batch, mean=data.mean, std=data.std, rank=rank(), world=world())
    with torch.random.fork_rng():  # a network may draw random numbers even in eval mode
        found = evaluate(SeenTeacher(teacher, seen), loader, description="evaluating the teacher")
    why = "" if len(data.val) else " (there is no validation split)"
    say(f"teacher {recipe.teacher.model}: {found.top1:.2f} % on {found.n:,} {split} images{why}")
    chance = 1 / data.num_classes
    if found.top1 / 100 < chance + max(3 * math.sqrt(chance * (1 - chance) / found.n), 0.1 * (1 - chance)):
        say(
            f"warning: the teacher is hardly better than chance ({100 * chance:.2f} %). Usual causes: normalisation (it gets mean "
            f"{_short(seen.mean)}, std {_short(seen.std)}: teacher.mean, teacher.std), image size (it gets "
            f"{_size(seen.size or data.image_size)}: teacher.size), class order ({_order(seen)}: teacher.classes), or wrong weights "
            f"({recipe.teacher.weights})"
        )
    return found.top1


def _labelled(split: AnySplit) -> AnySplit:
    with_label = split.labels >= 0
    return split if bool(with_label.all()) else split.subset(with_label)


def _told_by_weights(table: Teacher) -> Facts | None:
    if table.weights is None:
        return None
    if is_student_file(table.weights):
        return facts_from(read_header(table.weights), table.weights)
    found = facts_of_weights(table.model, table.weights)
    return facts_from(found, table.weights) if found else None


def _classes_named(table: Teacher, data: Dataset) -> tuple[str, ...]:
    """The classes that the recipe names; `data` means those of the data, in their order."""
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
    """The teacher's index of each class of the data, None if they are in the same order; or why they cannot be matched."""
    if not classes or not data.classes or classes == data.classes:
        return None, ""
    if len(set(classes)) == len(classes) and set(classes) == set(data.classes):
        return tuple(classes.index(name) for name in data.classes), ""
    return None, (
        f"the teacher's classes are not those of {data.name}: it knows {_some(classes)} and the data {_some(data.classes)}; give a "
        "teacher of the same classes or use a method that reads features alone. If only the names differ, list them in the order of its "
        'logits as teacher.classes, or set teacher.classes = "data" if the order is the same'
    )


def _tell(table: Teacher, data: Dataset, seen: TeacherInput, *, headless: bool) -> None:
    found = seen.differences()
    parts = []
    if "mean" in found:
        parts.append(
            f"mean {_short(seen.mean)} and std {_short(seen.std)} instead of {_short(data.mean)} and {_short(data.std)}"
        )
    if "size" in found:
        parts.append(f"images of {_size(found['size'])} instead of {_size(data.image_size)}")
    if "order" in found:
        parts.append("its classes in another order, matched by name")
    if seen.foreign and not headless:
        parts.append(f"classes of its own (its logits are not used: {_some(data.classes)} in the data)")
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


def _order(seen: TeacherInput) -> str:
    return "as in the data" if seen.order is None else "matched by name"


def _some(classes: tuple[str, ...], n: int = 3) -> str:
    return f"{len(classes)} ({', '.join(classes[:n])}{', …' if len(classes) > n else ''})"
