"""What is needed to use a shipped model: classes, normalisation, image size; stored in every model file."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from letkd.errors import CheckpointError
from letkd.limits import LARGEST_SIDE, STEEPEST, Count

FORMAT = "letkd-export-1"

Input = Literal["uint8", "normalised"]
Axis = Literal["batch", "height", "width"]
Side = Annotated[int, Field(strict=True, ge=1, le=LARGEST_SIDE)]
Number = Annotated[float, Field(strict=True, ge=-STEEPEST, le=STEEPEST)]
Positive = Annotated[float, Field(strict=True, gt=1e-6, le=STEEPEST)]
Name = Annotated[str, Field(max_length=1000)]


class Facts(BaseModel):
    """Facts about a shipped model, in the header of a student file, the metadata of an ONNX file or the extra file of a program.

    Args:
        num_classes: number of logits.
        classes: names of the classes, or empty.
        mean, std: per channel, with 0 for black and 1 for white; None if unknown.
        size: height and width of the images it was trained on.
        resize: length of the shorter side before `size` is cropped from the centre; None: 8/7 of `size`, but images that already
            have the size are not changed.
        input: `uint8`: the model takes RGB values from 0 to 255 and normalises them itself; `normalised`: it takes
            (image / 255 − mean) / std.
        dynamic: which of batch, height and width may vary.
        batch: images per call if the batch is fixed.
        model: the network's name.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    num_classes: Count
    classes: tuple[Name, ...] = ()
    mean: tuple[Number, Number, Number] | None = None
    std: tuple[Positive, Positive, Positive] | None = None
    size: tuple[Side, Side] | None = None
    resize: Annotated[int, Field(strict=True, ge=1, le=2 * LARGEST_SIDE)] | None = None
    input: Input = "normalised"
    dynamic: tuple[Axis, ...] = ("batch", "height", "width")
    batch: Count = 1
    model: Name = ""

    @field_validator("classes", mode="before")
    @classmethod
    def _no_names(cls, value: Any) -> Any:
        return () if value is None else value

    @field_validator("classes")
    @classmethod
    def _a_name_per_logit(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if len(value) not in (0, info.data.get("num_classes", len(value))):
            raise ValueError("the numbers of names and logits differ")
        return value

    def replace(self, **changes: Any) -> "Facts":
        """A copy with these changes."""
        return Facts(**{**self.model_dump(include=set(Facts.model_fields)), **changes})

    def at_size(self, size: tuple[int, int] | None) -> "Facts":
        """A copy for images of another size, with `resize` in proportion, so that the same part of a picture is seen."""
        if size is None or self.size is None or self.resize is None:
            return self.replace(size=size or self.size)
        return self.replace(size=size, resize=max(1, round(self.resize * min(size) / min(self.size))))

    def name_of(self, label: int) -> str:
        """The class's name, or its number if there are no names."""
        return self.classes[label] if self.classes else str(label)

    def as_json(self) -> str:
        return json.dumps({"format": FORMAT, **self.model_dump()})


Kind = TypeVar("Kind", bound=BaseModel)


def facts_from_json(text: str | None, path: object) -> Facts:
    """Parse what `as_json` wrote."""
    table = table_from_json(text)
    if table is None or table.get("format") != FORMAT:
        raise CheckpointError(f"{path} has no metadata of letkd (classes, normalisation, size); create it with `letkd export`")
    return facts_from(table, path)


def facts_from(table: Mapping[str, Any], path: object) -> Facts:
    """Facts from a table in a file; missing keys get their defaults.

    Args:
        path: the file, for error messages.
    """
    return checked(Facts, table, path)


def table_from_json(text: str | None) -> dict[str, Any] | None:
    """A JSON object as a dictionary; None if the text is anything else."""
    try:
        table = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) else None


def checked(kind: type[Kind], table: Mapping[str, Any], path: object) -> Kind:
    """Validate a table from a file; an error names the wrong keys."""
    try:
        return kind.model_validate(dict(table))
    except ValidationError as error:
        raise CheckpointError(
            f"{path} is damaged or from a newer version of letkd: its header is wrong at {wrong_places(error)}; get it again, or "
            "upgrade letkd"
        ) from None


def wrong_places(error: ValidationError, n: int = 4) -> str:
    """The wrong keys of a table: `mean[1], changes[0].settings.K and 2 more`."""
    places = list(dict.fromkeys(_place(part["loc"]) for part in error.errors(include_url=False, include_input=False)))
    return ", ".join(places[:n]) + (f" and {len(places) - n} more" if len(places) > n else "")


def _place(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part[:40]}" for part in loc).removeprefix(".")
