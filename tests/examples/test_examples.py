"""The scripts under examples/ do what they say: a Distiller in loops that letkd knows nothing of."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import letkd

EXAMPLES = Path(__file__).parents[2] / "examples"


def script(name: str, monkeypatch):
    """An example as a module, found beside its siblings as `python examples/….py` would find them."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "plain_pytorch", raising=False)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def test_every_example_is_short_and_tested():
    tests = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        code = [
            line for line in path.read_text().splitlines() if line.strip() and not line.startswith(("import", "from", '"""'))
        ]
        assert len(code) <= 33, path.name
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


def test_lightning_module(monkeypatch, tmp_path):
    pl = pytest.importorskip("pytorch_lightning", reason="pip install pytorch-lightning")
    monkeypatch.chdir(tmp_path)
    example = script("lightning_module", monkeypatch)
    loader = DataLoader(example.digits(100), batch_size=50)
    teacher = letkd.create_model("resnet8_tiny", num_classes=10)
    held = {name: value.clone() for name, value in teacher.state_dict().items()}
    seen = {}

    class Look(pl.Callback):
        def on_train_end(self, trainer, module):
            seen.update(metrics=set(trainer.callback_metrics), state=set(module.state_dict()), steps=trainer.global_step)

    model = example.main(
        teacher,
        loader,
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Look()],
    )
    assert seen["steps"] == 4
    assert seen["metrics"] == {"train/ce", "train/kd/penultimate"}
    assert {name.split(".")[1] for name in seen["state"]} == {"student", "methods"}  # no teacher
    assert all(torch.equal(held[name], value) for name, value in teacher.state_dict().items())
    assert "KDLayer" in names(model)
