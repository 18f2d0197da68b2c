"""The methods by name."""

from typing import Any, TypeVar

from letkd.errors import LetkdError
from letkd.methods.base import Method
from letkd.plugins import Registry

Class = TypeVar("Class", bound=type[Method])


def _check(name: str, cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise LetkdError(f"{cls!r} is not a subclass of letkd.Method")
    missing = [attribute for attribute in ("name", "paper", "loss", "formulae") if not hasattr(cls, attribute)]
    if missing:
        raise LetkdError(f"the method {cls.__name__} has no {', '.join(missing)}; set it as an attribute of the class")
    if cls.name != name:
        raise LetkdError(f"its entry point is named {name!r} and the method {cls.name!r}; use one name")


METHODS: Registry[type[Method]] = Registry("methods", "a method", _check)


def register_method(cls: Class) -> Class:
    """Register a method by its `name`, for tables `[methods.NAME]` in recipes. Usable as a decorator.

    Examples:
        >>> @register_method
        ... class Nothing(Method):
        ...     name, paper, loss, formulae = "nothing", "–", "no loss", ()
        >>> METHODS["nothing"] is Nothing
        True
        >>> _ = METHODS.remove("nothing")
    """
    _check(getattr(cls, "name", ""), cls)
    METHODS.add(cls.name, cls)
    return cls
