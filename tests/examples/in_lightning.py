"""The Lightning example, in a process that has Lightning: `test_examples.py` starts it."""

import pytorch_lightning as pl  # pyright: ignore[reportMissingImports]
import torch
from torch.utils.data import DataLoader

import letkd
from tests.support.examples import names, script


def test_it_trains_and_keeps_no_teacher(monkeypatch, tmp_path):
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
