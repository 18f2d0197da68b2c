"""Several runs at once, each in a process of its own."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from letkd.errors import RESUME_ME, LetkdError, RunError, Stopped
from letkd.progress import say, set_quiet
from letkd.recipes.schema import Recipe
from letkd.train.stop import STOPPED, immediate_stop, polite_stop

Run = tuple[Recipe, Path, Path]  # the recipe, its folder, the folder of the fitted supervisions


def spread(runs: Sequence[Run], jobs: int, *, save_minutes: float = 15.0, force: bool = False) -> None:
    """Train them all, at most `jobs` at a time; the cores are shared. What fails is told when the others have ended.

    A stop is passed on: each run finishes its step and writes its checkpoint. `save_minutes` and `force` are as for `train`.
    """
    start = multiprocessing.get_context("spawn").Process
    threads = max(1, torch.get_num_threads() // jobs)
    waiting, failed = list(runs), []
    at_work: dict[Path, BaseProcess] = {}
    with polite_stop() as wish:
        while waiting or at_work:
            while waiting and len(at_work) < jobs and not wish.asked:
                recipe, folder, supervision = waiting.pop(0)
                at_work[folder] = start(target=_work, args=(recipe, folder, supervision, threads, save_minutes, force))
                at_work[folder].start()
            if wish.asked:
                for process in at_work.values():
                    process.terminate()
                for process in at_work.values():
                    process.join()
                raise Stopped(STOPPED)
            for folder, process in [(folder, process) for folder, process in at_work.items() if not process.is_alive()]:
                del at_work[folder]
                say(f"{folder}: {'finished' if process.exitcode == 0 else 'failed'}; {len(at_work) + len(waiting)} to go")
                failed += [folder] if process.exitcode else []
            time.sleep(0.1)
    if failed:
        raise RunError(f"{', '.join(map(str, failed))} failed, the others ended; what they said stands above")


def _work(recipe: Recipe, folder: Path, supervision: Path, threads: int, save_minutes: float, force: bool) -> None:
    from letkd.train.loop import train

    threading.Thread(target=_end_with_parent, daemon=True).start()
    set_quiet(True)
    torch.set_num_threads(threads)
    try:
        with immediate_stop():
            train(recipe, folder, supervision=supervision, save_minutes=save_minutes, force=force)
    except Stopped:
        sys.exit(RESUME_ME)
    except LetkdError as error:
        print(f"letkd: {folder}: {error}", file=sys.stderr)
        sys.exit(2)


def _end_with_parent() -> None:
    """Stop this process when the one that started it has ended, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
