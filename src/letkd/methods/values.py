"""Values of a recipe's table, checked against the annotations of a constructor."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

CONFIG = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
PLAIN = (bool, int, float, str, list, tuple, type(None))  # TOML's types, except tables


def wrong_values(make: Callable[..., Any], table: Mapping[str, Any]) -> list[str]:
    """A sentence for each plain value that the constructor's annotation does not allow. The constructor checks objects itself."""
    found = []
    for key, parameter in inspect.signature(make).parameters.items():
        value = table.get(key)
        if key not in table or not isinstance(value, PLAIN) or _holds_objects(value):
            continue
        try:
            TypeAdapter(parameter.annotation, config=CONFIG).validate_python(value)
        except PydanticSchemaGenerationError:  # the annotation has no schema: the constructor checks the value
            continue
        except ValidationError as error:
            reasons = dict.fromkeys(item["msg"].removeprefix("Input ") for item in error.errors())
            found.append(f"{key} is {value!r:.60} and {' or '.join(reasons)}")
    return found


def _holds_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(not isinstance(part, PLAIN) for part in value)
