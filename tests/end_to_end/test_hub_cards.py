"""The accuracy in a model card is that of the weights beside it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from letkd import create_model, save_student
from letkd.progress import set_quiet
from letkd.recipes import resolve
from letkd.training.loop import train
from letkd.training.students import evaluate_student
from tests.support.runs import made_once

hub = pytest.importorskip("huggingface_hub")

SMALL = ["data.fraction=0.3", "data.batch_size=16", "train.epochs=4", "student.model=resnet8_tiny"]
LAYER = ["teacher.model=resnet8_tiny", "methods.letkd.sites.penultimate.supervision.K=16", "train.ema=0.99"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with a KD layer and averaged weights; not to be written to."""

    def make(folder: Path) -> None:
        set_quiet(True)
        train(resolve("digits/tiny", method="ce", settings=SMALL), folder / "teacher")
        weights = f"teacher.weights={folder / 'teacher' / 'student.safetensors'}"
        train(resolve("digits/tiny", method="letkd-1", settings=[*SMALL, *LAYER, weights]), folder / "run")

    return made_once(tmp_path_factory, "hub-cards", make) / "run"


def card_of(letkd, *arguments):
    code, out, err = letkd("export", *arguments, "--to", "hub-folder", "--out", "hub")
    assert code == 0, err
    return hub.ModelCard.load("hub/README.md"), out


def measured() -> float:
    """The test accuracy of the weights in the folder."""
    return evaluate_student(Path("hub/model.safetensors"), data="digits", root=None, split="test").top1


def must_give(card, accuracy: float, weights: str) -> None:
    (result,) = card.data.eval_results
    assert result.metric_value == pytest.approx(accuracy / 100, abs=1e-6)
    assert result.metric_name == f"top-1 accuracy of this checkpoint, {weights}"
    assert f"| Test accuracy of this checkpoint | {accuracy:.2f} % on digits, {weights} |" in card.text
    assert accuracy == pytest.approx(measured())


def test_the_accuracy_of_a_card_is_that_of_its_weights(letkd, run):
    result = json.loads((run / "result.json").read_text())
    must_give(card_of(letkd, run)[0], result["last_test"], "last epoch")

    averaged, _ = card_of(letkd, run / "student_ema.safetensors")
    assert result["ema_test"] != result["last_test"], "the test needs two accuracies"
    must_give(averaged, result["ema_test"], "averaged weights")

    pruned, out = card_of(letkd, run, "--prune", 1)
    after = measured()
    assert f"accuracy on test: {result['last_test']:.2f} % before, {after:.2f} % after" in out
    assert after != result["last_test"], "the test needs two accuracies"
    must_give(pruned, after, "after pruning")
    assert "over seeds" not in pruned.text


OWN = """
from torch import nn

def three():
    return nn.Sequential(nn.Conv2d(3, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def counted(num_classes):
    return three()

def free(**settings):
    return three()
"""


@pytest.mark.parametrize("name", ["three", "counted", "free"])
def test_the_code_of_a_card_runs_for_own_networks_without_a_known_normalisation(letkd, tmp_path, name):
    (tmp_path / "nets.py").write_text(OWN)
    student = create_model(f"{tmp_path / 'nets.py'}:{name}", num_classes=3)
    save_student(student, tmp_path / "s.safetensors", model=f"nets.py:{name}", num_classes=3, size=(16, 16))
    card, _ = card_of(letkd, "s.safetensors", "--student", f"nets.py:{name}")
    (tmp_path / "hub" / "nets.py").write_text(OWN)
    blocks = re.findall(r"```python\n(.*?)```", card.text, re.S)
    assert len(blocks) == 2
    for code in blocks:
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "hub", check=True)


def test_another_file_of_the_run_gets_no_accuracy(letkd, run, tmp_path):
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("recipe.toml", "result.json", "student.safetensors"):
        (copy / name).write_bytes((run / name).read_bytes())
    code, _, err = letkd("export", copy, "--to", "safetensors", "--prune", 1)
    assert code == 0, err
    card, _ = card_of(letkd, copy / "student-export.safetensors")
    assert card.data.eval_results is None
    assert "The accuracy of this model was not measured." in card.text
    assert card.text.lower().count("accuracy") == 1
    assert "| Data set | digits |" in card.text
