"""What a wrong input gets: one sentence that says what was asked, what is true and what to do."""

import difflib
from collections.abc import Iterable


class LetkdError(Exception):
    """A wrong input. The command line prints the sentence and exits with 2; `--debug` shows the traceback."""


class TapError(LetkdError):
    """A place in a model that is not there, does not run, or gives something else than was asked of it."""


class UnsupportedPair(LetkdError):
    """A method that cannot serve this student and teacher, and why. Tables print a dash."""


class NotFittedError(LetkdError, ValueError):
    """A supervision whose offline part has not run."""


class FitError(LetkdError):
    """A stream of teacher features that a supervision cannot be fitted to."""


class NonFiniteError(LetkdError):
    """NaN or infinity in a feature map, a loss term or a gradient."""


class DataError(LetkdError):
    """A data file or label that is missing, truncated, foreign or out of range."""


class RecipeError(LetkdError):
    """Recipe values that are unknown or wrong; all of them at once."""


class CheckpointError(LetkdError):
    """Weights that do not fit a model, or a file that is damaged or not what it says."""


class RunError(LetkdError):
    """A run folder that holds something else, or lacks what was asked for."""


class InUseError(RunError):
    """Something that another process holds at the moment."""


class ExportError(LetkdError):
    """A student that cannot be exported as asked, or an exported one that does not give what the student gives."""


RESUME_ME = 75  # exit code; EX_TEMPFAIL of sysexits.h: try the same command again


class Stopped(BaseException):
    """A stop was asked for, and the same command resumes. Not an error: like KeyboardInterrupt, no `except Exception` catches it."""


def nearest(asked: str, known: Iterable[str], n: int = 4) -> str:
    """The known names closest to the one asked for, symbols for it (T for temperature) first, for the end of an error's sentence."""
    known = list(known)
    symbols = [name for name in known if len(name) == 1 and asked.lower().startswith(name.lower())]
    close = list(dict.fromkeys([*symbols, *difflib.get_close_matches(asked, known, n=n, cutoff=0.3)]))[:n] or sorted(known)[:n]
    return ", ".join(close) if close else "none"
