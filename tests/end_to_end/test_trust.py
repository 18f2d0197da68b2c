"""Code runs because the user names it, or trusts the recipe that does; never because a file names it."""

import pytest
import tomli_w

from letkd.models import create_model, save_weights

NETS = """
from pathlib import Path
from letkd.models import create_model
Path("ran").touch()
def net(num_classes):
    return create_model("resnet8_tiny", num_classes=num_classes)
"""
QUICK = ("--quick", "--set", "data.name=digits", "--out", "run")


@pytest.fixture
def stranger(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)

    def write(**tables):
        (tmp_path / "recipe.toml").write_text(tomli_w.dumps({"data": {"name": "digits"}, **tables}))
        return tmp_path / "recipe.toml"

    save_weights(create_model("resnet8_tiny", num_classes=10), tmp_path / "t.safetensors")
    return write


OURS = {"model": "resnet8_tiny"}
TAUGHT = {"model": "resnet8_tiny", "weights": "t.safetensors"}


@pytest.mark.parametrize("named", ["nets.py:net", "nets:net"])
@pytest.mark.parametrize("verb", ["train", "fit", "compare"])
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_recipe_file_that_names_code_asks_for_trust(letkd, stranger, tmp_path, named, verb, who):
    recipe = stranger(**({"student": OURS, "teacher": TAUGHT} | {who: {**TAUGHT, "model": named}}))
    method = ("--methods", "kd") if verb == "compare" else ("--method", "kd")
    code, _, err = letkd(verb, recipe, *method)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{recipe} names code that would run on this machine: {named}; read it and add --trust" in err
    assert not (tmp_path / "ran").exists()


def test_trusted_or_named_on_the_command_line_it_runs(letkd, stranger, tmp_path):
    recipe = stranger(student={"model": "nets.py:net"})
    code, _, err = letkd("train", recipe, "--trust", *QUICK)
    assert code == 0, err
    assert (tmp_path / "ran").exists()
    code, _, err = letkd("train", recipe, "--student", "nets.py:net", *QUICK[:-1], "two")
    assert code == 0, err
    code, _, err = letkd("train", recipe, "--set", "student.model=nets.py:net", *QUICK[:-1], "three")
    assert code == 0, err


def test_the_teacher_row_names_code_as_well(letkd, stranger, tmp_path):
    recipe = stranger(student=OURS, teacher={"model": "nets.py:net"})
    code, _, err = letkd("train", recipe, "--method", "teacher", *QUICK)
    assert (code, "nets.py:net" in err, (tmp_path / "ran").exists()) == (2, True, False)


def test_the_advice_to_finish_a_run_says_what_would_run(letkd, stranger, tmp_path):
    assert letkd("train", stranger(student={"model": "nets.py:net"}), "--trust", *QUICK)[0] == 0
    (tmp_path / "run" / "result.json").unlink()
    code, _, err = letkd("export", "run", "--to", "onnx", "--student", "nets.py:net")
    assert code == 2
    assert "finish it with `letkd train run/recipe.toml --out run --trust`, which runs nets.py:net" in err


def test_showing_a_recipe_runs_nothing(letkd, stranger, tmp_path):
    assert letkd("show", stranger(student={"model": "nets.py:net"}))[0] == 0
    assert not (tmp_path / "ran").exists()
