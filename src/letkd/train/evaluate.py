"""Accuracy of a classifier on a split."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from letkd.batch import Batch
from letkd.processes import sum_of_all
from letkd.progress import track
from letkd.taps import as_logits


@dataclass(frozen=True)
class Accuracy:
    """Top-1 and top-5 accuracy in per cent, mean cross-entropy, and over how many images."""

    top1: float
    top5: float
    loss: float
    n: int


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable[Batch], *, description: str = "evaluating") -> Accuracy:
    """Run a classifier in eval mode over a split, each image once; its train/eval mode is left as it was.

    Of several processes each goes over its own part; all of them get the accuracy on the whole.
    """
    like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.zeros(0))
    device = like.device
    modes = {module: module.training for module in model.modules()}
    model.eval()
    n, top1, top5, loss = 0, 0, 0, 0.0
    try:
        for item in track(loader, description):
            batch = Batch.of(item).to(device)
            if not len(batch.y):
                continue  # this process's share of a batch with fewer images than processes
            logits = as_logits(model(batch.x.to(like.dtype)), model).float()
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch.y[:, None]
            top1 += int(best[:, 0].sum())
            top5 += int(best.sum())
            loss += float(F.cross_entropy(logits, batch.y, reduction="sum"))
            n += len(batch.y)
    finally:
        for module, mode in modes.items():
            module.training = mode
    n, top1, top5, loss = sum_of_all(torch.tensor([n, top1, top5, loss], dtype=torch.float64, device=device)).tolist()
    return Accuracy(100 * top1 / max(n, 1), 100 * top5 / max(n, 1), loss / max(n, 1), int(n))
