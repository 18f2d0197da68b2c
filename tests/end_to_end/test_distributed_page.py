"""docs/distributed.md is true: its commands run, its cells and options exist; the figures of docs/imagenet.md follow from the code."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from letkd.cli.main import app
from letkd.data.archives import COUNTS
from letkd.layer import KDLayer
from letkd.models import create_model
from letkd.recipes import resolve

PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
IMAGENET = (Path(__file__).parents[2] / "docs" / "imagenet.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [line for kind, text in BLOCKS if kind == "console" for line in text.splitlines()]
SCRIPTS = [text.replace("\\\n", " ") for kind, text in BLOCKS if kind == "sh"]


def launched(line: str) -> list[str]:
    words = shlex.split(line)
    return [
        *{"letkd": [sys.executable, "-m", "letkd"], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[words[0]],
        *words[1:],
    ]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_runs(line, tmp_path):
    src = str(Path(__file__).parents[2] / "src")
    small = ["--set", "student.model=resnet8_tiny"]
    done = subprocess.run(
        [*launched(line), *small],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": src},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("run folder: ") == 1, "only the first process prints"
    out = tmp_path / shlex.split(line)[-1]
    processes = 2 if "torchrun" in line else 1
    assert f'"processes": {processes}' in next(out.rglob("env.json")).read_text()
    assert list(out.rglob("result.json"))


def test_the_commands_for_clusters_name_what_exists():
    options = {option for parameter in get_command(app).commands["train"].params for option in parameter.opts}
    lines = [line for script in SCRIPTS for line in script.splitlines() if "letkd train" in line]
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line.partition("letkd train ")[2])
        resolve(words[0])
        assert {word for word in words if word.startswith("--")} <= options
    batch = resolve("imagenet/rn34-rn18/letkd-2").data.batch_size
    assert batch % (4 * 8) == 0


def test_the_figures_follow_from_the_code():
    recipe = resolve("imagenet/rn34-rn18/letkd-2")
    sites = recipe.methods["letkd"]["sites"]
    with torch.device("meta"):
        networks = {name: create_model(name, num_classes=1000) for name in (recipe.student.model, recipe.teacher.model)}
        K = [sites["penultimate"]["supervision"]["K"], 1000 * sites["intermediate"]["supervision"]["K"]]
        layers = [KDLayer(512, k) for k in K]
    count = [sum(p.numel() for p in module.parameters()) for module in (*networks.values(), *layers)]
    student = count[0] + sum(count[2:])
    images, pixels = COUNTS["imagenet"][0], COUNTS["imagenet"][0] * 49
    for figure in (
        *(f"{n:,}" for n in (*count, student, images)),
        f"{12 * student / 1e6:.0f} MB",
        f"{4 * student / 1e6:.0f} MB",
        f"{4 * K[1] ** 2 / 1e6:.0f} MB",
        f"{pixels / 1e6:.1f} million",
        f"{pixels * 2048 / 1e9:.1f} GB",
        f"{2**30 // (4 * 1000 * 512)} pixels per class",
        f"{20 * 2 * 256 * K[0] * K[0] * 512 / 1e12:.0f} Tflop",
        f"{100 * images / 1e6:.1f} million images",
        f"batch {recipe.data.batch_size}, {recipe.train.epochs} epochs",
    ):
        assert figure in IMAGENET, figure
