"""A package of someone else's brings a method, a supervision, a network and a data set; nothing in letkd names it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = '''
from typing import ClassVar

import torch
import torch.nn.functional as F

import letkd


class Regress(letkd.Method):
    """The student's logits regress the teacher's."""

    name: ClassVar[str] = "regress"
    paper: ClassVar[str] = "Ba, Caruana, 2014"
    loss: ClassVar[str] = "mean squared error of logits"
    formulae: ClassVar = ()

    def terms(self, view):
        return {"regress": F.mse_loss(view.student["logits"], view.teacher["logits"])}


class Halves(letkd.Supervision):
    """Two labels per pixel: above or below the mean of its channels."""

    kind: ClassVar[str] = "halves"

    def num_labels(self):
        return 2

    def p_T(self, f_T, y):
        above = (f_T.mean(dim=1, keepdim=True) > f_T.mean()).float()
        return torch.cat([above, 1 - above], dim=1)


def net_of_mine(num_classes):
    return letkd.create_model("resnet8_tiny", num_classes=num_classes)


def half_digits(root, reading):
    from dataclasses import replace

    data = letkd.load_data("digits")
    return replace(data, name="half-digits", train=data.train.subset(torch.arange(len(data.train)) % 2 == 0))
'''
ENTRY_POINTS = """[letkd.methods]
regress = mine.parts:Regress

[letkd.supervisions]
halves = mine.parts:Halves

[letkd.models]
net_of_mine = mine.parts:net_of_mine

[letkd.data]
half-digits = mine.parts:half_digits

[letkd.recipes]
mine = mine.rows
"""
ROW = """title = "Halves"

[methods.quest.sites.penultimate.supervision]
kind = "halves"
"""


@pytest.fixture
def installed(tmp_path) -> Path:
    """The package as pip leaves it in a folder: its modules and the metadata beside them."""
    package, info = tmp_path / "site" / "mine", tmp_path / "site" / "mine-1.0.dist-info"
    (package / "rows").mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text(CODE, encoding="utf-8")
    (package / "rows" / "__init__.py").touch()
    (package / "rows" / "quest-halves.toml").write_text(ROW, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return tmp_path / "site"


def letkd(installed: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "letkd", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=300, check=False, env={**os.environ, "PYTHONPATH": path}
    )


def test_a_plugins_method_is_a_row_like_any_other(installed, tmp_path):
    listed = letkd(installed, "methods", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "--method regress" in listed.stdout
    assert "Halves" in listed.stdout
    settings = ["--set", "student.model=net_of_mine", "--set", "data.name=half-digits"]
    ran = letkd(
        installed,
        "compare",
        "digits/tiny",
        "--methods",
        "ce,regress,quest-halves",
        "--quick",
        "--out",
        "runs",
        *settings,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert "regress" in ran.stdout
    assert "Halves" in ran.stdout


def test_a_plugin_that_fails_is_left_out_with_the_reason(installed, tmp_path):
    (installed / "mine" / "parts.py").write_text("raise RuntimeError('not today')", encoding="utf-8")
    ran = letkd(installed, "models", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "the plugin 'net_of_mine' of mine (letkd.models) was left out: RuntimeError: not today" in ran.stderr
    assert "resnet8_tiny" in ran.stdout


def test_a_plugin_cannot_replace_what_is_there(installed, tmp_path):
    (installed / "mine-1.0.dist-info" / "entry_points.txt").write_text(
        "[letkd.methods]\nkd = mine.parts:KD\n", encoding="utf-8"
    )
    (installed / "mine" / "parts.py").write_text(
        CODE.replace("Regress", "KD").replace('"regress"', '"kd"', 1), encoding="utf-8"
    )
    ran = letkd(installed, "show", "digits/tiny/kd", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    script = (
        "import logging; logging.basicConfig(level='INFO'); import letkd.methods; print(letkd.methods.METHODS['kd'].__module__)"
    )
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert found.stdout.strip() == "letkd.methods.kd"
    assert "a method 'kd' is already registered" in found.stderr
