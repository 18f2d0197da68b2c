"""Libraries of the optional extras, imported when they are used."""

import importlib
from typing import Any

from letkd.errors import LetkdError


def need(package: str, extra: str, what: str) -> Any:
    """Import a package of an extra, or raise an error that says how to install it.

    Args:
        what: the feature that needs it, as the message's subject: "--launcher ray".
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        missing = error.name or package
        raise LetkdError(f"{what} needs {missing}, which is not installed: pip install 'letkd[{extra}]'") from None
