"""The supervisions by kind."""

from typing import Any, TypeVar

from letkd.errors import LetkdError
from letkd.plugins import Registry
from letkd.supervision.base import Supervision

Class = TypeVar("Class", bound=type[Supervision])


def _check(name: str, cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Supervision)):
        raise LetkdError(f"{cls!r} is not a subclass of letkd.Supervision")
    if getattr(cls, "kind", None) != name:
        raise LetkdError(f"its entry point is named {name!r} and its kind is {getattr(cls, 'kind', None)!r}; use one name")


SUPERVISIONS: Registry[type[Supervision]] = Registry("supervisions", "a supervision", _check)


def register_supervision(cls: Class) -> Class:
    """Register a supervision by its `kind`, for the `supervision` table of a site in a recipe. Usable as a decorator.

    Examples:
        >>> @register_supervision
        ... class Ones(Supervision):
        ...     kind = "ones"
        >>> _ = SUPERVISIONS.remove("ones")
    """
    if not hasattr(cls, "kind"):
        raise LetkdError(f"the supervision {cls.__name__} has no kind; set it as an attribute of the class")
    SUPERVISIONS.add(cls.kind, cls)
    return cls
