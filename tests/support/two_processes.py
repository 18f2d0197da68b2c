"""Started by torchrun: trains every recipe of a folder in turn, and dies where it is told to.

    torchrun … -m tests.support.two_processes RECIPES OUT [RANK:RECIPE:WHEN:HOW …]

HOW is `kill` (without warning) or `raise`, WHEN then a step; `moment`, so many seconds after the recipe began; or `fsync`, `before` or
`after`, so many files later: in the middle of writing it, or about its renaming. Each happens once: a restart goes on.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

import letkd.training.loop as loop
from letkd.recipes import resolve
from tests.support.kill_storm import set_trap

Deaths = dict[int, Callable[[], None]]  # by step


def prepare(death: str, mark: Path, at_step: Deaths) -> threading.Timer | None:
    """Arm one death; the mark says that it happened."""
    rank, _, when, how = death.split(":")

    def end() -> None:
        mark.touch()
        if how == "raise":
            raise RuntimeError(f"rank {rank} has had enough")
        os.kill(os.getpid(), signal.SIGKILL)

    if how == "moment":
        timer = threading.Timer(float(when), end)
        timer.daemon = True
        timer.start()
        return timer
    if how in ("kill", "raise"):
        at_step[int(when)] = end
    else:
        set_trap(int(when), how, end)
    return None


def tell_group() -> None:
    """Say whether the group is closed. On Linux, its threads must have ended, too: one that is left can abort the process."""
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    left = ", ".join(name for name in threads if "gloo" in name)
    state = "open" if dist.is_initialized() else f"open in {left}" if left else "closed"
    os.write(1, f"group of rank {os.environ['RANK']}: {state}\n".encode())


def main() -> None:
    atexit.register(tell_group)  # runs after letkd's own exit functions, which are registered later
    torch.set_num_threads(1)
    recipes, out, deaths = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    out.mkdir(exist_ok=True)
    real = os.replace, os.fsync
    for path in sorted(recipes.glob("*.toml")):
        mine = [death for death in deaths if death.split(":")[:2] == [os.environ["RANK"], path.stem]]
        left = [(death, mark) for death in mine if not (mark := out / death.replace(":", "-")).exists()]
        at_step: Deaths = {}
        timer = prepare(*left[0], at_step) if left else None  # one at a time: the next comes after the restart
        number = count(1)

        def on_step(state, at_step=at_step, number=number) -> None:
            at_step.get(next(number), lambda: None)()

        save_minutes = 15 if path.stem.startswith("exact") else 0
        result = loop.train(resolve(path), out / path.stem, save_minutes=save_minutes, on_step=on_step)
        if timer:
            timer.cancel()
        os.replace, os.fsync = real
        # In one write: torchrun's workers are unbuffered, and print would write the end of its line apart from it.
        os.write(1, f"rank {os.environ['RANK']} {path.stem} {result.last_test}\n".encode())


if __name__ == "__main__":
    main()
