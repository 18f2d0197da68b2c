"""The scripts under examples/ do what they say: a Distiller in loops that letkd knows nothing of."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import letkd
from tests.support.examples import EXAMPLES, names, script


def test_every_example_is_short_and_tested():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 80, path.name
        assert f'script("{path.stem}"' in tests


def test_plain_pytorch(monkeypatch, capsys):
    accuracy = script("plain_pytorch", monkeypatch).main(epochs=3, n=600)
    said = capsys.readouterr().out
    assert accuracy > 0.3  # one in ten by chance
    assert "ce" in said
    assert "kd/penultimate" in said


def test_plain_pytorch_exports_a_student_that_stands_alone(monkeypatch):
    example = script("plain_pytorch", monkeypatch)
    loader = DataLoader(example.digits(100), batch_size=50)
    teacher = letkd.create_model("resnet8_tiny", num_classes=10)
    student = letkd.create_model("resnet8_tiny", num_classes=10)
    distiller = letkd.Distiller(student, teacher, letkd.methods.letkd1(K=8)).fit(loader)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    model = example.train(distiller, loader, epochs=1)
    assert not model.training
    assert "KDLayer" in names(model)
    assert any(not torch.equal(before[name], value) for name, value in student.state_dict().items() if name in before)


def test_a_segmenter_gains_by_a_teacher_and_by_images_without_masks(monkeypatch):
    scores = script("segmentation", monkeypatch).main(steps=100)
    assert scores["teacher"] > 75
    assert scores["with the teacher"] > scores["student alone"] + 2


def test_a_landmark_regressor_learns_with_a_teacher(monkeypatch):
    errors = script("landmarks", monkeypatch).main(steps=100)
    assert errors["student"] < 0.5 * errors["middle of the image"]


def test_lightning_module():
    lightning = Path(sys.prefix) / "lightning"  # `make test` installs it apart
    if not lightning.exists() and importlib.util.find_spec("pytorch_lightning") is None:
        pytest.skip("Lightning is not installed: `make test` does it, or pip install pytorch-lightning")
    path = os.pathsep.join([str(lightning), *sys.path])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", Path(__file__).with_name("in_lightning.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
