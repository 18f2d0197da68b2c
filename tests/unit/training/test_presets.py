"""Presets use what is faster on the device at hand, and a run says what that was; their exceptions apply to the methods they name."""

import json
from pathlib import Path

import pytest
import torch

from letkd.errors import RecipeError
from letkd.recipes import list_methods, resolve, resolve_with_sources
from letkd.training import device
from letkd.training.device import choices
from letkd.training.loop import train

ROOT = Path(__file__).parents[3]
SMALL = ["data.fraction=0.05", "train.steps=1", "train.epochs=1", "student.model=resnet8_tiny"]


@pytest.mark.parametrize(
    ("cuda", "bf16", "asked", "precision", "channels_last"),
    [
        (False, False, "auto", "32-true", True),
        (False, True, "auto", "bf16-mixed", True),
        (True, True, "auto", "bf16-mixed", True),
        (True, False, "auto", "32-true", False),
        (True, True, "32-true", "32-true", False),
        (True, False, "bf16-mixed", "bf16-mixed", True),
    ],
)
def test_auto_is_decided_for_the_device(cuda, bf16, asked, precision, channels_last, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(device, "has_bf16", lambda: bf16)
    recipe = resolve("digits/tiny/kd", preset="fast", settings=[f"train.precision={asked}"])
    expected = {"precision": precision, "channels_last": channels_last, "fold_teacher": True, "bf16_teacher": bf16}
    assert choices(recipe) == expected
    fixed = resolve(
        "digits/tiny/kd", preset="fast", settings=["channels_last=false", "fold_teacher=false", "precision=64-true"]
    )
    assert choices(fixed) == {"precision": "64-true", "channels_last": False, "fold_teacher": False, "bf16_teacher": False}


def test_a_teacher_in_bf16_and_a_student_in_double_precision_are_refused():
    recipe = resolve("digits/tiny/kd", settings=["bf16_teacher=true", "precision=64-true"])
    with pytest.raises(RecipeError, match=r"bf16_teacher needs single or mixed precision, but train\.precision is 64-true"):
        choices(recipe)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"bf16": True}, True),
        ({"avx512_f": True}, False),
        ({}, False),
    ],
)
def test_a_processor_with_bf16_is_recognised(found, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert device.has_bf16() == expected


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_says_what_was_decided_and_trains_so(bf16, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "has_bf16", lambda: bf16)
    fast = resolve("digits/tiny/ce", preset="fast", settings=SMALL)
    named = resolve("digits/tiny/ce", preset="fast", settings=[*SMALL, f"precision={'bf16-mixed' if bf16 else '32-true'}"])
    train(fast, tmp_path / "fast")
    train(named, tmp_path / "named")
    found = json.loads((tmp_path / "fast/env.json").read_text())
    assert (found["precision"], found["fold_teacher"]) == ("bf16-mixed" if bf16 else "32-true", True)
    students = [(tmp_path / name / "best_on_validation.safetensors").read_bytes() for name in ("fast", "named")]
    assert students[0] == students[1]


@pytest.mark.slow
def test_a_run_without_auto_says_nothing(tmp_path):
    train(resolve("digits/tiny/ce", settings=SMALL), tmp_path / "paper")
    assert "channels_last" not in json.loads((tmp_path / "paper/env.json").read_text())


def test_the_comparison_of_presets_compares_them():
    for method in ("ce", "kd", "letkd-1"):
        file = ROOT / "evidence/presets.toml"
        fast = resolve(file, method=f"{method}-fast")
        assert fast == resolve(file, method=method, preset="fast").model_copy(update={"title": fast.title})
        paper = resolve(file, method=f"{method}-paper")
        assert (paper.optim.schedule, paper.train.precision, paper.optim.milestones) == ("milestones", "32-true", [5, 6, 7])


def test_exceptions_of_a_preset_override_the_preset_and_the_pair():
    recipe, sources = resolve_with_sources("digits/tiny/letkd-1", preset="fast")
    supervision = "methods.letkd.sites.penultimate.supervision"
    assert recipe.methods["letkd"]["sites"]["penultimate"]["supervision"]["K"] == "auto"  # 64 in the pair
    assert sources[f"{supervision}.K"] == "presets/fast.toml, exceptions.letkd-1"
    assert sources["optim.schedule"] == "presets/fast.toml"
    recipe, sources = resolve_with_sources("digits/tiny/letkd-1-kd", preset="fast")  # like letkd-1 and kd
    assert (sources[f"{supervision}.K"], recipe.weights["kd"]) == ("presets/fast.toml, exceptions.letkd-1", 0.3)
    assert resolve("digits/tiny/at", preset="fast").weights == resolve("digits/tiny/at").weights


@pytest.mark.parametrize("method", [method for method in list_methods() if method != "teacher"])
def test_fast_adds_no_term_and_no_method(method):
    fast, paper = (resolve("digits/tiny", method=method, preset=preset) for preset in ("fast", None))
    assert (fast.weights.keys(), fast.methods.keys()) == (paper.weights.keys(), paper.methods.keys())


def test_a_row_names_its_own_preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'preset = "finetune"\n[data]\nname = "digits"\n[student]\nmodel = "resnet8_tiny"\n'
        '[rows.short]\nlike = "ce"\npreset = "fast"\n[rows.longer]\nlike = "short"\ntrain.epochs = 20\n'
        '[rows.own]\nlike = "short"\npreset = "paper"\n'
    )
    found = {row: resolve(file, method=row) for row in ("ce", "short", "longer", "own")}
    assert {row: (recipe.optim.schedule, recipe.train.epochs) for row, recipe in found.items()} == {
        "ce": ("cosine", 20),
        "short": ("linear", 12),
        "longer": ("linear", 20),
        "own": ("milestones", 240),
    }
    assert resolve(file, method="short", preset="finetune").optim.schedule == "cosine"  # the command line overrides the file
