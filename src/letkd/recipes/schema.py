"""The recipe's schema: numbers and names, never objects. Unknown keys are refused; all errors are reported together."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from letkd.errors import RecipeError, nearest
from letkd.limits import LARGEST_SIDE, STEEPEST, parse_weight

MAX_OPERATIONS = 100  # per image
MAX_WORKERS = 256  # processes that decode: a larger number is a typing error and would overload the machine
MAX_COUNT = 2**31 - 1  # of any counted quantity
Numbers = dict[str, Annotated[float, Field(ge=0, le=STEEPEST)]]
Weights = dict[str, Annotated[float | str, BeforeValidator(parse_weight)]]
Channel = Annotated[float, Field(ge=-STEEPEST, le=STEEPEST)]
Plain = Literal["none", "crop", "rotate", "resized-crop"]
Rand = Literal["randaugment", "crop+randaugment", "rotate+randaugment", "resized-crop+randaugment"]
Trivial = Literal["trivial", "crop+trivial", "rotate+trivial", "resized-crop+trivial"]
Positive = Annotated[float, Field(gt=1e-6, le=STEEPEST)]
Means = Annotated[tuple[Channel, Channel, Channel], Field(strict=False)]  # TOML has lists only
Deviations = Annotated[tuple[Positive, Positive, Positive], Field(strict=False)]


def parse_size(value: Any) -> int | tuple[int, int]:
    """Image size from `32`, `[48, 64]` (height, width) or `"48x64"`; a square size as one number."""
    sides = re.split("[x×]", value.strip().lower()) if isinstance(value, str) else value
    sides = list(sides) if isinstance(sides, list | tuple) else [sides]
    try:
        found = [int(side) for side in sides if not isinstance(side, bool) and int(side) == float(side)]
    except (TypeError, ValueError, OverflowError):
        found = []
    if len(found) != len(sides) or len(found) not in (1, 2) or not all(1 <= side <= LARGEST_SIDE for side in found):
        raise ValueError(f'an image size is one side (32) or height and width ([48, 64] or "48x64"), 1 to {LARGEST_SIDE:,}')
    return found[0] if len(set(found)) == 1 else (found[0], found[1])


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Data(_Table):
    """Images, splits and augmentation."""

    name: str = Field(
        description="the data set: cifar100, cifar10, tiny-imagenet, imagenet, folder, images (no labels), digits, or a plugin's"
    )
    root: str | None = Field(default=None, description="folder of its files; digits needs none")
    val: float = Field(ge=0, lt=1, description="share of the training images of every class held out for validation")
    fraction: float = Field(gt=0, le=1, description="share of the remaining training images to use")
    batch_size: int = Field(ge=1, le=MAX_COUNT, description="images per step, over all processes")
    augment: Literal[Plain, Rand, Trivial] = Field(
        description="crop, rotate and resized-crop include random flips; randaugment and trivial follow one of them (+) or are used alone"
    )
    crop: int = Field(ge=0, le=LARGEST_SIDE, description="for crop: padding on every side, in pixels; 0 for none")
    padding: Literal["reflect", "zero"] = Field(description="for crop: how the padding is filled")
    rotation: float = Field(ge=0, le=180, description="for rotate: largest angle in degrees, in both directions")
    second_view: Literal["same", "strong"] | None = Field(
        default=None,
        description="a second view of every image, for MLKD: drawn like the first, or with random operations added; default: none",
    )
    operations: int = Field(ge=1, le=MAX_OPERATIONS, description="for randaugment: operations per image")
    magnitude: int = Field(ge=0, le=30, description="for randaugment: strength of the operations, 0 to 30")
    erase: float = Field(ge=0, le=1, description="share of the images in which a random rectangle is erased")
    mix: Literal["none", "mixup", "cutmix"] = Field(description="mix every image with another one of its batch")
    mix_alpha: float = Field(
        gt=1e-3, le=STEEPEST, description="for mixup and cutmix: the mixing ratio is drawn from Beta(α, α)"
    )
    flip: bool | None = Field(default=None, description="random horizontal flips; default: that of the data set")
    size: Annotated[int | tuple[int, int], BeforeValidator(parse_size)] | None = Field(
        default=None,
        description="side of the input images, or [height, width]; default: the data set's; for folders, the student's",
    )
    resize: int | None = Field(
        default=None,
        ge=1,
        le=2 * LARGEST_SIDE,
        description="shorter side before the centre crop; default: 8/7 of size, and files that already have the size are not resized",
    )
    unlabelled: str | None = Field(
        default=None,
        min_length=1,
        description='additional training images without labels: a folder or a pattern, or "rest" for those that fraction leaves out',
    )
    unlabelled_share: float | None = Field(
        default=None, ge=0, le=1, description="share of unlabelled images in each batch; default: each image once per epoch"
    )
    workers: int = Field(ge=0, le=MAX_WORKERS, description="processes that decode image files; data sets in memory need none")
    corrupt: Literal["refuse", "skip"] = Field(description="image files that cannot be decoded: raise an error, or skip them")
    mean: Means | None = Field(
        default=None, description="mean per channel, with 0 for black and 1 for white; default: that of the data set"
    )
    std: Deviations | None = Field(default=None, description="standard deviation per channel; default: that of the data set")


class Network(_Table):
    """A network by name, its weights, and its taps if it has no table of them."""

    model: str = Field(
        description="a name of `letkd models`, timm:NAME, torchvision:NAME, transformers:NAME, or file.py:callable"
    )
    weights: str | None = Field(
        default=None, description="a file, a folder of transformers, or `own` for a callable that loads its own"
    )
    taps: dict[str, str] = Field(default={}, description="module paths by role, for networks without a table of taps")
    freeze: list[str] = Field(default=[], description="patterns of parameter names to freeze, such as layer1.*")


class Group(_Table):
    """Parameters with their own learning rate or weight decay."""

    match: str = Field(description="pattern of parameter names in the student, such as fc.*; the first matching group is used")
    lr: float | None = Field(default=None, gt=0, le=STEEPEST, description="their learning rate; default: optim.lr")
    weight_decay: float | None = Field(
        default=None, ge=0, le=STEEPEST, description="their weight decay; default: optim.weight_decay"
    )


Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]


class Teacher(Network):
    """A network. The other keys describe its training data, if it differs from the recipe's and the weights file does not say so."""

    mean: Means | None = Field(default=None, description="of its input images; default: that of the recipe")
    std: Deviations | None = Field(default=None, description="of its input images; default: that of the recipe")
    size: Side | Annotated[tuple[Side, Side], Field(strict=False)] | None = Field(
        default=None, description="side, or height and width, of its input images"
    )
    classes: list[str] | str | None = Field(
        default=None,
        description='its classes in the order of its logits: names, a text file with one per line, or "data" for the order of the data',
    )


