"""A student as a folder for the Hugging Face Hub: valid by huggingface_hub's own reader, opened with and without letkd."""

import json
import re
import subprocess
import sys

import pytest
import torch

import letkd as package
from letkd.distiller.student import load_student
from letkd.errors import CheckpointError
from letkd.runs.folder import RunFolder

hub = pytest.importorskip("huggingface_hub")

SMALL = ["--set", "train.epochs=1", "--set", "data.fraction=0.05", "--set", "train.steps=2"]
OWN = """
from torch import nn

def small(num_classes):
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
"""


def code_blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, re.S)


def run(code: str, folder, *, without_letkd: bool) -> str:
    """What a card's code prints, run in its folder."""
    before = "import sys; sys.modules['letkd'] = None\n" if without_letkd else ""
    done = subprocess.run([sys.executable, "-c", before + code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_student_with_layers_of_letkd(letkd, tmp_path):
    code, _, err = letkd("train", "digits/tiny/teacher", *SMALL, "--out", "teacher")
    assert code == 0, err
    given = ["--teacher-weights", "teacher/student.safetensors", "--set", "methods.letkd.sites.penultimate.supervision.K=4"]
    code, _, err = letkd("train", "digits/tiny/letkd-1", *SMALL, *given, "--trials", 2, "--out", "runs")
    assert code == 0, err
    code, out, err = letkd("export", "runs/seed-1", "--to", "hub-folder", "--out", "hub", "--license", "apache-2.0")
    assert code == 0, err
    assert "exported: hub" in out
    assert {path.name for path in (tmp_path / "hub").iterdir()} == {"model.safetensors", "config.json", "README.md"}

    card = hub.ModelCard.load(tmp_path / "hub" / "README.md")  # raises if the metadata cannot be read
    data, results = card.data, [RunFolder(tmp_path / "runs" / f"seed-{seed}").result for seed in (0, 1)]
    assert (data.license, data.library_name, data.pipeline_tag) == ("apache-2.0", "letkd", "image-classification")
    (result,) = data.eval_results
    assert result.metric_value == pytest.approx(results[1].last_test / 100, abs=1e-6)
    assert (result.dataset_name, result.dataset_split) == ("digits", "test")
    mean = (results[0].last_test + results[1].last_test) / 2
    assert re.search(rf"\| Test accuracy over seeds \| {mean:.2f} ± [\d.]+ %, n = 2 \|", card.text)
    for row in ("| Data set | digits |", "| Teacher | `resnet14` |", "| Method | letKD-1 |", "| Licence | apache-2.0 |"):
        assert row in card.text
    assert "Do not use the model to decide about" in card.text
    assert "so this folder needs letkd" in card.text

    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert [config["model"], config["num_classes"], len(config["classes"])] == ["resnet14_tiny", 10, 10]
    x = torch.randn(4, 3, 32, 32)
    ours, theirs = load_student(tmp_path / "hub"), load_student(tmp_path / "runs" / "seed-1")
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    (block,) = code_blocks(card.text)
    assert run(block, tmp_path / "hub", without_letkd=False).strip() in [str([name]) for name in config["classes"]]

    code, _, err = letkd("export", "runs/seed-0", "--to", "hub-folder", "--out", "hub")
    assert code == 0, err  # its own folder is written again
    assert hub.ModelCard.load(tmp_path / "hub" / "README.md").data.license == "unknown"
    code, _, err = letkd("export", "runs/seed-0", "--to", "hub-folder", "--out", "runs")
    assert (code, err.count("\n")) == (2, 1)
    assert "--out runs contains other files" in err


def test_a_plain_network_opens_without_letkd(letkd, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    code, _, err = letkd("train", "digits/tiny/ce", *SMALL, "--student", "mine.py:small", "--out", "run")
    assert code == 0, err
    code, _, err = letkd("export", "run", "--to", "hub-folder", "--student", "mine.py:small")
    assert code == 0, err
    folder = tmp_path / "run" / "hub"
    card = hub.ModelCard.load(folder / "README.md")
    with_letkd, without = code_blocks(card.text)
    assert len([line for line in without.splitlines() if line.strip()]) == 10
    assert "knowledge distillation with" not in card.text, "no teacher took part"
    assert "| Test accuracy over seeds | unknown: only one seed was trained |" in card.text
    (folder / "mine.py").write_text(OWN)
    config = json.loads((folder / "config.json").read_text())
    without = without.replace("torch.zeros(1, 3", "torch.arange(3 * 32 * 32).reshape(1, 3").replace(
        ', *config["size"], dtype=torch.uint8)', ", 32, 32) % 256"
    )
    logits = run(without + "print(logits.tolist())", folder, without_letkd=True).splitlines()[-1]
    student = load_student(folder, model=str(tmp_path / "mine.py") + ":small")
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    images = torch.arange(3 * 32 * 32).reshape(1, 3, 32, 32) % 256
    torch.testing.assert_close(torch.tensor(json.loads(logits)), student((images / 255 - mean) / std).detach())
    assert run(with_letkd, folder, without_letkd=False)


def test_wrong_uses_get_a_sentence(letkd, tmp_path, monkeypatch):
    code, _, err = letkd("train", "digits/tiny/ce", *SMALL, "--out", "run")
    assert code == 0, err
    code, _, err = letkd("export", "run", "--to", "hub-folder", "--int8")
    assert (code, "omit --int8, --input, --opset, --batch and --size" in err) == (2, True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, _, err = letkd("export", "run", "--to", "hub-folder")
    assert (code, err.count("\n")) == (2, 1)
    assert "--to hub-folder needs huggingface_hub, which is not installed: pip install 'letkd[hub]'" in err
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"contains no student: neither student\.safetensors nor model\.safetensors"):
        package.load_student(tmp_path / "empty")
