"""Results of the paper, and published results of methods that are not in the paper."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

# The rows of the supplement's CIFAR-100 table from top to bottom, with AT+KD as in the ImageNet table.
PAPER = (
    "ce",
    "kd",
    "fitnet",
    "at",
    "at-kd",
    "ab",
    "fsp",
    "sp",
    "vid",
    "crd",
    "crd-kd",
    "dkd",
    "simkd",
    "tdd",
    "tdd-crd",
    "quest",
    "letkd-1",
    "letkd-2",
)
# Methods that the paper does not compare with, also combined with letKD, and letKD with another start of its layer.
MODERN = (
    "kd-ls",
    "dkd-ls",
    "dist",
    "reviewkd",
    "srd",
    "mlkd",
    "letkd-1-kd",
    "letkd-2-kd",
    "letkd-1-kd-ls",
    "letkd-2-kd-ls",
    "letkd-1-dist",
    "letkd-2-dist",
    "letkd-1-sharp",
    "letkd-2-sharp",
)
ABLATIONS = (
    "quest-3x3",
    "letkd-1-3x3",
    "quest-2",
    "letkd-1-2",
    "letkd-inter-0",
    "letkd-inter-1",
    "letkd-2-00",
    "letkd-2-01",
    "letkd-2-10",
    "fitnet-layer",
    "fitnet-letkd-1",
)
ORDER = ("teacher", *PAPER, *MODERN, *ABLATIONS)
GROUPS = {"all": ORDER[1:], "paper": PAPER, "modern": MODERN}


def named_methods(text: str) -> list[str]:
    """The methods in a comma-separated text, without duplicates: rows of the tables, or groups of them (`GROUPS`).

    Examples:
        >>> named_methods("ce, paper")[:3]
        ['ce', 'kd', 'fitnet']
    """
    names = [name.strip() for name in text.split(",")]
    return list(dict.fromkeys(method for name in names for method in GROUPS.get(name, (name,))))


def table_position(method: str | None) -> int:
    """Position of a method's row in the tables; unknown methods come last."""
    return ORDER.index(method) if method in ORDER else len(ORDER)


@dataclass(frozen=True)
class PaperResult:
    """A result reported by the paper or another source, in per cent.

    Args:
        mean: top-1 accuracy.
        std: over the trials, if it is reported.
        n: number of trials, if it is reported.
        top5: top-5 accuracy, on ImageNet.
        read_off: whether the number was read off a plot.
        source: publication; empty for the paper itself.
        mark: what limits the comparison, such as "best test epoch", if known.
    """

    mean: float
    std: float | None = None
    n: int | None = None
    top5: float | None = None
    read_off: bool = False
    source: str = ""
    mark: str = ""

    def __str__(self) -> str:
        text = f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")
        return f"about {text}" if self.read_off else text


def paper_result(cell: str) -> PaperResult | None:
    """The result of the paper, or else of another source, for a cell such as `cifar100/rn56-rn20/letkd-2`; None if there is none."""
    return paper_results().get(cell) or published_results().get(cell)


def paper_results() -> Mapping[str, PaperResult]:
    """All results of the paper's tables, by cell."""
    return _read("paper_results.toml")


def published_results() -> Mapping[str, PaperResult]:
    """Published results of methods that are not in the paper's tables, by cell, each with its source."""
    return _read("published_results.toml")


@cache
def _read(name: str) -> Mapping[str, PaperResult]:
    data = tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    found = {
        f"{name}/{pair}/{method}": PaperResult(**numbers)
        for name, pairs in data.items()
        for pair, methods in pairs.items()
        for method, numbers in methods.items()
    }
    return MappingProxyType(found)
