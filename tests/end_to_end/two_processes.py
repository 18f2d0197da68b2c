"""A program for test_processes.py, started by torchrun: trains every recipe of a folder in turn, and dies where it is told to.

    torchrun … two_processes.py RECIPES OUT [RANK:RECIPE:STEP:HOW …]

HOW is `kill` (without warning) or `raise`. Each happens once: a restart goes on.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import letkd.train.loop as loop
from letkd.recipes import resolve


def die_at(deaths: list[str], name: str, marks: Path) -> None:
    heed, steps = loop._Run._heed, 0

    def heed_or_die(run) -> None:
        nonlocal steps
        steps += 1
        heed(run)
        for death in deaths:
            rank, recipe, step, how = death.split(":")
            mark = marks / death.replace(":", "-")
            if (rank, recipe, step) == (os.environ["RANK"], name, str(steps)) and not mark.exists():
                mark.touch()
                if how == "raise":
                    raise RuntimeError(f"rank {rank} has had enough")
                os.kill(os.getpid(), signal.SIGKILL)

    loop._Run._heed = heed_or_die


def main() -> None:
    torch.set_num_threads(1)
    recipes, out, deaths = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    out.mkdir(exist_ok=True)
    heed = loop._Run._heed
    for path in sorted(recipes.glob("*.toml")):
        die_at(deaths, path.stem, out)
        result = loop.train(resolve(path), out / path.stem, save_minutes=0 if path.stem == "crd" else 15)
        loop._Run._heed = heed
        # In one write: torchrun's workers are unbuffered, and print would write the end of its line apart from it.
        os.write(1, f"rank {os.environ['RANK']} {path.stem} {result.last_test:.4f}\n".encode())


main()
