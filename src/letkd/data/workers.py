"""Calls a function in worker processes and yields its results in the order of the requests."""

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from letkd.errors import DataError, RunError

Result = TypeVar("Result")


class _Calls(Dataset):
    """A data set for `DataLoader` whose indices are the requests."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function

    def __getitem__(self, request: Any) -> Any:
        try:
            return self.function(request)
        except DataError as error:
            return error  # returned, because DataLoader would add the worker's traceback to a raised error's message


def in_workers(function: Callable[[Any], Result], requests: Iterable[Any], *, workers: int) -> Iterator[Result]:
    """`function` of each request, in order; workers compute some results ahead. A `DataError` in a worker is raised here.

    Args:
        function: must not draw random numbers, so that results do not depend on the worker.
        workers: number of processes; 0 calls it in this process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more processes than cores are the user's choice
        calls = DataLoader(
            _Calls(function),
            sampler=requests,
            batch_size=None,
            num_workers=workers,
            collate_fn=_unchanged,
            worker_init_fn=_ignore_interrupts,
            generator=torch.Generator(),  # otherwise it would draw from the run's random stream
        )
        results = iter(calls)
    while True:
        try:
            result = next(results)
        except StopIteration:
            return
        except RuntimeError as error:
            if not workers or "worker" not in str(error):
                raise
            raise RunError(
                f"a process that decodes images ended ({str(error).splitlines()[0]}): the machine may be short of memory or of "
                "shared memory; use fewer processes with data.workers, 0 for none"
            ) from error
        if isinstance(result, DataError):
            raise result
        yield result


def _unchanged(result: Any) -> Any:
    return result


def _ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C, which reaches every process of the terminal, and let SIGTERM end this one: the main process handles stops."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
