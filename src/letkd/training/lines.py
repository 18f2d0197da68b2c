"""Plain lines on a run's epochs, for logs."""

import time
from typing import Any

from letkd.progress import on_terminal, say


def teller(every: float = 10.0):
    """Plain lines for logs, where no bar is seen: the epochs' rows, no more than one in `every` seconds."""
    said = time.monotonic()

    def tell(epoch: int, epochs: int, row: dict[str, Any]) -> None:
        nonlocal said
        if not on_terminal() and time.monotonic() - said >= every:
            said = time.monotonic()
            train, val = (
                "" if row[f"{name}_top1"] is None else f"  {name} {row[f'{name}_top1']:.2f} %" for name in ("train", "val")
            )
            say(f"epoch {epoch}/{epochs}  loss {row['loss']:.3f}{train}{val}")

    return tell
