"""Presets use what is faster on the device at hand, and a run says what that was."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

from letkd.recipes import resolve
from letkd.training.build import layout
from letkd.training.loop import train

ROOT = Path(__file__).parents[3]
SMALL = ["data.fraction=0.05", "train.steps=1", "train.epochs=1", "student.model=resnet8_tiny"]


@pytest.mark.parametrize(
    ("cuda", "precision", "channels_last"), [(False, "32-true", True), (True, "32-true", False), (True, "bf16-mixed", True)]
)
def test_auto_is_decided_for_the_device(cuda, precision, channels_last, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    recipe = resolve("digits/tiny/kd", preset="fast", settings=[f"train.precision={precision}"])
    assert layout(recipe) == {"channels_last": channels_last, "fold_teacher": True}
    fixed = resolve("digits/tiny/kd", preset="fast", settings=["channels_last=false", "fold_teacher=false"])
    assert layout(fixed) == {"channels_last": False, "fold_teacher": False}


@pytest.mark.slow
def test_a_run_says_what_was_decided(tmp_path):
    train(resolve("digits/tiny/ce", preset="fast", settings=SMALL), tmp_path / "fast")
    train(resolve("digits/tiny/ce", settings=SMALL), tmp_path / "paper")
    fast, paper = (json.loads((tmp_path / name / "env.json").read_text()) for name in ("fast", "paper"))
    assert (fast["channels_last"], fast["fold_teacher"]) == (not torch.cuda.is_available(), True)
    assert "channels_last" not in paper


def test_the_comparison_of_presets_has_the_presets_values():
    preset = tomllib.loads((ROOT / "src/letkd/recipes/presets/fast.toml").read_text())
    for method in ("ce", "kd", "letkd-1"):
        fast = resolve(ROOT / "evidence/presets.toml", method=f"{method}-fast").model_dump()
        for table, values in preset.items():
            assert {key: fast[table][key] for key in values} == values
        paper = resolve(ROOT / "evidence/presets.toml", method=f"{method}-paper")
        assert (paper.train.epochs, paper.optim.milestones, paper.optim.schedule) == (10, [6, 8, 9], "milestones")
        assert paper.methods == resolve(ROOT / "evidence/presets.toml", method=f"{method}-fast").methods
