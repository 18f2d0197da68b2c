"""Splits of images, Dataset, and load_data, which finds a data set by its name."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from letkd.batch import UNLABELLED
from letkd.data.augment import Augment
from letkd.errors import DataError, nearest
from letkd.plugins import Registry

Size = int | tuple[int, int]  # the side of a square, or height and width
Request = tuple[Tensor, tuple[Tensor, ...]]  # which images [b], and the numbers drawn for them, b rows each


class AnySplit(Protocol):
    """What every split has, wherever its images are."""

    @property
    def labels(self) -> Tensor:
        """int64 `[n]`; −1 for an image without a label."""
        ...

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images that `read` gives."""
        ...

    @property
    def resize(self) -> int | None:
        """How an image file becomes an image like these: see `letkd.data.pictures.centred`."""
        ...

    def __len__(self) -> int: ...

    def subset(self, index: Int64[Tensor, " m"] | Bool[Tensor, " n"]) -> "AnySplit":
        """The images at `index` (positions, in that order, or a mask)."""
        ...

    def fingerprint(self) -> str:
        """A name for the content."""
        ...

    def read(self, requests: Iterable[Request], augment: Augment) -> Iterator[UInt8[Tensor, "b 3 h w"]]:
        """The images of each request, augmented with its draws, in the requests' order; it may look at some ahead."""
        ...


@dataclass(frozen=True, eq=False)
class Split:
    """Images in memory and their labels, checked when made. The tensors are shared, not copied: do not write to them.

    Args:
        images: uint8 `[n 3 h w]`.
        labels: int64 `[n]`, 0 or more; −1 for an image without a label.
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self):
        shape = list(self.images.shape)
        if self.images.dtype != torch.uint8 or len(shape) != 4 or shape[1] != 3:
            raise DataError(f"the images of a split must be uint8 [n 3 h w]; these are {self.images.dtype} {shape}")
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise DataError(f"the labels of a split must be int64 [n]; these are {self.labels.dtype} {list(self.labels.shape)}")
        if len(self.images) != len(self.labels):
            raise DataError(f"a split has {len(self.images)} images but {len(self.labels)} labels; it needs one label an image")
        bad = (self.labels < UNLABELLED).nonzero()
        if len(bad):
            at = int(bad[0])
            raise DataError(f"the label at index {at} of a split is {int(self.labels[at])}; labels count from 0")

    @property
    def image_size(self) -> tuple[int, int]:
        h, w = self.images.shape[-2:]
        return h, w

    @property
    def resize(self) -> int:
        """Whole images, without a margin."""
        return min(self.image_size)

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Int64[Tensor, " m"] | Bool[Tensor, " n"]) -> "Split":
        return Split(self.images[index], self.labels[index])

    def read(self, requests: Iterable[Request], augment: Augment) -> Iterator[UInt8[Tensor, "b 3 h w"]]:
        for index, draws in requests:
            yield augment(self.images.index_select(0, index), *draws)  # images[index] takes many times as long

    def fingerprint(self) -> str:
        """SHA-256 over shapes, images and labels. Worked out once."""
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        digest = hashlib.sha256()
        for part in (self.images, self.labels):
            digest.update(f"{part.dtype}{list(part.shape)}".encode())
            digest.update(part.cpu().contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in three splits, with what is needed to feed it to a network.

    Args:
        val: held out from the official training set; may be empty.
        classes: a name for every class, in the order of the labels; none if no image has a label.
        mean: of each channel, where 0 is black and 1 is white; subtracted from the images.
        std: of each channel; the images are divided by it.
        flip: whether a mirror image keeps its class.
    """

    name: str
    train: AnySplit
    val: AnySplit
    test: AnySplit
    classes: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    flip: bool

    def __post_init__(self):
        C = self.num_classes
        for name in ("train", "val", "test"):
            labels = getattr(self, name).labels
            bad = (labels >= C).nonzero()
            if len(bad):
                at = int(bad[0])
                raise DataError(
                    f"the label at index {at} of the {name} split of {self.name} is {int(labels[at])}, "
                    f"but {C} classes have the labels 0 to {C - 1}"
                )

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def has_labels(self) -> bool:
        """Whether there is anything to classify; without classes there is not."""
        return bool(self.classes)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images that networks get."""
        return self.train.image_size


@dataclass(frozen=True)
class Reading:
    """How image files are read; data sets that do not come as image files have no use for it.

    Args:
        size: height and width of the images that networks get, or the side of square ones; the data set's own if omitted.
        resize: what the shorter side of a file is scaled to before `size` is cut from the centre. If omitted, 8/7 of `size`
            (256 for 224), and a file that already has the size is left as it is.
        workers: processes that decode; 0 for none but this one.
        corrupt: `refuse` stops at a file that cannot be decoded and at a class folder without images; `skip` decodes every file
            once beforehand and leaves such files and folders out, so that all that follows is as if they were not there.
    """

    size: Size | None = None
    resize: int | None = None
    workers: int = 0
    corrupt: str = "refuse"

    def __post_init__(self):
        if self.size is not None and min(self.sides) < 1:
            raise DataError(f"images of size={self.size}: a side has 1 pixel or more")
        if self.size and self.resize and self.resize < min(self.sides):
            raise DataError(
                f"images of size={self.size} cut from resize={self.resize}: the cut is larger than what it is cut from"
            )
        if self.workers < 0:
            raise DataError(f"workers={self.workers} to decode images: it is 0 or more")
        if self.corrupt not in ("refuse", "skip"):
            raise DataError(f"corrupt={self.corrupt!r}: there are 'refuse' and 'skip'")

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width."""
        size = self.size or 0
        return (size, size) if isinstance(size, int) else size

    def at(self, size: int) -> "Reading":
        """The same, with a size: its own or this one."""
        return replace(self, size=self.size or size)


