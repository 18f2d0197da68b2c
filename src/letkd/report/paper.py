"""The paper's own numbers, to set beside ours."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

# The rows of the supplement's CIFAR-100 table from top to bottom, AT+KD where the ImageNet table has it; newer methods, letKD beside
# others, then the ablations.
ORDER = (
    "teacher",
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
    "kd-ls",
    "dkd-ls",
    "letkd-1-kd",
    "letkd-2-kd",
    "letkd-1-kd-ls",
    "letkd-2-kd-ls",
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


def place(method: str | None) -> int:
    """Where the paper's tables have a method's row; what it does not have comes last."""
    return ORDER.index(method) if method in ORDER else len(ORDER)


@dataclass(frozen=True)
class PaperResult:
    """A number that the paper gives, in per cent.

    Args:
        mean: top-1 accuracy.
        std: over the trials, where it is printed.
        n: trials, where the paper says how many.
        top5: top-5 accuracy, on ImageNet.
        read_off: True for a number that is not printed but was read off a plot.
    """

    mean: float
    std: float | None = None
    n: int | None = None
    top5: float | None = None
    read_off: bool = False

    def __str__(self) -> str:
        text = f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")
        return f"about {text}" if self.read_off else text


def paper_result(cell: str) -> PaperResult | None:
    """What the paper reports for a cell such as `cifar100/rn56-rn20/letkd-2`; None where it has a dash, or no such cell."""
    return paper_results().get(cell)


@cache
def paper_results() -> Mapping[str, PaperResult]:
    """Every number of the paper's tables, by cell."""
    data = tomllib.loads(Path(__file__).with_name("paper_results.toml").read_text(encoding="utf-8"))
    found = {
        f"{name}/{pair}/{method}": PaperResult(**numbers)
        for name, pairs in data.items()
        for pair, methods in pairs.items()
        for method, numbers in methods.items()
    }
    return MappingProxyType(found)
