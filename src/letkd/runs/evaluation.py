"""Accuracy and predictions of a classifier on a split."""

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
from letkd.modules import in_eval_mode
from letkd.progress import track
from letkd.runs.records import reason
from letkd.taps import as_logits
from letkd.tensors import checksum


@dataclass(frozen=True)
class Accuracy:
    """Top-1 and top-5 accuracy in per cent, mean cross-entropy, and the number of images."""

    top1: float
    top5: float
    loss: float
    n: int


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predicted and true class of every image in a split, in the order of the split.

    Args:
        predicted: `[n]`.
        labels: `[n]`.
    """

    predicted: Tensor
    labels: Tensor

    def save(self, path: Path) -> None:
        """Write a safetensors file with four bytes per class and image, and a checksum."""
        tensors = {"predicted": self.predicted, "labels": self.labels}
        tensors = {name: value.to(torch.int32).cpu().contiguous() for name, value in tensors.items()}
        write_whole(path, save(tensors, metadata={"sha256": checksum(tensors)}))

    @classmethod
    def load(cls, path: Path, num_classes: int) -> "Predictions":
        """Read what `save` wrote, for a classifier with `num_classes` classes."""
        try:
            with safe_open(path, framework="pt") as file:
                written = (file.metadata() or {}).get("sha256")
                tensors = {name: file.get_tensor(name) for name in ("predicted", "labels")}
            if written != checksum(tensors):
                raise ValueError("its checksum differs")
            if not all(_are_classes(value, num_classes, len(tensors["labels"])) for value in tensors.values()):
                raise ValueError(f"it does not hold a class below {num_classes} for every image")
        except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
            raise RunError(
                f"{path} is damaged ({reason(error)}); remove it; the predictions are made again if the data is available"
            ) from None
        return cls(tensors["predicted"].long(), tensors["labels"].long())


def _are_classes(value: Tensor, num_classes: int, n: int) -> bool:
    if value.dtype != torch.int32 or value.shape != (n,):
        return False
    return n == 0 or (int(value.min()) >= 0 and int(value.max()) < num_classes)


def score(
    model: nn.Module,
    loader: Iterable[Batch],
    *,
    description: str = "evaluating",
    check_stop: Callable[[], object] = lambda: None,
) -> tuple[Accuracy, Predictions]:
    """Accuracy and predictions of a classifier in eval mode on a split. Its train/eval mode is restored afterwards.

    With several processes, each evaluates its own share and all get the whole result, ordered by the indices of the images.

    Args:
        check_stop: called before each batch, equally often in all processes; it may raise to stop.
    """
    if (name := first_non_finite(model)) is not None:
        raise NonFiniteError(
            f"{type(model).__name__} cannot be evaluated: {name!r} holds NaN or infinity. Its training diverged, or the weights "
            "file is damaged; train again with a lower learning rate, or get the weights again"
        )
    counts = torch.zeros(5, dtype=torch.float64)  # images, top-1, top-5, loss, non-finite logits: exact up to 2^53 images
    rows: list[tuple[int, int, int]] = []
    for batch, logits in _logits_of(model, loader, description, check_stop):
        check_labels(batch.y, logits.shape[1])
        first = logits.topk(min(5, logits.shape[1]), dim=1).indices
        best = first == batch.y[:, None]
        loss = F.cross_entropy(logits, batch.y, reduction="sum")
        bad = (~torch.isfinite(logits).all(dim=1)).sum()
        found = [best[:, 0].sum(), best.sum(), loss, bad]  # in float32 the counts of a batch are exact; MPS has no float64
        found = torch.stack([value.to(torch.promote_types(loss.dtype, torch.float32)) for value in found]).cpu()
        counts += torch.cat([torch.tensor([len(best)]), found.double()])
        index = torch.arange(len(rows), len(rows) + len(batch.y)) if batch.index is None else batch.index
        rows += zip(index.tolist(), first[:, 0].tolist(), batch.y.tolist(), strict=True)
    parts = objects_of_all((counts, rows))
    n, top1, top5, loss, bad = torch.stack([part[0] for part in parts]).sum(dim=0).tolist()
    if bad:
        raise NonFiniteError(
            f"{type(model).__name__} has NaN or infinite logits for {int(bad):,} of {int(n):,} images, so no accuracy can be computed. Its "
            "training diverged, or mean and std differ from those of its training; lower the learning rate, or check the normalisation"
        )
    ordered = torch.tensor(sorted(row for part in parts for row in part[1]), dtype=torch.int64).view(-1, 3)
    accuracy = Accuracy(100 * top1 / max(n, 1), 100 * top5 / max(n, 1), loss / max(n, 1), int(n))
    return accuracy, Predictions(ordered[:, 1].clone(), ordered[:, 2].clone())


def evaluate(model: nn.Module, loader: Iterable[Batch], *, description: str = "evaluating") -> Accuracy:
    """Accuracy of a classifier on all images of a loader, in eval mode; the model is not changed.

    Args:
        model: returns logits [b C]. Images are moved to its device.
        loader: yields normalised images with labels, as `(x, y)` or `letkd.Batch`.
        description: of the progress bar.

    Examples:
        >>> class Brightness(nn.Module):
        ...     def forward(self, x):
        ...         mean = x.mean(dim=(1, 2, 3))
        ...         return torch.stack([-mean, mean], dim=1)
        >>> dark, bright = -torch.ones(2, 3, 8, 8), torch.ones(2, 3, 8, 8)
        >>> evaluate(Brightness(), [(torch.cat([dark, bright]), torch.tensor([0, 0, 1, 0]))]).top1
        75.0
    """
    return score(model, loader, description=description)[0]


def predict(model: nn.Module, loader: Iterable[Batch], *, description: str = "predicting") -> Predictions:
    """Only the predictions; see `score`."""
    return score(model, loader, description=description)[1]


@torch.no_grad()
def _logits_of(
    model: nn.Module, loader: Iterable[Batch], description: str, check_stop: Callable[[], object]
) -> Iterator[tuple[Batch, Tensor]]:
    """Every batch, on the model's device, with its logits in eval mode."""
    like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.zeros(0))
    with in_eval_mode(model):
        for item in track(loader, description):
            check_stop()
            batch = Batch.of(item, channels=channels_of(model)).to(like.device)
            if len(batch.y):  # a process's share may be empty if a batch has fewer images than there are processes
                yield batch, as_logits(model(batch.x.to(like.dtype)), model).float()
