"""A classifier on a split: its accuracy, and what it takes each image for."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from letkd.batch import Batch, channels_of, check_labels
from letkd.errors import RunError
from letkd.files import write_whole
from letkd.processes import objects_of_all
from letkd.progress import track
from letkd.taps import as_logits


@dataclass(frozen=True)
class Accuracy:
    """Top-1 and top-5 accuracy in per cent, mean cross-entropy, and over how many images."""

    top1: float
    top5: float
    loss: float
    n: int


@dataclass(frozen=True, eq=False)
class Predictions:
    """The class that a classifier takes each image of a split for, and the one it is, in the order of the split.

    Args:
        predicted: `[n]`.
        labels: `[n]`.
    """

    predicted: Tensor
    labels: Tensor

    def save(self, path: Path) -> None:
        """Write both as a safetensors file of four bytes a class and image."""
        tensors = {"predicted": self.predicted, "labels": self.labels}
        write_whole(path, save({name: value.to(torch.int32).cpu().contiguous() for name, value in tensors.items()}))

    @classmethod
    def load(cls, path: Path) -> "Predictions":
        """What `save` wrote."""
        try:
            tensors = load_file(path)
            return cls(tensors["predicted"].long(), tensors["labels"].long())
        except (SafetensorError, OSError, KeyError) as error:
            raise RunError(
                f"{path} holds no predictions ({error}); remove it, and they are made anew where they can be"
            ) from None


def judge(model: nn.Module, loader: Iterable[Batch], *, description: str = "judging") -> tuple[Accuracy, Predictions]:
    """Run a classifier in eval mode over a split, each image once; its train/eval mode is left as it was.

    Of several processes each goes over its own part; all of them get the whole, predictions in the order of the images' indices.
    """
    counts = torch.zeros(4, dtype=torch.float64)  # images, right, among the best five, loss: exact up to 2^53 images
    rows: list[tuple[int, int, int]] = []
    for batch, logits in _answers(model, loader, description):
        check_labels(batch.y, logits.shape[1])
        first = logits.topk(min(5, logits.shape[1]), dim=1).indices
        best = first == batch.y[:, None]
        loss = F.cross_entropy(logits, batch.y, reduction="sum")
        counts += (
            torch.stack([best.new_tensor(len(best), dtype=torch.float64), best[:, 0].sum(), best.sum(), loss]).double().cpu()
        )
        index = torch.arange(len(rows), len(rows) + len(batch.y)) if batch.index is None else batch.index
        rows += zip(index.tolist(), first[:, 0].tolist(), batch.y.tolist(), strict=True)
    parts = objects_of_all((counts, rows))
    n, top1, top5, loss = torch.stack([part[0] for part in parts]).sum(dim=0).tolist()
    every = torch.tensor(sorted(row for part in parts for row in part[1]), dtype=torch.int64).view(-1, 3)
    accuracy = Accuracy(100 * top1 / max(n, 1), 100 * top5 / max(n, 1), loss / max(n, 1), int(n))
    return accuracy, Predictions(every[:, 1].clone(), every[:, 2].clone())


def evaluate(model: nn.Module, loader: Iterable[Batch], *, description: str = "evaluating") -> Accuracy:
    """The accuracy alone; see `judge`."""
    return judge(model, loader, description=description)[0]


def predict(model: nn.Module, loader: Iterable[Batch], *, description: str = "predicting") -> Predictions:
    """The predictions alone; see `judge`."""
    return judge(model, loader, description=description)[1]


@torch.no_grad()
def _answers(model: nn.Module, loader: Iterable[Batch], description: str) -> Iterator[tuple[Batch, Tensor]]:
    """Every batch, where the model is, with the logits that it gives in eval mode."""
    like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.zeros(0))
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for item in track(loader, description):
            batch = Batch.of(item, channels=channels_of(model)).to(like.device)
            if len(batch.y):  # a process's share may be empty, where a batch has fewer images than there are processes
                yield batch, as_logits(model(batch.x.to(like.dtype)), model).float()
    finally:
        for module, mode in modes.items():
            module.training = mode