class Optim(_Table):
    """The optimiser and its schedule."""

    name: str = Field(description="`sgd`, `adamw`, or any other class of torch.optim")
    lr: float = Field(gt=0, le=STEEPEST, description="initial learning rate")
    momentum: float = Field(ge=0, lt=1, description="for optimisers that have it, such as sgd and rmsprop")
    nesterov: bool = Field(description="Nesterov momentum, for sgd")
    settings: dict[str, Any] = Field(default={}, description="the optimiser's other arguments, such as betas = [0.9, 0.95]")
    decay_norms: bool = Field(
        description="also apply weight decay to vectors and scalars: norms, biases, the KD layer's scales"
    )
    groups: list[Group] = Field(
        default=[], description="parameters with their own rate or decay, such as the head of a pre-trained student"
    )
    weight_decay: float = Field(ge=0, le=STEEPEST, description="for all parameters that match no group")
    schedule: Literal["milestones", "cosine", "linear", "constant"] = Field(
        description="how the rate falls: by gamma after each milestone, or per step to zero along a cosine or a line"
    )
    warmup: float = Field(
        ge=0, le=MAX_COUNT, description="epochs in which the rate rises linearly from zero; below 1: a share of all epochs"
    )
    milestones: list[Annotated[int, Field(ge=1, le=MAX_COUNT)]] = Field(
        description="epochs after which the rate falls; scaled if only epochs is set"
    )
    gamma: float = Field(gt=0, le=1, description="factor of the rate at each milestone")
    clip: float | None = Field(default=None, gt=0, description="largest norm of the gradient; default: no limit")


class Train(_Table):
    """Length, seed, precision and speed of training."""

    epochs: int = Field(ge=1, le=MAX_COUNT, description="passes over the training images")
    seed: int = Field(
        ge=0,
        lt=2**32,
        description="for initial weights, order of images and augmentations; trials use this seed and the following ones",
    )
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "64-true", "auto"] = Field(
        description="of the training steps, as named in Lightning Fabric; auto: bf16-mixed if the device has bf16 arithmetic"
    )
    steps: int | None = Field(default=None, ge=1, le=MAX_COUNT, description="largest number of steps per epoch; for smoke runs")
    time: float | None = Field(
        default=None, gt=0, le=1e9, description="time budget in seconds, from which `letkd train --time` computed the epochs"
    )
    accumulate: int | None = Field(
        default=None, ge=1, le=MAX_COUNT, description="batches per update of the weights; default: 1"
    )
    validate_every: int = Field(
        default=1,
        ge=1,
        le=MAX_COUNT,
        description="epochs between two evaluations on the validation split; the last epoch is always evaluated",
    )
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay of a moving average of the weights, which is evaluated and exported in addition to the student",
    )
    label_smoothing: float = Field(
        ge=0, lt=1, description="share of the cross-entropy's target that is spread evenly over all classes"
    )
    sync_bn: bool = Field(default=False, description="batch norm over the batches of all processes")
    fused: bool = Field(
        default=True,
        description="KD layers and per-pixel losses in chunks of pixels; equal within rounding, but labels below `least` are dropped",
    )
    channels_last: bool | Literal["auto"] = Field(
        default=False, description="memory layout with the channels of a pixel together; auto: if that is faster"
    )
    fold_teacher: bool | Literal["auto"] = Field(
        default=False, description="fold the teacher's batch norms into its convolutions; auto: if that is faster"
    )
    bf16_teacher: bool | Literal["auto"] = Field(
        default=False, description="run the teacher in bf16, except in offline fits; auto: if the device has bf16 arithmetic"
    )
    cache_views: int | None = Field(
        default=None,
        ge=1,
        description='number of fixed views per image, or "auto" for a third of the epochs, at most 10; the teacher runs once on each. '
        "Default: new views in every epoch",
    )
    cache_teacher: bool = Field(
        default=True,
        description="with cache_views: cache the teacher; if false it runs at every step, for methods that cannot use the cache",
    )
    compile: bool = Field(
        default=False, description="on GPUs: use torch.compile for the modules of the student that contain no tap"
    )
    deterministic: bool = Field(default=False, description="use only deterministic algorithms; for GPUs")


