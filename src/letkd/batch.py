"""One step's data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from letkd.errors import DataError, TapError

UNLABELLED = -1  # in the place of a class index


@dataclass
class Batch:
    """Normalised images `x [b 3 H W]`, class indices `y [b]`, dataset indices `index [b]` where they are known, `epoch` from 1.

    An image without a label has −1 in `y`; without `y` (or with None) no image has one. `target` is whatever a task of your own needs
    (`Distiller(task=)`).

    `view` says which of its fixed views a loader shows, where it shows such (`letkd.distiller.cache`). `second` holds the same images in a
    second view, shaped as `x`, for methods that compare two (MLKD). If the images are mixed (`letkd.data.Mix`), `y2 [b]` are the
    labels of the other images and `lam` is the share of `y`, 1/2 or more.
    """

    x: Tensor
    y: Tensor = None  # pyright: ignore[reportAssignmentType] - a tensor from __post_init__ on
    index: Tensor | None = None
    epoch: int = 1
    view: int | None = None
    second: Tensor | None = None
    y2: Tensor | None = None
    lam: float = 1.0
    target: Any = None
    labelled_per_process: float | None = None  # mean over the processes that share a batch; None: this one has it all
    all_labelled: bool | None = None  # None: not known, since looking would wait for the device

    def __post_init__(self):
        if self.y is None and isinstance(self.x, Tensor) and self.x.ndim:
            self.y = torch.full((len(self.x),), UNLABELLED, device=self.x.device)
        labels = [y for y in (self.y, self.y2) if isinstance(y, Tensor) and _whole(y) and y.dtype.is_signed]
        if self.all_labelled is None and all(y.device.type == "cpu" for y in labels):
            self.all_labelled = not any(bool((y < 0).any()) for y in labels)

    @classmethod
    def of(cls, item: Any, *, channels: int | None = None, task: bool = False) -> "Batch":
        """A batch from what loaders usually yield: a `Batch`, `(x, y)` or `(x, y, index)`, checked by `check_batch`.

        Images without labels come as `(x,)` or `(x, None)`.

        Args:
            channels: that the networks take, if known.
            task: the second element is the target of a task, of any kind; it counts as labels too if it could be: int `[b]`.

        Examples:
            >>> Batch.of((torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]))).epoch
            1
            >>> Batch.of([torch.zeros(2, 3, 4, 4)]).y
            tensor([-1, -1])
        """
        batch = item
        if not isinstance(item, Batch) and isinstance(item, Sequence) and len(item) in (1, 2, 3):
            x, target, index = (*item, None, None)[:3]
            y = target if not task or (isinstance(target, Tensor) and not _labels_wrong(target)) else None
            batch = cls(x, y, index, target=target if task else None)  # pyright: ignore[reportArgumentType]
        kinds = (Tensor, Tensor, Tensor | None)
        if isinstance(batch, Batch) and all(map(isinstance, (batch.x, batch.y, batch.index), kinds)):
            return check_batch(batch, channels=channels)
        raise DataError(
            f"a loader must yield (x, y), (x, y, index) or letkd.Batch, with tensors inside; it gave a {type(item).__name__}"
        )

    def to(self, device: torch.device | str) -> "Batch":
        names = ("x", "y", "index", "second", "y2", "target")
        return replace(self, **{name: _moved(getattr(self, name), device) for name in names})

    def over_labels(self, loss: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """A mean loss that reads the labels, over the images that have one: `loss(*values, y)`; 0 if none has.

        For mixed images it is λ · loss(*values, y) + (1 − λ) · loss(*values, y2).

        Args:
            values: what the loss compares with the labels, a row per image.
        """
        if self.y2 is None:
            return self._over(loss, values, self.y)
        return self.lam * self._over(loss, values, self.y) + (1 - self.lam) * self._over(loss, values, self.y2)

    def _over(self, loss: Callable[..., Tensor], values: Sequence[Tensor], y: Tensor) -> Tensor:
        rows = self.labelled(y)
        if rows is None:
            return loss(*values, y)
        if not len(rows):
            return 0.0 * loss(*values, y.clamp_min(0))  # of several processes all must reach the same parameters
        mean = loss(*(value[rows] for value in values), y[rows])
        whole = self.labelled_per_process
        return mean if whole is None else mean * (len(rows) / whole)

    def filled(self, predicted: Tensor) -> "Batch":
        """The batch with these classes `[b]` for the images that have no label."""
        if self.labelled() is None:
            return self
        y, y2 = (None if y is None else torch.where(y < 0, predicted, y) for y in (self.y, self.y2))
        return replace(self, y=y, y2=y2, all_labelled=True, labelled_per_process=None)

    def labelled(self, y: Tensor | None = None) -> Tensor | None:
        """Positions of the images that have a label; None if all have."""
        if self.all_labelled and self.labelled_per_process is None:
            return None
        y = self.y if y is None else y
        rows = (y >= 0).nonzero().squeeze(1)
        return None if len(rows) == len(y) and self.labelled_per_process is None else rows


def _moved(part: Any, device: torch.device | str) -> Any:
    """Tensors, alone or in a list, tuple or dictionary, on another device; anything else as it is."""
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, Mapping):
        return {key: _moved(value, device) for key, value in part.items()}
    return [_moved(value, device) for value in part] if isinstance(part, list | tuple) else part


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


def check_labels(y: Tensor, C: int | None, *, least: int = 0) -> bool:
    """Whether all images have a label. Raises for a class index out of range. Waits for the device once.

    Args:
        C: number of classes, if known.
        least: −1 if images may have no label.
    """
    if not len(y):
        return True
    low, high = torch.stack(y.aminmax()).tolist()
    if low < least or (C is not None and high >= C):
        wrong = low if low < least else high
        none = "" if least == 0 else ", -1 for an image without a label"
        raise DataError(
            f"a label is {wrong}, and with {C or 'C'} classes labels run from 0 to {C - 1 if C else 'C - 1'}{none}"
            + ("; images without a label have no accuracy" if low == UNLABELLED and least == 0 else "")
        )
    return low >= 0


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
