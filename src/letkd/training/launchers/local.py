"""Tasks on this machine: each in its own process, a fixed number in parallel."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from letkd.errors import Stopped
from letkd.progress import set_quiet
from letkd.training.launchers.tasks import Outcome, Task, Waiting, attempt, log_outcome
from letkd.training.stop import STOPPED, immediate_stop, polite_stop


class Local:
    """At most `jobs` parallel processes, which share the cores; with several GPUs each process sees one of them.

    A stop signal is passed on: each run finishes its step and writes its checkpoint. If this process is killed, the workers stop as
    well.
    """

    def __init__(self, jobs: int):
        self.jobs = jobs

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Outcome]]:
        waiting = Waiting(tasks)
        slots = set(range(self.jobs))
        running: dict[int, _Worker] = {}
        threads = max(1, torch.get_num_threads() // max(1, min(self.jobs, len(tasks))))
        with polite_stop() as request:
            try:
                while waiting or running:
                    while waiting and slots and not request.asked:
                        k = waiting.pop()
                        running[k] = _Worker(tasks[k], slots.pop(), threads)
                    if request.asked:
                        raise Stopped(STOPPED)
                    for k, worker in [(k, worker) for k, worker in running.items() if not worker.process.is_alive()]:
                        del running[k]
                        slots.add(worker.slot)
                        if not waiting.retry(k, outcome := worker.outcome()):
                            log_outcome(tasks[k], outcome, len(running) + len(waiting))
                            yield k, outcome
                    time.sleep(0.05)
            finally:
                for worker in running.values():
                    worker.process.terminate()
                for worker in running.values():
                    worker.process.join()


class _Worker:
    """A process that runs a task."""

    def __init__(self, task: Task, slot: int, threads: int):
        spawn = multiprocessing.get_context("spawn")
        self.slot = slot
        self._receiver, sender = spawn.Pipe(duplex=False)
        self.process: BaseProcess = spawn.Process(target=_work, args=(task, sender, threads, _gpu(slot)))
        self.process.start()
        sender.close()

    def outcome(self) -> Outcome:
        try:
            if self._receiver.poll():
                return self._receiver.recv()
        except EOFError:
            pass
        finally:
            self._receiver.close()
        code = self.process.exitcode or 0
        return Outcome("killed", f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}")


def _gpu(slot: int) -> str | None:
    """CUDA_VISIBLE_DEVICES for a slot; None to leave it unchanged."""
    count = torch.cuda.device_count()
    if count < 2:
        return None
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(k) for k in range(count)])[slot % count]


def _work(task: Task, result: Connection, threads: int, gpu: str | None) -> None:
    set_quiet(True)
    # Processes that decode images start in the system's way: this one would spawn them, too, and each would import torch.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    torch.set_num_threads(threads)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # CUDA has not been used yet, and reads this at its first use
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    with immediate_stop():
        outcome = attempt(task)
    with suppress(OSError):  # the parent process is gone
        result.send(outcome)


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
