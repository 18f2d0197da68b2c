"""Libraries that only an optional extra brings, imported when they are used."""

import importlib
from typing import Any

from letkd.errors import LetkdError


def need(package: str, extra: str, what: str) -> Any:
    """Import a package of an extra, or say how to get it.

    Args:
        what: that needs it, as the sentence's subject: "--launcher ray".
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        missing = error.name or package
        raise LetkdError(f"{what} needs {missing}, which is not installed: pip install 'letkd[{extra}]'") from None
