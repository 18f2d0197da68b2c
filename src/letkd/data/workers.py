"""A function called in worker processes, its results in the order of the requests."""

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from letkd.errors import DataError

Result = TypeVar("Result")


class _Calls(Dataset):
    """What `DataLoader` takes for a data set: its indices are the requests."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function

    def __getitem__(self, request: Any) -> Any:
        try:
            return self.function(request)
        except DataError as error:
            return error  # as a value: raised, it would arrive with the worker's traceback in its message


def in_workers(function: Callable[[Any], Result], requests: Iterable[Any], *, workers: int) -> Iterator[Result]:
    """`function` of each request, in order, with some requests worked on ahead; a `DataError` of it is raised here.

    Args:
        function: must not draw random numbers of its own, so that nothing depends on which worker it runs in.
        workers: processes; with 0 it is called here.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more processes than cores: the user's own choice
        calls = DataLoader(
            _Calls(function),
            sampler=requests,
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=_leave_signals,
            generator=torch.Generator(),  # or it would draw a number from the run's own stream
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
            raise DataError(
                f"a process that decodes images ended ({str(error).splitlines()[0]}): the machine may be short of memory or of "
                "shared memory; try fewer with data.workers, 0 for none"
            ) from error
        if isinstance(result, DataError):
            raise result
        yield result


def _as_it_is(result: Any) -> Any:
    return result


def _leave_signals(worker: int) -> None:
    """Ctrl-C reaches every process of the terminal; the run that started this one decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
