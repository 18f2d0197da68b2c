"""Tasks on a Ray cluster (`pip install letkd[ray]`)."""

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from letkd.errors import LetkdError, Stopped
from letkd.optional import need
from letkd.progress import set_quiet
from letkd.training.launchers.tasks import RETRIES, Outcome, Task, attempt, log_outcome
from letkd.training.stop import STOPPED, immediate_stop, polite_stop


class Ray:
    """Runs each task as a Ray task; if its worker dies, the task resumes on another. All machines must share the folders.

    Args:
        address: HOST:PORT of a running cluster; default: RAY_ADDRESS, or a cluster on this machine.
        cpus, gpus: per task.
    """

    def __init__(self, *, address: str = "", cpus: int = 1, gpus: int = 0):
        self._ray = need("ray", "ray", "--launcher ray")
        self.address = address or os.environ.get("RAY_ADDRESS") or "auto"
        self.cpus, self.gpus = cpus, gpus

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Outcome]]:
        ray = self._ray
        self._connect()
        remote = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=RETRIES)(_work)
        pending = {remote.remote(task, os.getcwd()): k for k, task in enumerate(tasks)}
        with polite_stop() as request:
            try:
                while pending:
                    for ref in ray.wait(list(pending), num_returns=1, timeout=0.5)[0]:
                        k = pending.pop(ref)
                        outcome = self._outcome(ref)
                        log_outcome(tasks[k], outcome, len(pending))
                        yield k, outcome
                    if request.asked:
                        raise Stopped(STOPPED)
            finally:
                for ref in pending:
                    ray.cancel(ref, force=False)  # interrupts the runs, which write their checkpoints

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        try:
            _probe(self.address)
            self._ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise LetkdError(
                f"--launcher ray: no Ray cluster can be reached at {self.address} ({why:.200}); start one with `ray start --head`, or name "
                "it with ray:address=HOST:PORT"
            ) from None

    def _outcome(self, ref: Any) -> Outcome:
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return Outcome("killed", f"{type(error).__name__}: {lines[0]:.200}")


def _probe(address: str) -> None:
    """Raise an error at once if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _work(task: Task, folder: str) -> Outcome:
    os.chdir(folder)
    set_quiet(True)
    with immediate_stop():
        return attempt(task)
