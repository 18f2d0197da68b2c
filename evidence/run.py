"""Runs the smallest pair of the evidence study and compares its table with the published one.

    make evidence DATA=FOLDER TEACHER=FILE [SEEDS=5] [EPOCHS=6] [ROWS=ce,kd,letkd-1]

Run it again to resume. The runs are in runs/evidence; nothing in docs is changed.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from collect import collect
from study import PAIRS, ROOT, UNFINISHED, command, read_runs, recipe_file, rows_of
from tables import results_table

from letkd.data import load_data
from letkd.errors import DataError, RecipeError
from letkd.recipes import resolve
from letkd.runs.folder import RunFolder
from letkd.runs.grid import as_markdown

PAIR = "cifar10-rn56-rn8"
JOBS = 2
MINUTES = 5.6  # per run, measured on one core of an x86 machine, mean over the rows; used until runs are published


def check_files(data: str, teacher: str) -> tuple[Path, Path]:
    """The folder of CIFAR-10 and the teacher's file, or one sentence on what is missing and how to get it."""
    if not data:
        raise DataError(
            "DATA is not set: name a folder with the official CIFAR-10 files; `letkd data get cifar10` downloads them"
        )
    if not teacher or not Path(teacher).is_file():
        state = f"TEACHER={teacher} is not a file" if teacher else "TEACHER is not set"
        raise DataError(
            f"{state}: name the weights of a CIFAR-10 ResNet-56 (option A), such as the checkpoint in github.com/akamaster/"
            "pytorch_resnet_cifar10; check them with `letkd eval resnet56_a --weights FILE --data cifar10 --root DATA`"
        )
    load_data("cifar10", root=data)  # raises if files are missing
    return Path(data).resolve(), Path(teacher).resolve()


def settings_for(epochs: int | None) -> list[str]:
    return [] if epochs is None else [f"train.epochs={epochs}", f"train.cache_views={epochs}"]


def announce(rows: list[str], seeds: int, settings: list[str], out: Path) -> str:
    """How long the unfinished runs take."""
    published = read_runs(PAIR)
    minutes = statistics.mean(run.cpu_seconds for run in published) / 60 if published else MINUTES
    recipe = resolve(recipe_file(PAIR), method="ce", settings=settings)
    minutes *= recipe.train.epochs / resolve(recipe_file(PAIR), method="ce").train.epochs
    left = sum(RunFolder(out / row / f"seed-{seed}").result is None for row in rows for seed in range(seeds))
    return (
        f"{PAIRS[PAIR]}: {len(rows)} rows × {seeds} seeds, {left} runs left; at {minutes:.1f} minutes per run and core, "
        f"about {left * minutes / JOBS / 60:.1f} hours with {JOBS} cores. Interrupt at any time; the same command resumes."
    )


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def run(data: str, teacher: str, *, seeds: int, epochs: int | None, rows: list[str], out: Path) -> int:
    """Train, collect and print both tables; returns the exit code."""
    if unknown := [row for row in rows if row not in rows_of(PAIR)]:
        raise RecipeError(f"{PAIR} has no row {unknown[0]!r}; it has {', '.join(rows_of(PAIR))}")
    root, weights = check_files(data, teacher)
    settings = settings_for(epochs)
    print(announce(rows, seeds, settings, out), flush=True)
    words = [
        "compare",
        str(recipe_file(PAIR)),
        "--methods",
        ",".join(rows),
        "--trials",
        str(seeds),
        "--jobs",
        str(JOBS),
        "--trust",
    ]
    words += ["--root", str(root), "--teacher-weights", str(weights), "--out", str(out)]
    words += [word for setting in settings for word in ("--set", setting)]
    ended = subprocess.run(
        [sys.executable, "-m", "letkd", *words], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    ).returncode
    if ended:
        return ended
    collected = collect(PAIR, out, commit(), out / "evidence", settings=settings)
    published = read_runs(PAIR)
    print(f"\nYour runs\n\n{as_markdown(results_table(PAIR, collected))}")
    print(f"Published runs\n\n{as_markdown(results_table(PAIR, published)) if published else UNFINISHED}")
    return 0 if len(collected) >= len(rows) * seeds else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the smallest pair of the evidence study.")
    parser.add_argument("--data", default="", help="folder with the official files of CIFAR-10")
    parser.add_argument("--teacher", default="", help="weights of a CIFAR-10 ResNet-56")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="fewer epochs, to try it")
    parser.add_argument("--rows", default="", help="comma-separated rows; default: all")
    given = parser.parse_args()
    out = ROOT / "runs" / "evidence" / (PAIR if given.epochs is None else f"{PAIR}-{given.epochs}-epochs")
    rows = given.rows.split(",") if given.rows else list(rows_of(PAIR))
    return run(given.data, given.teacher, seeds=given.seeds, epochs=given.epochs, rows=rows, out=out)


if __name__ == "__main__":
    command(main)
