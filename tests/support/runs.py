"""Small runs: their recipes, how to stop them, and whether two of them ended with the same bits."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
import torch
from PIL import Image

from letkd.data import load_data
from letkd.models.weights import read_state_dict
from letkd.recipes import resolve
from letkd.runs.checkpoint import NAME
from letkd.runs.folder import RunFolder
from letkd.runs.records import Result

ROOT = Path(__file__).parents[2]
SMALL = [
    "data.fraction=0.05",
    "data.batch_size=16",
    "train.epochs=3",
    "train.steps=3",
    "student.model=resnet8_tiny",
    "teacher.model=resnet14_tiny",
]
MIXED = ["data.augment=crop+randaugment", "data.erase=0.5", "data.mix=cutmix", "train.label_smoothing=0.1"]
BOTH = ("data.unlabelled=rest", "data.unlabelled_share=0.7")
ALONE = ["data.size=32", "data.augment=none", "data.workers=0", "data.batch_size=16", "train.epochs=2", "train.steps=2"]
ROLES = {"letkd-1": ["penultimate"], "letkd-2": ["intermediate", "penultimate"]}


def recipe_for(method, teacher, *settings):
    given = {"teacher.weights": str(teacher), "teacher.model": "resnet14_tiny"}
    if method == "ab":
        given["phases"] = [{"epochs": 2, "weights": {"ce": 0.0, "ab": 1.0}}]
    return resolve("digits/tiny", method=method, overrides=given, settings=[*SMALL, *settings])


def save_pictures(folder: Path, n: int = 48) -> Path:
    """Digits as files, without their labels."""
    folder.mkdir(parents=True, exist_ok=True)
    for k, image in enumerate(load_data("digits").train.images[:n]):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{k}.png")
    return folder


def images_alone(method, teacher, pictures, *settings):
    overrides = {
        "data.name": "images",
        "data.root": str(pictures),
        "student.model": "resnet8_tiny",
        "teacher.model": "resnet14_tiny",
        "teacher.weights": str(teacher),
    }
    small = [f"methods.letkd.sites.{role}.supervision.K=4" for role in ROLES.get(method, ())]
    return resolve(None, method=method, overrides=overrides, settings=[*ALONE, *small, *settings])


def stop_after(steps: int) -> Callable[[object], None]:
    """For `train(on_step=…)`: as if a signal came in the last of so many steps."""
    left = iter(range(steps - 1, -1, -1))

    def on_step(state: object) -> None:
        if next(left, None) == 0:
            signal.raise_signal(signal.SIGTERM)

    return on_step


def same_end(one: Path, two: Path, *, pythons_stream: bool = False) -> None:
    """The same weights, metrics, random streams and result, but for the time they took.

    Args:
        pythons_stream: compare it, too. Not within these tests' own process, where the type checks draw from it.
    """
    for name in ("student.safetensors", "best_on_validation.safetensors", f"last/{NAME}"):
        a, b = (read_state_dict(path / name) for path in (one, two))
        assert a.keys() == b.keys()
        if not pythons_stream:
            a.pop("random.python", None)
        assert [key for key in a if not torch.equal(a[key], b[key])] == [], name
    rows = [[json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (one, two)]
    rows.append(json.loads((one / "result.json").read_text()))
    rows.append(json.loads((two / "result.json").read_text()))
    for row in (*rows[0], *rows[1], *rows[2:]):
        row.pop("seconds")
        row.pop("cpu_seconds", None)
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]


def weather(recipe, folder: Path, seed: int) -> None:
    """A run whole, and the same run killed again and again: the same bits."""
    (folder / "recipe.toml").write_text(tomli_w.dumps(recipe.model_dump(exclude_none=True)))
    storm = [sys.executable, "-m", "tests.support.kill_storm", folder / "recipe.toml", folder, str(seed), "6"]
    done = subprocess.run(
        storm, capture_output=True, text=True, timeout=900, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[1]) >= 3, "hardly a storm"
    same_end(folder / "whole", folder / "killed", pythons_stream=True)


def a_run(folder: Path, cell: str, test: float | None, *, seed: int = 0, settings: tuple[str, ...] = (), **overrides) -> None:
    """A run folder as a finished run leaves it, without networks."""
    recipe = resolve(cell, settings=settings, overrides={"train.seed": seed, **overrides})
    run = RunFolder(folder, recipe)
    with run.begin():
        run.log({"epoch": 1, "lr": 0.05, "train_top1": 1.0, "loss": 2.0, "ce": 2.0, "val_top1": None, "seconds": 1.0})
        if test is not None:
            run.finish(Result(test, 99.0, None, None, None, test + 1, 1000, 1, 7200.0))


def made_once(factory: pytest.TempPathFactory, name: str, make) -> Path:
    """A folder that the first test process to ask for it makes; the others wait and find it."""
    shared = factory.getbasetemp().parent if factory.getbasetemp().name.startswith("popen-") else factory.getbasetemp()
    folder = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / f"{name}.done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            (shared / f"{name}.done").touch()
    return folder
