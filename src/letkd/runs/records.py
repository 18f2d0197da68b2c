"""Contents of the text files in a run folder, and the checks that all readers apply."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from letkd.recipes.schema import MAX_COUNT

Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Name = Annotated[str, Field(max_length=100)]
Text = Annotated[str, Field(max_length=10_000)]
MAX_NAMES = 64  # loss terms, sites, or values of a site


@dataclass(frozen=True)
class Result:
    """Result of a finished run. Accuracies are top-1 in per cent; the main result is that of the last epoch.

    `ema_test` and `ema_val` are those of the averaged weights (`train.ema`), None without them. `teacher_top1` is measured before
    training on validation images, or on training images without a validation split; None without a teacher or if its classes differ.
    Without labels there is no accuracy; `held_out` then has the distillation terms on the validation images. `probe` has the accuracy
    (%) of classifiers on the student's features, `knn` and `linear`. `cpu_seconds` is the processor time of the first process, without
    that of its worker processes. `auto_weights` has the measured values of automatic weights.
    """

    last_test: Percent | None
    last_test_top5: Percent | None
    last_val: Percent | None
    best_val: Percent | None
    best_val_epoch: Count | None
    best_val_test: Percent | None
    parameters: Count
    epochs: Count
    seconds: Annotated[float, Field(ge=0, le=1e12)]
    teacher_top1: Percent | None = None
    ema_test: Percent | None = None
    ema_val: Percent | None = None
    held_out: dict[Name, float] = field(default_factory=dict)
    probe: dict[Name, Percent] = field(default_factory=dict)
    cpu_seconds: Annotated[float, Field(ge=0, le=1e12)] | None = None
    auto_weights: dict[Name, float] = field(default_factory=dict)


class EpochRow(BaseModel):
    """A row of the log: `epoch`, numbers by name, and the health of the KD layers by site."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[Name, float | None] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    epoch: int = Field(ge=1, le=MAX_COUNT)
    health: dict[Name, Annotated[dict[Name, float | None], Field(max_length=MAX_NAMES)]] = Field({}, max_length=MAX_NAMES)

    @model_validator(mode="after")
    def _limit_names(self) -> "EpochRow":
        if len(self.__pydantic_extra__) > MAX_NAMES:
            raise ValueError(f"more than {MAX_NAMES} numbers")
        return self


@dataclass(frozen=True)
class Note:
    """Why a row of a comparison has no numbers."""

    pair: Text
    method: Text
    title: Text
    note: Text


class Position(BaseModel):
    """Progress at a checkpoint: `step` steps of `epoch` were done, with the sums of each process over them."""

    model_config = ConfigDict(extra="allow", strict=True)

    epoch: int = Field(ge=1, le=MAX_COUNT + 1)
    step: int = Field(0, ge=0, le=MAX_COUNT)
    sums: list[dict[str, float]] = []
    best_val: float | None = None
    best_val_epoch: int | None = None
    seconds: float = Field(0.0, ge=0, le=1e12)
    cpu_seconds: float = Field(0.0, ge=0, le=1e12)
    precision: dict[str, Any] = {}


RESULT = TypeAdapter(Result)
NOTE = TypeAdapter(Note)
TABLE = TypeAdapter(dict[str, Any])


def reason(error: Exception) -> str:
    """Why a file was refused, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        return f"{key}: {first['msg']}" if key else first["msg"]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