class Probe(_Table):
    """Labelled images to evaluate the student's features on after training."""

    name: str = Field(description="the data set of these images")
    root: str | None = Field(default=None, description="folder of its files")


class Phase(_Table):
    """A number of epochs before the main training, with their own weights and a constant learning rate."""

    epochs: int = Field(ge=1, le=MAX_COUNT, description="number of epochs")
    weights: Numbers = Field(description="of the loss terms in this phase; a term that is not named has weight 1")
    lr: float | None = Field(default=None, gt=0, le=STEEPEST, description="learning rate; default: optim.lr")


class Recipe(_Table):
    """Everything that a run depends on, except the files that it names.

    `letkd.resolve` creates recipes.

    Examples:
        >>> import letkd
        >>> recipe = letkd.resolve("cifar100/rn56-rn20/kd")
        >>> recipe.student.model, recipe.train.epochs, recipe.weights["kd"]
        ('resnet20', 240, 0.9)
    """

    title: str = Field(default="", description="the row's name in tables")
    data: Data = Field(description="images, splits and augmentation")
    student: Network = Field(description="the network that is trained")
    teacher: Teacher | None = Field(default=None, description="the network that it learns from")
    optim: Optim = Field(description="the optimiser and its schedule")
    train: Train = Field(description="length, seed, precision and speed of training")
    methods: dict[str, dict[str, Any]] = Field(
        default={}, description="methods by name, each with its settings; without any, plain training"
    )
    weights: Weights = Field(
        default={},
        description='weights of the loss terms by name: numbers or "auto", which measures them (docs/training.md); default: 1 per term',
    )
    phases: list[Phase] = Field(default=[], description="phases before the main training")
    probe: Probe | None = Field(default=None, description="labelled images to evaluate the student's features on")


def full_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """The full path of a key given without its table, if only one table has it; any other path is unchanged."""
    if len(path) != 1 or path[0] in Recipe.model_fields:
        return path
    tables: dict[str, type[BaseModel]] = {"data": Data, "optim": Optim, "train": Train}
    found = [name for name, table in tables.items() if path[0] in table.model_fields]
    return (found[0], *path) if len(found) == 1 else path


def validate(table: dict[str, Any], source: str) -> Recipe:
    """A recipe from a merged table; raises one error that lists everything wrong with it."""
    try:
        json.dumps(table, ensure_ascii=False, default=str).encode()
        return Recipe.model_validate(table)
    except UnicodeEncodeError as error:
        text = str(error.object)[max(0, error.start - 20) : error.end + 20]
        raise RecipeError(
            f"{source}: {text!r} is not valid UTF-8, as a recipe file must be; rename that file or value"
        ) from None
    except ValidationError as error:
        raise RecipeError(f"{source}: " + "; ".join(_sentence(item) for item in error.errors())) from None


OPTIONS = {"data.name": " (name the data set with --data)", "student": " (name it with --student)"}


def _sentence(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r} (nearest: {nearest(str(item['loc'][-1]), _sibling_keys(item['loc']))})"
    if item["type"] == "missing":
        return f"{key!r} is missing{OPTIONS.get(key, '')}"
    return f"{key!r} is {item['input']!r:.200}: {item['msg'].removeprefix('Value error, ')}"


def _sibling_keys(loc: tuple) -> list[str]:
    table: Any = Recipe
    for part in loc[:-1]:
        if isinstance(part, str):  # numbers are positions in a list of tables
            annotation = table.model_fields[part].annotation
            options = [annotation, *getattr(annotation, "__args__", ())]
            table = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return list(table.model_fields)
