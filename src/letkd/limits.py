"""Bounds of values, as types that pydantic checks: arguments of methods and supervisions, recipes, and headers of files."""

from typing import Annotated

from pydantic import Field

LARGEST_SIDE = 16_384  # pixels
STEEPEST = 1e6  # of rates, weights, means: beyond it float32 overflows within a few steps
LARGEST = 1_000_000  # of anything that a recipe or a file counts

Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]  # of clusters, channels, negatives, classes
Epochs = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Samples = Annotated[int, Field(strict=True, ge=1, le=2**31)]
Bytes = Annotated[int, Field(strict=True, ge=1, le=2**62)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Scale = Annotated[float, Field(strict=True, ge=1e-12, le=1e12)]  # a temperature, a variance, an ε
Number = Annotated[float, Field(strict=True, ge=-1e12, le=1e12)]
