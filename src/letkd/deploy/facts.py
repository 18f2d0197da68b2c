"""What has to be known to feed a shipped model and to read its answer; it travels inside every exported file."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from letkd.errors import CheckpointError

KEY = "letkd"
FORMAT = "letkd-export-1"

Input = Literal["uint8", "normalised"]


@dataclass(frozen=True)
class Facts:
    """Facts of a shipped model.

    Args:
        num_classes: logits it gives.
        classes: their names, or none.
        mean: of each channel, where 0 is black and 1 is white; None where nobody knows.
        std: likewise.
        size: height and width of the images it was trained on.
        resize: what a picture's shorter side is scaled to before `size` is cut from its centre; if None, 8/7 of `size`, and a
            picture that already has the size is left as it is.
        input: `uint8`: takes images as they are, RGB from 0 to 255, and normalises them itself; `normalised`: takes
            (image / 255 − mean) / std.
        dynamic: which of batch, height and width may differ from call to call.
        model: the network's name.
    """

    num_classes: int
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: tuple[int, int] | None = None
    resize: int | None = None
    input: Input = "normalised"
    dynamic: tuple[str, ...] = ("batch", "height", "width")
    model: str = ""

    def name_of(self, label: int) -> str:
        """The class's name, or its number where there are no names."""
        return self.classes[label] if self.classes else str(label)

    def as_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})


def facts_from_json(text: str | None, path: object) -> Facts:
    """What `as_json` wrote, or a sentence on what the file is instead."""
    try:
        table = json.loads(text or "null")
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise CheckpointError(f"{path} carries no facts of letkd (classes, normalisation, size); make it with `letkd export`")
    return facts_from(table, path)


def facts_from(table: Mapping[str, Any], path: object) -> Facts:
    """Facts from a table out of a file, each of its kind; what is missing is not known.

    Args:
        path: the file, for the sentence on what is wrong in it.
    """
    C, classes, size = table.get("num_classes"), table.get("classes") or (), table.get("size")
    mean, std, dynamic = table.get("mean"), table.get("std"), table.get("dynamic", Facts.dynamic)
    wrong = [
        name
        for name, right in {
            "num_classes": _counts(C),
            "classes": _row(classes, lambda name: type(name) is str) and len(classes) in (0, C),
            "mean": mean is None or (_row(mean, _finite) and len(mean) == 3),
            "std": std is None or (_row(std, lambda s: _finite(s) and s > 0) and len(std) == 3),
            "size": size is None or (_row(size, _counts) and len(size) == 2),
            "resize": table.get("resize") is None or _counts(table["resize"]),
            "input": table.get("input", Facts.input) in ("uint8", "normalised"),
            "dynamic": _row(dynamic, lambda name: name in Facts.dynamic),
            "model": type(table.get("model", "")) is str,
        }.items()
        if not right
    ]
    if wrong or C is None:
        raise CheckpointError(f"{path} is damaged: what it says of its {', '.join(wrong)} cannot be true; make it again")
    return Facts(
        num_classes=C,
        classes=tuple(classes),
        mean=None if mean is None else tuple(mean),
        std=None if std is None else tuple(std),
        size=None if size is None else (size[0], size[1]),
        resize=table.get("resize"),
        input=table.get("input", Facts.input),
        dynamic=tuple(dynamic),
        model=table.get("model", ""),
    )


def _row(value: Any, right: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(right(part) for part in value)


def _counts(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 1_000_000


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
