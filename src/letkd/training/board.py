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
    writers: list[Any] = []

    def add(row: Mapping[str, Any]) -> None:
        if not writers:
            writers.append(_writer(folder, first))  # at the first row: importing it would keep the first step waiting
        for writer in filter(None, writers):
            for name, value in scalars(row):
                writer.add_scalar(name, value, row["epoch"])
            writer.flush()

    try:
        yield add
    finally:
        for writer in filter(None, writers):
            writer.close()


def _writer(folder: Path, first: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=first if first > 1 else None)


def scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row, those of tables within it as `table/name`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "epoch":
            yield f"{prefix}{name}", value
