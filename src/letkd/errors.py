"""Errors for wrong inputs. Each message is one sentence: what was asked, what is true, what to do."""

import difflib
from collections.abc import Iterable


class LetkdError(Exception):
    """A wrong input. The command line prints the message and exits with code 2; `--debug` shows the traceback."""


class TapError(LetkdError):
    """A tap whose module does not exist or does not run, or whose output is not what was asked for."""


class UnsupportedPair(LetkdError):
    """A method that does not support this student and teacher. Tables print a dash."""


class NotFittedError(LetkdError, ValueError):
    """A supervision that is used before it is fitted."""


class FitError(LetkdError):
    """Teacher features that a supervision cannot be fitted to."""


class NonFiniteError(LetkdError):
    """NaN or infinity in a feature map, a loss term or a gradient."""


class DataError(LetkdError):
    """A data file or label that is missing, truncated, unknown or out of range."""


class RecipeError(LetkdError):
    """Unknown or wrong recipe values; the message lists all of them."""


class CheckpointError(LetkdError):
    """Weights that do not fit a model, or a file that is damaged or of another kind."""


class RunError(LetkdError):
    """A run folder that contains something else, or lacks what was asked for."""


class InUseError(RunError):
    """A folder or file that another process is using."""


class ExportError(LetkdError):
    """A student that cannot be exported as asked, or an exported file whose outputs differ from the student's."""


RESUME_ME = 75  # exit code; EX_TEMPFAIL of sysexits.h: try the same command again


class Stopped(BaseException):
    """A requested stop; the same command resumes. Not an error: as with KeyboardInterrupt, `except Exception` does not catch it."""


def nearest(asked: str, known: Iterable[str], n: int = 4) -> str:
    """The known names closest to the one asked for, one-letter symbols (T for temperature) first, for an error message."""
    known = list(known)
    symbols = [name for name in known if len(name) == 1 and asked.lower().startswith(name.lower())]
    close = list(dict.fromkeys([*symbols, *difflib.get_close_matches(asked, known, n=n, cutoff=0.3)]))[:n] or sorted(known)[:n]
    return ", ".join(close) if close else "none"
