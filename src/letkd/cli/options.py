"""Options shared by several commands, and how their values are parsed."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from letkd.errors import RecipeError

if TYPE_CHECKING:
    from letkd.recipes import Recipe
    from letkd.training.launchers import Launcher

Cell = Annotated[
    str | None,
    typer.Argument(help="Cell, such as cifar100/rn56-rn20/letkd-2, a pair, or your own TOML file.", show_default=False),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="Method, such as kd or letkd-1-sharp; `letkd methods` lists all.", show_default="the recipe's, or ce: no teacher"
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Data set: digits, cifar10, cifar100, tiny-imagenet, imagenet, folder or images (no labels).", show_default=False
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(
        "--root", "--data-root", help="Folder with the data set's official files, or your images.", show_default=False
    ),
]
MODEL = "Zoo name, timm:NAME, torchvision:NAME, transformers:NAME, package.module:callable or file.py:callable."
Teacher = Annotated[str | None, typer.Option(metavar="MODEL", help=MODEL, show_default=False)]
TeacherWeights = Annotated[
    Path | None,
    typer.Option(
        help="Teacher's weights: a safetensors or .pth file, a transformers folder, or `own` if its callable loads them.",
        show_default=False,
    ),
]
StudentWeights = Annotated[
    Path | None,
    typer.Option(help="Initial weights; a classifier for other classes is trained from scratch.", show_default=False),
]
Freeze = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Student parameters to freeze, e.g. layer1.*; repeatable.", show_default=False),
]
TeacherTap = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=PATH",
        help="Tap of the teacher, e.g. penultimate=layer3, or penultimate=norm:tokens for patch tokens; repeatable.",
        show_default=False,
    ),
]
Student = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Student network; same forms as --teacher.", show_default=False)
]
StudentTap = Annotated[
    list[str] | None,
    typer.Option(
        "--student-tap",
        "--tap",
        metavar="ROLE=PATH",
        help="Tap of the student; same forms as --teacher-tap.",
        show_default=False,
    ),
]
Probe = Annotated[
    str | None,
    typer.Option(
        metavar="DATA[=FOLDER]",
        help="After training, test the student's features on these labelled images: k nearest neighbours and a linear classifier.",
        show_default=False,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Training settings: paper, fast (few epochs, learning rate decays to zero) or finetune (pre-trained students).",
        show_default="paper",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a value of the recipe, e.g. optim.lr=0.01; repeatable.", show_default=False
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run code that the recipe file names as file.py:callable or package.module:callable."),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Smoke run: one epoch of two steps, few images, small K. Values set explicitly still apply."),
]
FirstSeed = Annotated[int | None, typer.Option("--seed", min=0, max=2**32 - 1, help="First seed.", show_default="0")]
Jobs = Annotated[int, typer.Option(min=1, max=256, help="Number of runs in parallel, each in its own process.")]
LauncherSpec = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        metavar="local:N|slurm|ray",
        help="Where the runs execute: local processes, SLURM jobs or a Ray cluster.",
        show_default=False,
    ),
]
Log = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Comma-separated trackers for the metrics: tensorboard,wandb,mlflow.",
        show_default="tensorboard, if installed",
    ),
]
Cache = Annotated[
    bool,
    typer.Option(
        "--cache",
        help="Show every image in a few fixed views (a third of the epochs, at most 10), so that the teacher runs once per view "
        "instead of every epoch.",
    ),
]
CACHE_VIEWS = "auto"
Out = Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/<cell>")]
Supervision = Annotated[
    Path | None, typer.Option(help="Folder with fitted supervisions, to share between runs.", show_default="<out>/supervision")
]

TrustFile = Annotated[bool, typer.Option("--trust", help="Open a .pt2 file, which can run any code it contains.")]
Timeout = Annotated[
    float, typer.Option(min=1, max=1e6, help="Time limit in seconds for opening an .onnx or .pt2 file, and for each batch.")
]


def duration(text: str | None) -> float | None:
    """`20min`, `90s`, `1h` or `1h30min` in seconds."""
    if text is None:
        return None
    parts = re.fullmatch(r"(?:(\d{1,4})h)?(?:(\d{1,6})min)?(?:(\d{1,8})s)?", text.replace(" ", ""), re.ASCII)
    seconds = sum(int(part or 0) * unit for part, unit in zip(parts.groups(), (3600, 60, 1), strict=True)) if parts else 0
    if not seconds:
        raise RecipeError(f"--time {text!r:.60}: write hours, minutes or seconds, as in 20min, 90s or 1h30min")
    return float(seconds)


def first_pair(data: str) -> str:
    """The first pair on this data set."""
    from letkd.recipes import list_pairs

    found = next((pair for pair in list_pairs() if pair.startswith(f"{data}/")), None)
    if found is None:
        raise RecipeError(f"--data {data!r}: no pair uses this data set; the pairs are {', '.join(list_pairs())}")
    return found


def launcher(spec: str | None, jobs: int, folder: Path) -> "Launcher | None":
    """The launcher of the tasks; None for one job at a time, in this process."""
    from letkd.training.launchers import Local, launcher_from

    if spec is not None:
        if jobs > 1:
            raise RecipeError("--jobs and --launcher both define how runs are started; give only one of them")
        return launcher_from(spec, folder)
    return Local(jobs) if jobs > 1 else None


def numbers(text: str | None, option: str) -> list[float] | None:
    """Comma-separated numbers."""
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(f"{option} {text!r}: write comma-separated numbers, as in 0.485,0.456,0.406") from None


def size(text: str | None) -> int | tuple[int, int] | None:
    """`--size 32` or `--size 48x64` (height x width)."""
    from letkd.recipes.schema import parse_size

    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise RecipeError(f"--size {text!r:.100}: {error}") from None


def image_size(text: str) -> tuple[int, int, int]:
    """`3x32x48` or `32x48` as (3, 32, 48)."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"[1-9]\d{0,4}", part, re.ASCII) for part in parts):
        raise RecipeError(f"--input {text!r}: write height x width, as in 64x64, optionally with a leading 3x")
    *channels, height, width = map(int, parts)
    if channels not in ([], [3]):
        raise RecipeError(f"--input {text!r}: images must have 3 channels")
    return 3, height, width


