"""The data of one training step, and its checks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from letkd.errors import DataError, TapError

UNLABELLED = -1  # instead of a class index


@dataclass
class Batch:
    """Normalised images `x [b 3 H W]`, class indices `y [b]`, dataset indices `index [b]` and the `epoch` (from 1) if known.

    An image without a label has −1 in `y`; if `y` is omitted or None, no image has a label. `target` is the target of a custom task
    (`Distiller(task=)`).

    `view` is the number of the fixed view, if the loader has fixed views (`letkd.distiller.cache`). `second` holds the same images in a
    second view, with the shape of `x`, for methods that compare two views (MLKD). If the images are mixed (`letkd.data.Mix`), `y2 [b]`
    are the labels of the other images and `lam` is the share of `y`, 1/2 or more.

    Examples:
        >>> batch = Batch(torch.zeros(3, 3, 32, 32), torch.tensor([4, -1, 2]))  # the second image has no label
        >>> batch.labelled()
        tensor([0, 2])
    """

    x: Tensor
    y: Tensor = None  # pyright: ignore[reportAssignmentType] - a tensor from __post_init__ on
    index: Tensor | None = None
    epoch: int | None = None
    view: int | None = None
    second: Tensor | None = None
    y2: Tensor | None = None
    lam: float = 1.0
    target: Any = None
    labelled_per_process: float | None = None  # mean over the processes that share a batch; None: one process has all of it
    all_labelled: bool | None = None  # None: unknown, because reading the labels would wait for the device
    index_on_cpu: Tensor | None = None  # `index`, read by the cache of the teacher without waiting for the device

    def __post_init__(self):
        if self.y is None and isinstance(self.x, Tensor) and self.x.ndim:
            self.y = torch.full((len(self.x),), UNLABELLED, device=self.x.device)
        if self.index_on_cpu is None and isinstance(self.index, Tensor) and self.index.device.type == "cpu":
            self.index_on_cpu = self.index
        labels = [y for y in (self.y, self.y2) if isinstance(y, Tensor) and _whole(y) and y.dtype.is_signed]
        if self.all_labelled is None and all(y.device.type == "cpu" for y in labels):
            self.all_labelled = not any(bool((y < 0).any()) for y in labels)

    @classmethod
    def of(cls, item: Any, *, channels: int | None = None, task: bool = False) -> "Batch":
        """A batch from an item of a loader: a `Batch`, `(x, y)` or `(x, y, index)`, checked by `check_batch`.

        Images without labels are given as `(x,)` or `(x, None)`.

        Args:
            channels: input channels of the networks, if known.
            task: the second element is the target of a custom task, of any type; if it is an int tensor `[b]`, it is used as labels too.

        Examples:
            >>> Batch.of((torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]))).y
            tensor([0, 1])
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
            f"a loader must yield tensors as (x, y), (x, y, index) or letkd.Batch; it yielded a {type(item).__name__}"
        )

    def to(self, device: torch.device | str) -> "Batch":
        names = ("x", "y", "index", "second", "y2", "target")
        return replace(self, **{name: _moved(getattr(self, name), device) for name in names})

    def over_labels(self, loss: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """The mean of `loss(*values, y)` over the images that have a label; 0 if none has.

        For mixed images it is λ · loss(*values, y) + (1 − λ) · loss(*values, y2).

        Args:
            values: tensors that the loss compares with the labels, one row per image.
        """
        if self.y2 is None:
            return self._over(loss, values, self.y)
        return self.lam * self._over(loss, values, self.y) + (1 - self.lam) * self._over(loss, values, self.y2)

    def _over(self, loss: Callable[..., Tensor], values: Sequence[Tensor], y: Tensor) -> Tensor:
        rows = self.labelled(y)
        if rows is None:
            return loss(*values, y)
        if not len(rows):
            return 0.0 * loss(*values, y.clamp_min(0))  # every process must use the same parameters
        mean = loss(*(value[rows] for value in values), y[rows])
        whole = self.labelled_per_process
        return mean if whole is None else mean * (len(rows) / whole)

    def filled(self, predicted: Tensor) -> "Batch":
        """The batch with predicted classes `[b]` as labels of the images that have none."""
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
    """Move tensors, alone or in a list, tuple or dictionary, to a device; anything else is returned unchanged."""
    if isinstance(part, Tensor):
        # From pageable memory the copy is staged, so `part` may be changed or freed at once.
        return part.to(device, non_blocking=torch.device(device).type == "cuda")
    if isinstance(part, Mapping):
        return {key: _moved(value, device) for key, value in part.items()}
    return [_moved(value, device) for value in part] if isinstance(part, list | tuple) else part


def input_size_of(model: object) -> tuple[int, int, int] | None:
    """Channels, height and width of a model's input, from its `input_size`; None if it has none, or one that is not three sizes.

    Examples:
        >>> model = nn.Conv2d(3, 8, 1)
        >>> model.input_size = (3, 32, 32)
        >>> input_size_of(model)
        (3, 32, 32)
    """
    match getattr(model, "input_size", None):
        case int(d), int(h), int(w) if min(d, h, w) > 0:
            return int(d), int(h), int(w)
    return None


def channels_of(model: object) -> int | None:
    """Input channels of a network, from its `input_size`; None if it has none."""
    size = input_size_of(model)
    return None if size is None else size[0]


def check_batch(batch: Batch, *, channels: int | None = None) -> Batch:
    """The batch with int64 labels. Raises an error if it does not contain images and class indices.

    Only shapes and types are checked, not values, so nothing waits for the device.

    Args:
        channels: input channels of the networks, if known.
    """
    if problem := _images_wrong(batch.x, channels) or _labels_wrong(batch.y) or _lengths_wrong(batch):
        raise DataError(problem)
    if batch.y2 is not None and (problem := _labels_wrong(batch.y2) or _lengths_wrong(replace(batch, y=batch.y2))):
        raise DataError(problem)
    changed = {name: y.long() for name in ("y", "y2") if (y := getattr(batch, name)) is not None and y.dtype != torch.int64}
    return replace(batch, **changed) if changed else batch


def check_labels(y: Tensor, C: int | None, *, least: int = 0) -> bool:
    """Whether all images have a label. Raises if a class index is out of range. Waits for the device once.

    Args:
        C: number of classes, if known.
        least: smallest allowed label; −1 if images may have no label.
    """
    if not len(y):
        return True
    low, high = torch.stack(y.aminmax()).tolist()
    if low < least or (C is not None and high >= C):
        wrong = low if low < least else high
        none = "" if least == 0 else ", -1 for an image without a label"
        raise DataError(
            f"a label is {wrong}, but with {C or 'C'} classes labels range from 0 to {C - 1 if C else 'C - 1'}{none}"
            + ("; accuracy is not defined for images without a label" if low == UNLABELLED and least == 0 else "")
        )
    return low >= 0


def all_labelled(batch: Batch, C: int | None) -> bool:
    """Whether every image has a label; raises an error if a label is not one of the C classes."""
    labelled = [check_labels(y, C, least=UNLABELLED) for y in (batch.y, batch.y2) if y is not None]
    return all(labelled)


def _images_wrong(x: Tensor, channels: int | None) -> str:
    problem = f"the images of a batch are {_kind(x)}, and networks take normalised float images [b {channels or 3} H W]"
    if x.ndim != 4:
        return f"{problem}: {'add the batch dimension with x[None]' if x.ndim == 3 else 'reshape them'}"
    last = x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
    if last and x.shape[1] != channels:
        return f"{problem}: these have their channels last; use x.permute(0, 3, 1, 2)"
    if not x.is_floating_point():
        return f"{problem}: use (x.float() / 255 - mean) / std, with the mean and std that the networks were trained with"
    if channels is not None and x.shape[1] != channels:
        return f"{problem}: {'repeat grey images with x.expand(-1, 3, -1, -1)' if x.shape[1] == 1 else 'use networks for these channels'}"
    return ""


def _labels_wrong(y: Tensor) -> str:
    problem = f"the labels of a batch are {_kind(y)}, and class indices int64 [b] are needed"
    if y.ndim == 2 and y.shape[1] == 1:
        return f"{problem}: use y.squeeze(1)" + ("" if _whole(y) else ".long()")
    if y.ndim == 2:
        return f"{problem}: convert one-hot labels with y.argmax(1); soft and multi-label targets are not supported"
    if y.ndim != 1:
        return f"{problem}: one per image"
    return "" if _whole(y) else f"{problem}: use y.long() if they are class indices"


def _lengths_wrong(batch: Batch) -> str:
    b, index = len(batch.x), batch.index
    if len(batch.y) != b:
        return f"a batch has {b} images and {len(batch.y)} labels; it needs one label per image"
    if index is not None and (index.shape != (b,) or not _whole(index)):
        return f"the indices of a batch are {_kind(index)}; they must be the images' positions in the data set, int64 [{b}]"
    return ""


def _whole(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _kind(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"


def example_for(*models: nn.Module) -> Tensor:
    """An input [1 3 H W] of the `input_size` of the first model that has one."""
    sizes = [size for model in models if (size := input_size_of(model)) is not None]
    if not sizes:
        names = " and ".join(type(model).__name__ for model in models)
        raise TapError(
            f"{names} do not say their input size (`input_size`): pass example=one input [1 3 H W], from which the shapes at the taps "
            "can be found"
        )
    return torch.zeros(1, *sizes[0])
