"""A run's metrics for TensorBoard, where it is installed (`pip install letkd[tensorboard]`)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol


class Board(Protocol):
    """What takes the rows of metrics.jsonl."""

    def __call__(self, row: Mapping[str, Any]) -> None: ...


@contextmanager
def board(folder: Path, first: int) -> Iterator[Board]:
    """Write rows as scalars by epoch; what an earlier start wrote from epoch `first` on no longer counts."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield lambda row: None
        return
    with SummaryWriter(str(folder), purge_step=first if first > 1 else None) as writer:

        def add(row: Mapping[str, Any]) -> None:
            for name, value in scalars(row):
                writer.add_scalar(name, value, row["epoch"])
            writer.flush()

        yield add


def scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row, those of tables within it as `table/name`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "epoch":
            yield f"{prefix}{name}", value
