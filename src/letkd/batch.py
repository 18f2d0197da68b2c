"""One step's data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from letkd.errors import DataError, TapError


@dataclass
class Batch:
    """Normalised images `x [b 3 H W]`, class indices `y [b]`, dataset indices `index [b]` where they are known, `epoch` from 1.

    `view` says which of its fixed views a loader shows, where it shows such (`letkd.distiller.cache`). `second` holds the same images in a
    second view, shaped as `x`, for methods that compare two (MLKD). If the images are mixed (`letkd.data.Mix`), `y2 [b]` are the
    labels of the other images and `lam` is the share of `y`, 1/2 or more.
    """

    x: Tensor
    y: Tensor
    index: Tensor | None = None
    epoch: int = 1
    view: int | None = None
    second: Tensor | None = None
    y2: Tensor | None = None
    lam: float = 1.0

    @classmethod
    def of(cls, item: Any, *, channels: int | None = None) -> "Batch":
        """A batch from what loaders usually yield: a `Batch`, `(x, y)` or `(x, y, index)`, checked by `check_batch`.

        Args:
            channels: that the networks take, if known.

        Examples:
            >>> Batch.of((torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]))).epoch
            1
        """
        batch = item
        if not isinstance(item, Batch) and isinstance(item, Sequence) and len(item) in (2, 3):
            batch = cls(*item)
        kinds = (Tensor, Tensor, Tensor | None)
        if isinstance(batch, Batch) and all(map(isinstance, (batch.x, batch.y, batch.index), kinds)):
            return check_batch(batch, channels=channels)
        raise DataError(
            f"a loader must yield (x, y), (x, y, index) or letkd.Batch, with tensors inside; it gave a {type(item).__name__}"
        )

    def to(self, device: torch.device | str) -> "Batch":
        index, second, y2 = (None if part is None else part.to(device) for part in (self.index, self.second, self.y2))
        return replace(self, x=self.x.to(device), y=self.y.to(device), index=index, second=second, y2=y2)

    def over_labels(self, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """A loss that reads the labels: `loss(y)`, and for mixed images λ · loss(y) + (1 − λ) · loss(y2)."""
        return loss(self.y) if self.y2 is None else self.lam * loss(self.y) + (1 - self.lam) * loss(self.y2)


def channels_of(model: object) -> int | None:
    """Channels of the images that a network says it takes (`input_size`, as the zoo's have it)."""
    size = getattr(model, "input_size", None)
    return size[0] if isinstance(size, tuple) and len(size) == 3 else None


def check_batch(batch: Batch, *, channels: int | None = None) -> Batch:
    """The batch with int64 labels; or one sentence on what it holds instead of images and class indices.

    Shapes and types are looked at, never values: nothing waits for the device.

    Args:
        channels: that the networks take, if known.
    """
    if said := _images_wrong(batch.x, channels) or _labels_wrong(batch.y) or _lengths_wrong(batch):
        raise DataError(said)
    return batch if batch.y.dtype == torch.int64 else replace(batch, y=batch.y.long())


def check_labels(y: Tensor, C: int | None) -> None:
    """Raises for a class index below 0 or, with the number of classes known, above C − 1. Waits for the device once."""
    if not len(y):
        return
    low, high = torch.stack(y.aminmax()).tolist()
    if low < 0 or (C is not None and high >= C):
        wrong = low if low < 0 else high
        raise DataError(f"a label is {wrong}, and with {C or 'C'} classes labels run from 0 to {C - 1 if C else 'C - 1'}")


def _images_wrong(x: Tensor, channels: int | None) -> str:
    said = f"the images of a batch are {_kind(x)}, and networks take normalised float images [b {channels or 3} H W]"
    if x.ndim != 4:
        return f"{said}: {'add the batch dimension with x[None]' if x.ndim == 3 else 'reshape them'}"
    last = x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
    if last and x.shape[1] != channels:
        return f"{said}: these have their channels last; use x.permute(0, 3, 1, 2)"
    if not x.is_floating_point():
        return f"{said}: use (x.float() / 255 - mean) / std, with the mean and std that the networks were trained with"
    if channels is not None and x.shape[1] != channels:
        return f"{said}: {'repeat grey images with x.expand(-1, 3, -1, -1)' if x.shape[1] == 1 else 'use networks for these'}"
    return ""


def _labels_wrong(y: Tensor) -> str:
    said = f"the labels of a batch are {_kind(y)}, and class indices int64 [b] are needed"
    if y.ndim == 2 and y.shape[1] == 1:
        return f"{said}: use y.squeeze(1)" + ("" if _whole(y) else ".long()")
    if y.ndim == 2:
        return f"{said}: one-hot labels become those by y.argmax(1); soft and multi-label targets are not supported"
    if y.ndim != 1:
        return f"{said}: one per image"
    return "" if _whole(y) else f"{said}: use y.long() if they are class indices"


def _lengths_wrong(batch: Batch) -> str:
    b, index = len(batch.x), batch.index
    if len(batch.y) != b:
        return f"a batch has {b} images and {len(batch.y)} labels; it needs one label per image"
    if index is not None and (index.shape != (b,) or not _whole(index)):
        return f"the indices of a batch are {_kind(index)}; they are the images' places in the data set, int64 [{b}]"
    return ""


def _whole(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _kind(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"


def example_for(*models: nn.Module) -> Tensor:
    """An input [1 3 H W] of the size that one of the models knows as its own."""
    sizes = [getattr(model, "input_size", None) for model in models]
    size = next((size for size in sizes if size is not None), None)
    if size is None:
        names = " and ".join(type(model).__name__ for model in models)
        raise TapError(
            f"{names} do not say what they take: pass example=one input [1 3 H W], so that the shapes at the taps can be found"
        )
    return torch.zeros(1, *size)
