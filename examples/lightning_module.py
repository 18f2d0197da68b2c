"""A Distiller in a LightningModule. `pip install pytorch-lightning`, then `python examples/lightning_module.py`"""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

import letkd
from plain_pytorch import digits


class Distillation(pl.LightningModule):
    """Any student, teacher and method. The teacher moves with the module to a device, but is not part of its checkpoints."""

    def __init__(self, distiller: letkd.Distiller, lr: float = 0.05):
        super().__init__()
        self.distiller, self.lr = distiller, lr

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        step = self.distiller(batch)
        self.log_dict({f"train/{name}": term for name, term in step.terms.items()})
        return step.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main(teacher: torch.nn.Module, loader: DataLoader, **options) -> torch.nn.Module:
    student = letkd.create_model("resnet8_tiny", num_classes=10)
    distiller = letkd.Distiller(student, teacher, letkd.methods.letkd1(K=64)).fit(loader)
    pl.Trainer(**options).fit(Distillation(distiller), loader)
    return distiller.export()


if __name__ == "__main__":
    untrained = letkd.create_model("resnet14_tiny", num_classes=10)  # for a trained one pass weights="teacher.safetensors"
    main(
        untrained, DataLoader(digits(1000), batch_size=50, shuffle=True), max_epochs=2, logger=False, enable_checkpointing=False
    )
