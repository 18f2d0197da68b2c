"""The evidence study: its pairs and the CSV files in docs/evidence, which docs/evidence.md is computed from."""

import csv
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from letkd.errors import LetkdError
from letkd.files import write_whole
from letkd.recipes import list_methods, list_rows, resolve
from letkd.runs.grid import as_csv
from letkd.runs.records import reason

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "evidence"
CHOICES = "choices"
PRESETS = "presets"  # a comparison of presets, collected like a pair
SWEEPS = "sweeps"  # settings of letKD-1, one at a time, on validation
FRACTIONS = "fractions"  # labels for a part of the images, on validation
UNFINISHED = "No counted run is finished yet."
PAIRS = {  # in the order of the protocol
    "cifar10-rn56-rn8": "CIFAR-10, ResNet-56 → ResNet-8",
    "cifar100-rn32-rn8": "CIFAR-100, ResNet-32 → ResNet-8",
    "cifar100-rn32-rn8-30": "CIFAR-100, ResNet-32 → ResNet-8, 30 epochs",
    "cifar10-rn56-rn20": "CIFAR-10, ResNet-56 → ResNet-20",
}


@dataclass(frozen=True)
class Run:
    """A counted run: accuracies of the last epoch in per cent; `commit` is that of letkd."""

    pair: str
    row: str
    seed: int
    commit: str
    epochs: int
    val: float
    test: float
    parameters: int
    cpu_seconds: int
    seconds: int


@dataclass(frozen=True)
class Choice:
    """A run that chooses a setting: validation accuracy and health of the last epoch.

    `perplexity` and `matches` are means over pixels of the perplexity of p_T and of p; `added` is α‖x'‖ / ‖x‖.
    """

    pair: str
    run: str
    row: str
    weights: str
    lr: float
    crop: int
    tau: str
    K: str
    other: str
    epochs: int
    seed: int
    perplexity: float | None
    val: float
    matches: float | None = None
    added: float | None = None


def recipe_file(pair: str) -> Path:
    return ROOT / "evidence" / f"{pair}.toml"


@cache
def rows_of(pair: str) -> dict[str, str]:
    """The titles of a pair's rows by name, in the order of the recipe."""
    return {row: resolve(recipe_file(pair), method=row).title for row in list_rows(recipe_file(pair))}


@cache
def all_rows_of(pair: str) -> dict[str, str]:
    """As `rows_of`, with letkd's other methods after them: settings of those can be chosen on the pair, too."""
    others = [method for method in list_methods() if method not in (*rows_of(pair), "teacher")]
    return rows_of(pair) | {method: resolve(recipe_file(pair), method=method).title for method in others}


def read_runs(pair: str, folder: Path = DATA) -> list[Run]:
    """The counted runs of a pair; none without a file."""
    return read_csv(folder / f"{pair}.csv", Run)


def read_choices(folder: Path = DATA, name: str = CHOICES) -> list[Choice]:
    """The runs that chose settings, or those of a study on validation; none without a file."""
    return read_csv(folder / f"{name}.csv", Choice)


def write_runs(pair: str, runs: Iterable[Run], folder: Path = DATA) -> Path:
    """Write the runs of a pair, sorted by row and seed."""
    order = list(rows_of(pair))
    return write_csv(folder / f"{pair}.csv", Run, sorted(runs, key=lambda run: (order.index(run.row), run.seed)))


def write_choices(choices: Iterable[Choice], folder: Path = DATA) -> Path:
    """Write the runs that chose settings, sorted by pair, row and settings; numbers by value."""

    def key(choice: Choice) -> tuple:
        order = list(PAIRS).index(choice.pair), list(all_rows_of(choice.pair)).index(choice.row)
        numbers = [[float(n) for n in re.findall(r"\d+(?:\.\d+)?", text)] for text in (choice.K, choice.tau, choice.weights)]
        return *order, -choice.crop, choice.other, *numbers, choice.lr, choice.run

    return write_csv(folder / f"{CHOICES}.csv", Choice, sorted(choices, key=key))


def write_validated(study: str, choices: Iterable[Choice], folder: Path = DATA) -> Path:
    """Write the runs of a study on validation, sorted by row and seed."""
    order = list(rows_of(study))
    return write_csv(folder / f"{study}.csv", Choice, sorted(choices, key=lambda run: (order.index(run.row), run.seed)))


def read_csv(path: Path, kind: type) -> list:
    """The rows of a CSV file as objects of the data class `kind`; none without a file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{key: value or None for key, value in row.items()} for row in csv.DictReader(file)]
    texts = {field.name for field in fields(kind) if field.type is str}
    rows = [{key: "" if value is None and key in texts else value for key, value in row.items()} for row in rows]
    try:
        return TypeAdapter(list[kind]).validate_python(rows)
    except ValidationError as error:
        raise LetkdError(f"{path} is damaged ({reason(error)}); write it again with evidence/collect.py") from None


def write_csv(path: Path, kind: type, rows: list) -> Path:
    """Write objects of the data class `kind`, one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = [field.name for field in fields(kind)]
    write_whole(path, as_csv(head, [list(asdict(row).values()) for row in rows]).encode())
    return path


def command(run: Callable[[], int]) -> None:
    """Run a script; an error of letkd becomes one line and exit code 2."""
    try:
        sys.exit(run())
    except LetkdError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
