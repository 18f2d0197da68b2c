"""The recipe's shape: numbers and names, never objects. Unknown keys are refused, all errors are told at once."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from letkd.errors import RecipeError, nearest
from letkd.limits import LARGEST_SIDE, STEEPEST

MOST_OPERATIONS = 100  # in a row on an image
LARGEST_CREW = 256  # processes that decode: more is a slip of the hand, and would bring a machine down
MOST = 2**31 - 1  # of anything that is counted
Weights = dict[str, Annotated[float, Field(ge=0, le=STEEPEST)]]
Channel = Annotated[float, Field(ge=-STEEPEST, le=STEEPEST)]
Plain = Literal["none", "crop", "rotate", "resized-crop"]
Rand = Literal["randaugment", "crop+randaugment", "rotate+randaugment", "resized-crop+randaugment"]
Trivial = Literal["trivial", "crop+trivial", "rotate+trivial", "resized-crop+trivial"]
Positive = Annotated[float, Field(gt=1e-6, le=STEEPEST)]


def parse_size(value: Any) -> int | tuple[int, int]:
    """The size of images from `32`, `[48, 64]` (height, width) or `"48x64"`; a square one as one number."""
    sides = re.split("[x×]", value.strip().lower()) if isinstance(value, str) else value
    sides = list(sides) if isinstance(sides, list | tuple) else [sides]
    try:
        found = [int(side) for side in sides if not isinstance(side, bool) and int(side) == float(side)]
    except (TypeError, ValueError, OverflowError):
        found = []
    if len(found) != len(sides) or len(found) not in (1, 2) or not all(1 <= side <= LARGEST_SIDE for side in found):
        raise ValueError(
            f'the size of images is one side (32) or height and width ([48, 64] or "48x64"), 1 to {LARGEST_SIDE:,}'
        )
    return found[0] if len(set(found)) == 1 else (found[0], found[1])


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Data(_Table):
    """Which images, in what splits, how fed."""

    name: str = Field(description="the data set: cifar100, cifar10, tiny-imagenet, imagenet, folder, digits, or a plugin's")
    root: str | None = Field(default=None, description="folder of its files; digits has none")
    val: float = Field(ge=0, lt=1, description="share of the training images of every class held out for validation")
    fraction: float = Field(gt=0, le=1, description="share of the other training images that is used")
    batch_size: int = Field(ge=1, le=MOST, description="images per step, of all processes together")
    augment: Literal[Plain, Rand, Trivial] = Field(
        description="crop, rotate and resized-crop come with random flips; +randaugment or +trivial follows them, or stands alone"
    )
    crop: int = Field(ge=0, le=LARGEST_SIDE, description="for crop: padding on every side, in pixels; 0 for none")
    padding: Literal["reflect", "zero"] = Field(description="for crop: what the padding shows")
    rotation: float = Field(ge=0, le=180, description="for rotate: up to so many degrees either way")
    second_view: Literal["same", "strong"] | None = Field(
        default=None,
        description="a second view of every image, for MLKD: drawn like the first, or followed by random operations; none if not given",
    )
    operations: int = Field(ge=1, le=MOST_OPERATIONS, description="for randaugment: operations per image")
    magnitude: int = Field(ge=0, le=30, description="for randaugment: strength of the operations, 0 to 30")
    erase: float = Field(ge=0, le=1, description="share of the images in which a random rectangle is erased")
    mix: Literal["none", "mixup", "cutmix"] = Field(description="every image is mixed with another of its batch")
    mix_alpha: float = Field(gt=1e-3, le=STEEPEST, description="for mixup and cutmix: the images' shares come from Beta(α, α)")
    flip: bool | None = Field(default=None, description="random mirror images; as the data set says if not given")
    size: Annotated[int | tuple[int, int], BeforeValidator(parse_size)] | None = Field(
        default=None, description="side of the images that networks get, or [height, width]; the data set's own if not given"
    )
    resize: int | None = Field(
        default=None,
        ge=1,
        le=2 * LARGEST_SIDE,
        description="shorter side before the centre is cut out; if not given 8/7 of size, and files of the size are left as they are",
    )
    unlabelled: str | None = Field(
        default=None,
        min_length=1,
        description='more training images, without labels: a folder or a pattern, or "rest" for those that fraction leaves out',
    )
    unlabelled_share: float | None = Field(
        default=None, ge=0, le=1, description="of each batch, images without a label; if not given, each image once per epoch"
    )
    workers: int = Field(ge=0, le=LARGEST_CREW, description="processes that decode image files; data sets in memory need none")
    corrupt: Literal["refuse", "skip"] = Field(description="image files that cannot be decoded: an error, or left out")
    mean: tuple[Channel, Channel, Channel] | None = Field(
        default=None, description="mean of each channel, where 0 is black and 1 is white; the data set's own if not given"
    )
    std: tuple[Positive, Positive, Positive] | None = Field(
        default=None, description="standard deviation of each channel; the data set's own if not given"
    )


class Network(_Table):
    """A network by name, its weights, and the taps that its own table lacks."""

    model: str = Field(
        description="a name of `letkd models`, timm:NAME, torchvision:NAME, transformers:NAME, or file.py:callable"
    )
    weights: str | None = Field(
        default=None, description="a file, a folder of transformers, or `own` for a callable that loads its own"
    )
    taps: dict[str, str] = Field(default={}, description="module paths by role, if the network has no table of its own")
    freeze: list[str] = Field(default=[], description="patterns of parameter names that are not trained, such as layer1.*")


class Group(_Table):
    """Parameters with a rate or a weight decay of their own."""

    match: str = Field(
        description="pattern of parameter names in the student, such as fc.*; the first group that matches counts"
    )
    lr: float | None = Field(default=None, gt=0, le=STEEPEST, description="their rate; optim.lr if not given")
    weight_decay: float | None = Field(
        default=None, ge=0, le=STEEPEST, description="their decay; optim.weight_decay if not given"
    )


Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]


class Teacher(Network):
    """A network, and what it was trained on, if that is not the recipe's data: its weights' file says so, or these keys do."""

    mean: tuple[Channel, Channel, Channel] | None = Field(default=None, description="of its images; the recipe's if not given")
    std: tuple[Positive, Positive, Positive] | None = Field(
        default=None, description="of its images; the recipe's if not given"
    )
    size: Side | tuple[Side, Side] | None = Field(default=None, description="side, or height and width, of the images it takes")
    classes: list[str] | str | None = Field(
        default=None, description="its classes in the order of its logits: names, or a text file with one per line"
    )


class Optim(_Table):
    """The optimiser and its schedule."""

    name: str = Field(description="sgd, adamw, or any other class of torch.optim")
    lr: float = Field(gt=0, le=STEEPEST, description="the first learning rate")
    momentum: float = Field(ge=0, lt=1, description="of optimisers that have one, as sgd and rmsprop")
    nesterov: bool = Field(description="of sgd")
    settings: dict[str, Any] = Field(default={}, description="the optimiser's other arguments, such as betas = [0.9, 0.95]")
    decay_norms: bool = Field(description="weight decay also for vectors and scalars: norms, biases, the KD layer's scales")
    groups: list[Group] = Field(
        default=[], description="rates and decays of their own, as for the head of a pre-trained student"
    )
    weight_decay: float = Field(ge=0, le=STEEPEST, description="of all parameters that no group matches")
    schedule: Literal["milestones", "cosine", "linear", "constant"] = Field(
        description="how the rate falls: by gamma after each milestone, or per step to zero along a cosine or a line"
    )
    warmup: float = Field(
        ge=0, le=MOST, description="the rate rises linearly from zero for so many epochs; below 1: for this share of all epochs"
    )
    milestones: list[int] = Field(description="epochs after which the rate falls; they scale with epochs if only that is set")
    gamma: float = Field(gt=0, le=1, description="what the rate is multiplied by at each milestone")
    clip: float | None = Field(default=None, gt=0, description="largest norm of the gradient; no limit if not given")


class Train(_Table):
    """How long, from which seed, in which precision."""

    epochs: int = Field(ge=1, le=MOST, description="passes over the training images")
    seed: int = Field(
        ge=0, lt=2**32, description="of first weights, order of images and augmentations; trials count up from it"
    )
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "64-true"] = Field(description="of the steps, as Fabric names it")
    steps: int | None = Field(default=None, ge=1, le=MOST, description="at most so many steps per epoch; for smoke runs")
    time: float | None = Field(
        default=None, gt=0, le=1e9, description="seconds that the run was to take; `letkd train --time` set the epochs by it"
    )
    accumulate: int | None = Field(default=None, ge=1, le=MOST, description="batches per update of the weights; 1 if not given")
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay of a moving average of the weights, evaluated and exported beside the student",
    )
    label_smoothing: float = Field(ge=0, lt=1, description="share of the cross-entropy's target that all classes divide evenly")
    sync_bn: bool = Field(default=False, description="BN over the batches of all processes together")
    fused: bool = Field(
        default=True,
        description="KD layers and per-pixel losses over chunks of pixels; equal within rounding, but labels below `least` are dropped",
    )
    channels_last: bool | Literal["auto"] = Field(
        default=False, description="networks keep a pixel's channels together in memory; auto: where that is faster"
    )
    fold_teacher: bool | Literal["auto"] = Field(
        default=False, description="the teacher runs with BN folded into its convolutions; auto: where that is faster"
    )
    cache_views: int | None = Field(
        default=None,
        ge=1,
        description="so many fixed views of every image, the teacher run once on each; fresh ones if not given",
    )
    cache_teacher: bool = Field(
        default=True, description="with cache_views; if false the teacher runs at every step, for methods that no cache serves"
    )
    compile: bool = Field(
        default=False, description="GPUs: torch.compile for the parts of the student inside of which nothing is read"
    )
    deterministic: bool = Field(default=False, description="only algorithms that give the same bits every time; for GPUs")


class Probe(_Table):
    """Labelled images that the student's features are tried on after training."""

    name: str = Field(description="the data set of these images")
    root: str | None = Field(default=None, description="folder of its files")


