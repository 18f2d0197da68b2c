"""Storage of a study: a journal file, or a database for many machines."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from letkd.errors import LetkdError
from letkd.optional import need


class SearchError(LetkdError):
    """A search that cannot be run as requested, or a study of another search."""


def need_optuna() -> Any:
    optuna = need("optuna", "search", "`letkd search`")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_storage(address: str) -> Any:
    """Optuna's storage: a database for a URL, a journal file for a path."""
    optuna = need_optuna()
    if "://" in address:
        with storage_errors(address), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return optuna.storages.RDBStorage(address)
    path = Path(address).absolute()  # the lock is a symbolic link to it, and a broken link would never expire
    with storage_errors(address):
        path.parent.mkdir(parents=True, exist_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        return optuna.storages.JournalStorage(backend)


@contextmanager
def storage_errors(address: str) -> Iterator[None]:
    """Turn errors of a storage into one sentence, which names the address without its password."""
    optuna = need_optuna()
    sqlalchemy = need("sqlalchemy", "search", "`letkd search`")
    try:
        yield
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError, OSError, ValueError, KeyError) as error:
        cause = error.__cause__ or error
        why = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise SearchError(
            f"the storage {without_password(address)} cannot be used: {without_password(why)}; check that it exists and can be reached"
        ) from None
    except ImportError as error:
        missing = getattr(error.__cause__ or error.__context__ or error, "name", None) or "a driver"
        install = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}.get(
            missing, missing
        )
        raise SearchError(
            f"the storage {without_password(address)} needs {missing}, which is not installed: pip install {install}"
        ) from None


def without_password(text: str) -> str:
    return re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:…@", text)
