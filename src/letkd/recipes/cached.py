"""The number of fixed views of a cached teacher, `train.cache_views = "auto"`."""

from collections.abc import Mapping, Sequence
from typing import Any

from letkd.recipes.tables import merge

MOST, SHARE = 10, 3  # at most ten views, each shown in three epochs or more


def cached_layer(layers: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]] | None:
    """The layer that replaces "auto" by a third of the epochs, at most `MOST`; None if the number of views is not "auto".

    A view pays off when it is shown again: its first epoch takes as long as without a cache.
    """
    table: dict[str, Any] = {}
    for _, layer in layers:
        table = merge(table, layer)
    train = table.get("train")
    if not isinstance(train, Mapping) or train.get("cache_views") != "auto":
        return None
    epochs = train.get("epochs")
    if type(epochs) is not int:
        return None  # the schema reports it
    views = max(1, min(MOST, -(-epochs // SHARE)))
    return f"a third of the epochs ({epochs}), at most {MOST}", {"train": {"cache_views": views}}