class Phase(_Table):
    """A stretch of epochs before the main training, with weights and a constant learning rate of its own."""

    epochs: int = Field(ge=1, le=MOST, description="its length")
    weights: Weights = Field(description="of the loss terms in this phase")
    lr: float | None = Field(default=None, gt=0, le=STEEPEST, description="its rate; optim.lr if not given")


class Recipe(_Table):
    """All that a run depends on, besides the files it names."""

    title: str = Field(default="", description="the row's name in tables")
    data: Data = Field(description="which images, in what splits, how fed")
    student: Network = Field(description="the network that is trained")
    teacher: Teacher | None = Field(default=None, description="the network that it learns from")
    optim: Optim = Field(description="the optimiser and its schedule")
    train: Train = Field(description="how long, from which seed, in which precision")
    methods: dict[str, dict[str, Any]] = Field(
        default={}, description="methods by name, each with its settings; none is plain training"
    )
    weights: Weights = Field(default={}, description="weights of the loss terms by name; 1 for each term that is not named")
    phases: list[Phase] = Field(default=[], description="stretches of epochs before the main training")
    probe: Probe | None = Field(default=None, description="labelled images on which the student's features are judged")


def full_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path that a key given alone means, where only one of the tables has it; any other path as it is."""
    if len(path) != 1 or path[0] in Recipe.model_fields:
        return path
    tables: dict[str, type[BaseModel]] = {"data": Data, "optim": Optim, "train": Train}
    found = [name for name, table in tables.items() if path[0] in table.model_fields]
    return (found[0], *path) if len(found) == 1 else path


def validate(table: dict[str, Any], where: str) -> Recipe:
    """A recipe from a merged table, or one error that names everything wrong with it."""
    try:
        json.dumps(table, ensure_ascii=False, default=str).encode()
        return Recipe.model_validate(table)
    except UnicodeEncodeError as error:
        text = str(error.object)[max(0, error.start - 20) : error.end + 20]
        raise RecipeError(
            f"{where}: {text!r} is no UTF-8, and a recipe file holds nothing else; rename what is called so"
        ) from None
    except ValidationError as error:
        raise RecipeError(f"{where}: " + "; ".join(_sentence(item) for item in error.errors())) from None


def _sentence(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r} (nearest: {nearest(str(item['loc'][-1]), _keys_beside(item['loc']))})"
    if item["type"] == "missing":
        return f"{key!r} is missing"
    return f"{key!r} is {item['input']!r:.200}: {item['msg'].removeprefix('Value error, ')}"


def _keys_beside(loc: tuple) -> list[str]:
    table: Any = Recipe
    for part in loc[:-1]:
        annotation = table.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        table = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return list(table.model_fields)
