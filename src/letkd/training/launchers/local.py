"""Tasks on this machine: each in its own process, a fixed number at a time."""

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
from letkd.progress import say, set_quiet
from letkd.training.launchers.tasks import RETRIES, Outcome, Task, attempt
from letkd.training.stop import STOPPED, immediate_stop, polite_stop


class Local:
    """At most `jobs` processes at a time, which share the cores; with several GPUs each process sees one of them.

    A stop is passed on: each run finishes its step and writes its checkpoint. If this process is killed, the others stop by
    themselves.
    """

    def __init__(self, jobs: int):
        self.jobs = jobs

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Outcome]]:
        waiting = list(range(len(tasks)))
        slots = set(range(self.jobs))
        left = dict.fromkeys(waiting, RETRIES)
        at_work: dict[int, _Worker] = {}
        threads = max(1, torch.get_num_threads() // max(1, min(self.jobs, len(tasks))))
        with polite_stop() as wish:
            try:
                while waiting or at_work:
                    while waiting and slots and not wish.asked:
                        k = waiting.pop(0)
                        at_work[k] = _Worker(tasks[k], slots.pop(), threads)
                    if wish.asked:
                        raise Stopped(STOPPED)
                    for k, worker in [(k, worker) for k, worker in at_work.items() if not worker.process.is_alive()]:
                        del at_work[k]
                        slots.add(worker.slot)
                        outcome = worker.outcome()
                        if outcome.state in ("stopped", "killed") and left[k]:
                            left[k] -= 1
                            waiting.append(k)
                            say(f"{tasks[k].label}: {outcome.sentence}; started again")
                            continue
                        said = "finished" if outcome.state == "done" else f"{outcome.state}: {outcome.sentence}"
                        say(f"{tasks[k].label}: {said}; {len(at_work) + len(waiting)} to go")
                        yield k, outcome
                    time.sleep(0.05)
            finally:
                for worker in at_work.values():
                    worker.process.terminate()
                for worker in at_work.values():
                    worker.process.join()


class _Worker:
    """A process at work on a task."""

    def __init__(self, task: Task, slot: int, threads: int):
        spawn = multiprocessing.get_context("spawn")
        self.slot = slot
        self._ours, theirs = spawn.Pipe(duplex=False)
        self.process: BaseProcess = spawn.Process(target=_work, args=(task, theirs, threads, _gpu(slot)))
        self.process.start()
        theirs.close()

    def outcome(self) -> Outcome:
        try:
            if self._ours.poll():
                return self._ours.recv()
        except EOFError:
            pass
        finally:
            self._ours.close()
        code = self.process.exitcode or 0
        return Outcome("killed", f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}")


def _gpu(slot: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES is in a slot; None to leave it alone."""
    count = torch.cuda.device_count()
    if count < 2:
        return None
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(k) for k in range(count)])[slot % count]


def _work(task: Task, result: Connection, threads: int, gpu: str | None) -> None:
    set_quiet(True)
    torch.set_num_threads(threads)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # CUDA reads it at its first use, which is still to come
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    with immediate_stop():
        outcome = attempt(task)
    with suppress(OSError):  # the other side is gone
        result.send(outcome)


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
