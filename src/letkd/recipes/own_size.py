"""The image size of a folder of images, which has none of its own: that of the student."""

from collections.abc import Mapping, Sequence
from typing import Any

from letkd.recipes.tables import has, merge

SIZE = ("data", "size")
SIZELESS = ("folder", "images")


def own_size_layer(layers: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]] | None:
    """The layer that sets `data.size` to the input size of a student from the zoo, if the images are files and no layer sets it."""
    table: dict[str, Any] = {}
    for _, layer in layers:
        table = merge(table, layer)
    data, student = table.get("data"), table.get("student")
    if (
        not isinstance(data, Mapping)
        or not isinstance(student, Mapping)
        or data.get("name") not in SIZELESS
        or has(table, SIZE)
    ):
        return None
    import torch

    from letkd.models.base import MODELS  # when needed: recipes are read without torch

    name = student.get("model")
    if not isinstance(name, str) or name not in MODELS:
        return None
    with torch.device("meta"):
        shape = getattr(MODELS[name](num_classes=2), "input_size", None)
    if not isinstance(shape, tuple) or len(shape) != 3:
        return None
    height, width = shape[1:]
    return f"input size of {name}", {"data": {"size": height if height == width else [height, width]}}
