"""Messages of the library with its arguments written as command-line options."""

import logging
import re

from letkd.progress import set_quiet, to_screen

ARGUMENT = re.compile(r"`([a-z][a-z0-9_]*)=([^`]*)`")  # `out=FOLDER`
KEY = re.compile(r"`((?:[a-z_]+\.)+[\w\"/-]+=[^`]*)`")  # `optim.lr=0.01`


def in_flags(text: str) -> str:
    """Arguments in a message as options: ``"name it with `root=FOLDER`"`` becomes ``"name it with --root FOLDER"``.

    Examples:
        >>> in_flags("omit `size=`, add `force=True`, or use `optim.clip=5`")
        'omit --size, add --force, or use --set optim.clip=5'
    """
    text = ARGUMENT.sub(lambda found: _option(found[1], found[2]), text)
    return KEY.sub(lambda found: f"--set {found[1]}", text)


OTHER_NAMES = {"model": "student"}  # arguments whose option has another name


def _option(name: str, value: str) -> str:
    flag = f"--{OTHER_NAMES.get(name, name).replace('_', '-')}"
    return flag if value in ("", "True") else f"{flag} {value}"


class _InFlags(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = in_flags(record.getMessage()), None
        return True


_in_flags = _InFlags()


def show_messages() -> None:
    """Show the library's log messages and progress bars."""
    to_screen.addFilter(_in_flags)
    set_quiet(False)
