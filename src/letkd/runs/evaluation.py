"""A classifier on a split: its accuracy, and what it takes each image for."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from letkd.batch import Batch, channels_of, check_labels
from letkd.distiller.finite import first_non_finite
from letkd.distributed.processes import objects_of_all
from letkd.errors import NonFiniteError, RunError
from letkd.files import write_whole
from letkd.progress import track
from letkd.runs.records import reason
from letkd.taps import as_logits
from letkd.tensors import checksum


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
        """Write both as a safetensors file of four bytes per class and image, with a checksum."""
        tensors = {"predicted": self.predicted, "labels": self.labels}
        tensors = {name: value.to(torch.int32).cpu().contiguous() for name, value in tensors.items()}
        write_whole(path, save(tensors, metadata={"sha256": checksum(tensors)}))

    @classmethod
    def load(cls, path: Path, num_classes: int) -> "Predictions":
        """What `save` wrote, of a classifier with so many classes."""
        try:
            with safe_open(path, framework="pt") as file:
                written = (file.metadata() or {}).get("sha256")
                tensors = {name: file.get_tensor(name) for name in ("predicted", "labels")}
            if written != checksum(tensors):
                raise ValueError("its checksum differs")
            if not all(_are_classes(value, num_classes, len(tensors["labels"])) for value in tensors.values()):
                raise ValueError(f"it does not hold a class below {num_classes} for each image")
        except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
            raise RunError(
                f"{path} is damaged ({reason(error)}); remove it, and the predictions are made again if the data is there"
            ) from None
        return cls(tensors["predicted"].long(), tensors["labels"].long())


def _are_classes(value: Tensor, num_classes: int, n: int) -> bool:
    if value.dtype != torch.int32 or value.shape != (n,):
        return False
    return n == 0 or (int(value.min()) >= 0 and int(value.max()) < num_classes)


def judge(
    model: nn.Module, loader: Iterable[Batch], *, description: str = "judging", heed: Callable[[], object] = lambda: None
) -> tuple[Accuracy, Predictions]:
    """Run a classifier in eval mode over a split, each image once; its train/eval mode is left as it was.

    Of several processes each goes over its own part; all of them get the whole, predictions in the order of the images' indices.

    Args:
        heed: called before each batch, by all processes equally often; it may raise to stop.
    """
    if (name := first_non_finite(model)) is not None:
        raise NonFiniteError(
            f"{type(model).__name__} cannot be evaluated: {name!r} holds NaN or infinity. Its training diverged, or the file of its "
            "weights is damaged; train again with a lower learning rate, or get the weights again"
        )
    counts = torch.zeros(5, dtype=torch.float64)  # images, right, among the best five, loss, no logits: exact up to 2^53 images
    rows: list[tuple[int, int, int]] = []
    for batch, logits in _answers(model, loader, description, heed):
        check_labels(batch.y, logits.shape[1])
        first = logits.topk(min(5, logits.shape[1]), dim=1).indices
        best = first == batch.y[:, None]
        loss = F.cross_entropy(logits, batch.y, reduction="sum")
        bad = (~torch.isfinite(logits).all(dim=1)).sum()
        counts += (
            torch.stack([best.new_tensor(len(best), dtype=torch.float64), best[:, 0].sum(), best.sum(), loss, bad])
            .double()
            .cpu()
        )
        index = torch.arange(len(rows), len(rows) + len(batch.y)) if batch.index is None else batch.index
        rows += zip(index.tolist(), first[:, 0].tolist(), batch.y.tolist(), strict=True)
    parts = objects_of_all((counts, rows))
    n, top1, top5, loss, bad = torch.stack([part[0] for part in parts]).sum(dim=0).tolist()
    if bad:
        raise NonFiniteError(
            f"{type(model).__name__} gives NaN or infinite logits for {int(bad):,} of {int(n):,} images, so it has no accuracy. Its "
            "training diverged, or mean and std are not those of its training; lower the learning rate, or check the normalisation"
        )
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
def _answers(
    model: nn.Module, loader: Iterable[Batch], description: str, heed: Callable[[], object]
) -> Iterator[tuple[Batch, Tensor]]:
    """Every batch, where the model is, with the logits that it gives in eval mode."""
    like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.zeros(0))
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for item in track(loader, description):
            heed()
            batch = Batch.of(item, channels=channels_of(model)).to(like.device)
            if len(batch.y):  # a process's share may be empty, where a batch has fewer images than there are processes
                yield batch, as_logits(model(batch.x.to(like.dtype)), model).float()
    finally:
        for module, mode in modes.items():
            module.training = mode