Reader = Callable[[Path | None, Reading], Dataset]
READERS: Registry[Reader] = Registry("data", "a data set")


def stratified(labels: Int64[Tensor, " n"], count: Callable[[int], int], *, seed: Sequence[int]) -> Bool[Tensor, " n"]:
    """A mask that takes `count(n_c)` images at random of every class of n_c images.

    With the same labels and seed, a smaller count takes a part of what a larger one takes.
    """
    # RandomState's numbers are promised never to change with numpy's version, so neither does a split.
    random = np.random.RandomState(list(seed))
    taken = torch.zeros(len(labels), dtype=torch.bool)
    for c in labels.unique():
        at = (labels == c).nonzero().flatten()
        shuffled = torch.from_numpy(random.permutation(len(at)).astype(np.int64))
        taken[at[shuffled[: count(len(at))]]] = True
    return taken


def register_data(name: str) -> Callable[[Reader], Reader]:
    """Registers a function that gives a data set from its folder: all training images as `train`, `val` empty if not its own."""

    def register(read: Reader) -> Reader:
        READERS.add(name, read)
        return read

    return register


def load_data(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    val: float = 0.1,
    fraction: float = 1.0,
    seed: int = 0,
    size: Size | None = None,
    resize: int | None = None,
    workers: int = 0,
    corrupt: str = "refuse",
    unlabelled: str | None = None,
) -> Dataset:
    """A data set by its name, with a validation split held out from its training images where it has none of its own.

    Args:
        root: the folder with the official files; digits needs none.
        val: share of every class's training images held out.
        fraction: share of every class's remaining training images kept, at least one; a smaller one is part of a larger.
        seed: of these two draws alone. Not a run's seed: runs are compared on the same images. The test split never changes.
        size: this and the next three are for image files, see `Reading`.
        unlabelled: more training images, without labels: those in a folder or that a pattern matches, see `letkd.data.images`; "rest"
            for those that `fraction` leaves out. Images of the test and the validation split are left out of them.
    """
    if name not in READERS:
        raise DataError(f"there is no data set {name!r}; nearest: {nearest(name, READERS)}")
    if not 0 <= val < 1:
        raise DataError(f"val={val} asked of {name}: the share held out for validation is 0 or more and less than 1")
    if not 0 < fraction <= 1:
        raise DataError(f"fraction={fraction} asked of {name}: the share of training images kept is more than 0, at most 1")
    if not 0 <= seed < 2**32:
        raise DataError(f"seed={seed} asked of {name}: the seed of its splits is 0 or more and less than 2^32")
    reading = Reading(size=size, resize=resize, workers=workers, corrupt=corrupt)
    data = READERS[name](None if root is None else Path(root).expanduser(), reading)
    if size is not None and data.image_size != reading.sides:
        h, w = data.image_size
        raise DataError(f"size={size} asked of {name}, whose images are {h}x{w} and no files to be scaled; leave `size=` out")
    train, held = data.train, data.val
    if val > 0 and not len(held):
        mask = stratified(train.labels, lambda n: min(int(val * n + 0.5), n - 1), seed=(seed, 1))
        train, held = train.subset(~mask), train.subset(mask)
    rest = train.subset(torch.arange(0))
    if fraction < 1:
        kept = stratified(train.labels, lambda n: max(int(fraction * n + 0.5), 1), seed=(seed, 2))
        train, rest = train.subset(kept), train.subset(~kept)
    data = replace(data, train=train, val=held)
    if unlabelled is None:
        return data
    from letkd.data.unlabelled import add_unlabelled  # which reads other data sets by this file

    return add_unlabelled(data, unlabelled, rest, reading)
