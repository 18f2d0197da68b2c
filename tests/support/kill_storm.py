"""Trains a recipe in children that it kills without warning, again and again, until one finishes.

    python -m tests.support.kill_storm RECIPE.toml FOLDER SEED KILLS

Half of the kills come at a random moment; the others in the middle of writing a file, or between its two renames. FOLDER/whole is the
same run in a child that nobody kills, FOLDER/killed that of the storm.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from letkd.progress import set_quiet
from letkd.recipes import resolve
from letkd.training import loop


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def set_trap(left: int, where: str, die: Callable[[], None] = die) -> None:
    """Die at some later write of a file: in its middle (`fsync`), `before` its name changes, or `after`."""
    real = {"replace": os.replace, "fsync": os.fsync}

    def replace(*args) -> None:
        nonlocal left
        left -= 1
        if left == 0 and where == "before":
            die()
        real["replace"](*args)
        if left == 0 and where == "after":
            die()

    def fsync(handle: int) -> None:
        if left == 1 and where == "fsync":
            os.ftruncate(handle, os.fstat(handle).st_size // 2)
            die()
        real["fsync"](handle)

    os.replace, os.fsync = replace, fsync


def child(recipe, folder: Path, dice: random.Random, trap: bool) -> None:
    if trap:
        set_trap(dice.randrange(1, 5), dice.choice(["fsync", "before", "after"]))
    loop.train(recipe, folder, save_minutes=0)  # saved after every step, so that there is much to interrupt
    os._exit(0)


def storm(recipe, folder: Path, dice: random.Random, kills: int, moment: float = 0.0) -> int:
    """How many children it took, but for the last; those killed at random are within so many seconds."""
    killed = 0
    while True:
        pid = os.fork()
        if pid == 0:
            try:
                child(recipe, folder, dice, trap=killed % 2 == 0 and killed < kills)
            finally:
                os._exit(1)
        dice.random()  # the next child's trap is another
        if killed % 2 and killed < kills:
            time.sleep(dice.uniform(0.05, 1.0) * moment)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        elif os.waitstatus_to_exitcode(status):
            sys.exit("a child failed by itself")
        else:
            return killed


def main() -> None:
    import faiss  # noqa: F401 - once for all children, which would otherwise spend their time on imports
    import lightning_fabric  # noqa: F401

    torch.set_num_threads(1)  # a child of a process with threads inherits their locks
    set_quiet(True)
    recipe, folder = resolve(sys.argv[1]), Path(sys.argv[2])
    dice, kills = random.Random(int(sys.argv[3])), int(sys.argv[4])
    began = time.monotonic()
    if storm(recipe, folder / "whole", dice, 0):
        sys.exit("the run that nobody kills was killed")
    third = (time.monotonic() - began) / 3
    print(f"killed {storm(recipe, folder / 'killed', dice, kills, third)} times")


if __name__ == "__main__":
    main()
