"""Recipes for images without labels, which have no cross-entropy."""

from collections.abc import Mapping, Sequence
from typing import Any

from letkd.errors import RecipeError
from letkd.recipes.tables import has, merge

CE = ("weights", "ce")
BY_USER = ("override", "--set")


def label_free_layer(layers: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]] | None:
    """The layer that sets the weight of the cross-entropy to 0 if no batch has labels; else None.

    This is so if the data set is `images` or `data.unlabelled_share` is 1. Cross-entropy without a method is then an error.
    """
    table: dict[str, Any] = {}
    for _, layer in layers:
        table = merge(table, layer)
    data = table.get("data")
    if not isinstance(data, Mapping):
        return None
    ce_only = not table.get("methods")
    if ce_only and data.get("unlabelled_share") == 1:
        raise RecipeError(
            "data.unlabelled_share is 1 and the loss is cross-entropy only, which needs labels: choose a share below 1, or a method "
            "that learns from a teacher (--method letkd-1)"
        )
    if data.get("name") != "images" and data.get("unlabelled_share") != 1:
        return None
    if ce_only:
        raise RecipeError(
            "images have no labels, but cross-entropy needs them: choose a method that learns from a teacher (--method "
            "letkd-1), or name labelled images (--data folder)"
        )
    setting = [source for source, layer in layers if has(layer, CE) and layer["weights"]["ce"]]
    if setting and setting[-1] in BY_USER:
        raise RecipeError("weights.ce is set, but no image in a batch has a label for a cross-entropy; remove it")
    return "no labels", {"weights": {"ce": 0.0}}
