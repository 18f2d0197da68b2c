"""Bounds of values as pydantic types, for arguments of methods and supervisions, for recipes and for file headers."""

from typing import Annotated

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