def sizes(text: str | None) -> tuple[tuple[int, int] | None, bool | None]:
    """Parse `64x48`, `64`, `fixed`, `dynamic` or `64x48,fixed` into height and width and whether other sizes are accepted."""
    size, dynamic = None, None
    for part in [] if text is None else text.split(","):
        if part in ("fixed", "dynamic") and dynamic is None:
            dynamic = part == "dynamic"
        elif (sides := re.fullmatch(r"([1-9]\d{0,4})(?:[xX×]([1-9]\d{0,4}))?", part, re.ASCII)) and size is None:
            size = (int(sides[1]), int(sides[2] or sides[1]))
        else:
            raise RecipeError(f"--size {text!r}: write height x width, as in 64x64, or fixed, or dynamic, or 64x64,fixed")
    return size, dynamic


def count_or(text: str, word: str, option: str) -> int | None:
    """A positive integer; None for `word`."""
    if text == word:
        return None
    if not re.fullmatch(r"[1-9]\d{0,4}", text, re.ASCII):
        raise RecipeError(f"{option} {text!r}: write a number, as in 8, or {word}")
    return int(text)


def run_folder(out: Path | None, cell: str | None, recipe: "Recipe", *, quick: bool = False) -> Path:
    """The run folder; by default under runs/, named by the cell or by what is trained, with `-quick` added for a smoke run."""
    if out is not None:
        return out
    folder = _default_folder(cell, recipe)
    return folder.with_name(f"{folder.name}-quick") if quick else folder


def _default_folder(cell: str | None, recipe: "Recipe") -> Path:
    if cell is not None and not cell.endswith(".toml"):
        method = "" if cell.count("/") > 1 else f"-{recipe.title}"
        return Path("runs") / (cell.replace("/", "-") + method).replace(" ", "-").lower()
    name = f"{recipe.data.name}-{recipe.student.model}-{recipe.title or 'own'}"
    return Path("runs") / "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lower()
