"""Fits that several processes share."""

from typing import Any

from letkd.distributed.processes import from_first, rank, several
from letkd.errors import LetkdError
from letkd.supervision.base import Supervision


def finish_of_all(supervision: Supervision) -> None:
    """From pixels to labels: by the first process, for all of them."""
    if not several():
        return supervision.finish()
    supervision.gather()
    fitted: Any = None
    if rank() == 0:
        try:
            supervision.finish()
            fitted = {name: getattr(supervision, name) for name in supervision.fitted_buffers}
        except LetkdError as error:
            fitted = error
    fitted, supervision.report_ = from_first((fitted, supervision.report_))
    if isinstance(fitted, LetkdError):
        raise fitted
    supervision.reset()  # in the first process, too: all end in the same state, down to what is worked out later
    for name, value in fitted.items():
        setattr(supervision, name, value)
    return None
