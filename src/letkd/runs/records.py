"""What the text files of a run folder hold, and the checks that every reader of them applies."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from letkd.recipes.schema import MOST

Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Name = Annotated[str, Field(max_length=100)]
Text = Annotated[str, Field(max_length=10_000)]
MOST_NAMES = 64  # loss terms, sites, or values of a site


@dataclass(frozen=True)
class Result:
    """What a finished run reports. Accuracies are top-1 in per cent; the last epoch's is the one that counts.

    `ema_test` and `ema_val` are those of the average of the weights (`train.ema`), None without one. `teacher_top1` was measured before
    training, on validation images (training images without a validation split); None if the run had no teacher, or one of other
    classes. Without labels there is no accuracy; `held_out` are then the distillation terms on the validation images. `probe` is the
    accuracy (%) of classifiers on the student's features, `knn` and `linear`.
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


class EpochRow(BaseModel):
    """A row of the log: `epoch`, numbers by name, and the health of the KD layers by site."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[Name, float | None] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    epoch: int = Field(ge=1, le=MOST)
    health: dict[Name, Annotated[dict[Name, float | None], Field(max_length=MOST_NAMES)]] = Field({}, max_length=MOST_NAMES)

    @model_validator(mode="after")
    def _few_names(self) -> "EpochRow":
        if len(self.__pydantic_extra__) > MOST_NAMES:
            raise ValueError(f"more than {MOST_NAMES} numbers")
        return self


@dataclass(frozen=True)
class Note:
    """Why a row of a comparison has no numbers."""

    pair: Text
    method: Text
    title: Text
    note: Text


class Position(BaseModel):
    """Where a checkpoint was written: `step` steps of `epoch` were done, with the sums of each process over them."""

    model_config = ConfigDict(extra="allow", strict=True)

    epoch: int = Field(ge=1, le=MOST + 1)
    step: int = Field(0, ge=0, le=MOST)
    sums: list[dict[str, float]] = []
    best_val: float | None = None
    best_val_epoch: int | None = None
    seconds: float = Field(0.0, ge=0, le=1e12)
    precision: dict[str, Any] = {}


RESULT = TypeAdapter(Result)
NOTE = TypeAdapter(Note)
TABLE = TypeAdapter(dict[str, Any])


def reason(error: Exception) -> str:
    """Why a file was refused, in a line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return f"{where}: {first['msg']}" if where else first["msg"]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
