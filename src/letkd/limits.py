"""Bounds of values as pydantic types, for arguments of methods and supervisions, for recipes and for file headers."""

from typing import Annotated, Any

from pydantic import Field

LARGEST_SIDE = 16_384  # pixels
STEEPEST = 1e6  # for rates, weights and means: above it float32 overflows within a few steps
LARGEST = 1_000_000  # for every count in a recipe or a file

Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]  # clusters, channels, negatives, classes
Epochs = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Samples = Annotated[int, Field(strict=True, ge=1, le=2**31)]
Bytes = Annotated[int, Field(strict=True, ge=1, le=2**62)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Scale = Annotated[float, Field(strict=True, ge=1e-12, le=1e12)]  # a temperature, a variance, an ε
Number = Annotated[float, Field(strict=True, ge=-1e12, le=1e12)]


def parse_weight(value: Any) -> float | str:
    """The weight of a loss term: a number from 0 to `STEEPEST`, `"auto"` or `"auto:SHARE"`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(str(value).partition(":")[2] or 1) if str(value).partition(":")[0] == "auto" else float(value)
        if not 0 <= number <= STEEPEST or (number == 0 and isinstance(value, str) and value.startswith("auto")):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f'a weight is a number from 0 to {STEEPEST:,.0f}, or "auto", or a share of it as in "auto:0.5"'
        ) from None
    return value if str(value).startswith("auto") else number


def share_of(weight: float | str) -> float | None:
    """The share of an automatic weight: 1 for `auto`, 0.5 for `auto:0.5`; None for a number."""
    return float(weight.partition(":")[2] or 1) if isinstance(weight, str) else None
