"""Fits in several processes."""

from typing import Any

from letkd.distributed.processes import from_first, is_distributed, rank
from letkd.errors import LetkdError
from letkd.supervision.fitted import Fitted


def finish_of_all(part: Fitted) -> None:
    """Finish a fit: the first process computes the buffers and sends them to the others."""
    if not is_distributed():
        return part.finish()
    part.gather()
    fitted: Any = None
    if rank() == 0:
        try:
            part.finish()
            fitted = {name: getattr(part, name) for name in part.fitted_buffers}
        except LetkdError as error:
            fitted = error
    fitted, part.report_ = from_first((fitted, part.report_))
    if isinstance(fitted, LetkdError):
        raise fitted
    part.reset()  # in the first process, too, so that all processes have the same state
    for name, value in fitted.items():
        setattr(part, name, value)
    return None
