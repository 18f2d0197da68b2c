"""Splits of images, Dataset, and load_data, which loads a data set by its name."""

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
Request = tuple[Tensor, tuple[Tensor, ...]]  # indices of images [b], and the random numbers for them, b rows each


class AnySplit(Protocol):
    """The interface of every split, in memory or in files."""

    @property
    def labels(self) -> Tensor:
        """int64 `[n]`; −1 for an image without a label."""
        ...

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images that `read` yields."""
        ...

    @property
    def resize(self) -> int | None:
        """How an image file is scaled to an image of this split: see `letkd.data.pictures.centred`."""
        ...

    def __len__(self) -> int: ...

    def subset(self, index: Int64[Tensor, " m"] | Bool[Tensor, " n"]) -> "AnySplit":
        """The images at `index` (positions, in that order, or a mask)."""
        ...

    def fingerprint(self) -> str:
        """A hash of the content."""
        ...

    def read(self, requests: Iterable[Request], augment: Augment) -> Iterator[UInt8[Tensor, "b 3 h w"]]:
        """The images of each request, augmented with its draws, in the order of the requests, which may be read ahead."""
        ...


@dataclass(frozen=True, eq=False)
class Split:
    """Images in memory and their labels, checked on construction. The tensors are shared, not copied: do not write to them.

    Args:
        images: uint8 `[n 3 h w]`.
        labels: int64 `[n]`, 0 or more; −1 for an image without a label.
        scaled_to: length that the shorter side of image files was scaled to before the centre was cropped; default: no margin.
    """

    images: Tensor
    labels: Tensor
    scaled_to: int | None = None

    def __post_init__(self):
        shape = list(self.images.shape)
        if self.images.dtype != torch.uint8 or len(shape) != 4 or shape[1] != 3:
            raise DataError(f"the images of a split must be uint8 [n 3 h w]; these are {self.images.dtype} {shape}")
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise DataError(f"the labels of a split must be int64 [n]; these are {self.labels.dtype} {list(self.labels.shape)}")
        if len(self.images) != len(self.labels):
            raise DataError(
                f"a split has {len(self.images)} images but {len(self.labels)} labels; it needs one label per image"
            )
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
        return self.scaled_to or min(self.image_size)

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Int64[Tensor, " m"] | Bool[Tensor, " n"]) -> "Split":
        return Split(self.images[index], self.labels[index], self.scaled_to)

    def read(self, requests: Iterable[Request], augment: Augment) -> Iterator[UInt8[Tensor, "b 3 h w"]]:
        for index, draws in requests:
            yield augment(self.images.index_select(0, index), *draws)  # much faster than images[index]

    def fingerprint(self) -> str:
        """SHA-256 over shapes, images and labels; computed once."""
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
    """A data set: three splits, class names, and normalisation.

    Args:
        val: held out from the official training set; may be empty.
        classes: a name for every class, in the order of the labels; empty if no image has a label.
        mean: mean of each channel (0 is black, 1 is white); subtracted from the images.
        std: standard deviation of each channel; the images are divided by it.
        flip: whether a mirror image keeps its class.

    Examples:
        >>> images, labels = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8), torch.tensor([0, 1, 0, 1, 0, 1])
        >>> everything = Split(images, labels)
        >>> train, val, test = (everything.subset(torch.tensor(at)) for at in ([0, 1], [2, 3], [4, 5]))
        >>> data = Dataset("mine", train, val, test, classes=("cat", "dog"), mean=(0.5,) * 3, std=(0.25,) * 3, flip=True)
        >>> data.num_classes, data.image_size, len(data.train)
        (2, (32, 32), 2)
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
        """Whether the data set has classes."""
        return bool(self.classes)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images that networks receive."""
        return self.train.image_size


@dataclass(frozen=True)
class Reading:
    """How image files are read; data sets without image files ignore it.

    Args:
        size: height and width of the images that networks receive, or the side of square images. Default: the data set's own.
        resize: length that the shorter side of a file is scaled to before the centre of `size` is cropped. Default: 8/7 of `size`
            (256 for 224); a file that already has this size is not scaled.
        workers: processes that decode images; 0 decodes in this process.
        corrupt: `refuse` raises an error for a file that cannot be decoded and for a class folder without images; `skip` decodes
            every file once at the start and ignores such files and folders.
    """

    size: Size | None = None
    resize: int | None = None
    workers: int = 0
    corrupt: str = "refuse"

    def __post_init__(self):
        if self.size is not None and min(self.sides) < 1:
            raise DataError(f"images of size={self.size}: each side must have 1 pixel or more")
        if self.size and self.resize and self.resize < min(self.sides):
            raise DataError(
                f"images of size={self.size} cropped from resize={self.resize}: `resize` must be at least the shorter side of `size`"
            )
        if self.workers < 0:
            raise DataError(f"workers={self.workers} to decode images: it must be 0 or more")
        if self.corrupt not in ("refuse", "skip"):
            raise DataError(f"corrupt={self.corrupt!r}: choose 'refuse' or 'skip'")

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width."""
        size = self.size or 0
        return (size, size) if isinstance(size, int) else size

    def at(self, size: int) -> "Reading":
        """A copy with a size: its own or, if it has none, the given one."""
        return replace(self, size=self.size or size)


Reader = Callable[[Path | None, Reading], Dataset]
READERS: Registry[Reader] = Registry("data", "a data set")


def stratified(labels: Int64[Tensor, " n"], count: Callable[[int], int], *, seed: Sequence[int]) -> Bool[Tensor, " n"]:
    """A mask of `count(n_c)` random images of every class, which has n_c images.

    With the same labels and seed, the images of a smaller count are a subset of those of a larger one.
    """
    # RandomState gives the same numbers in every version of numpy, so splits never change.
    random = np.random.RandomState(list(seed))
    taken = torch.zeros(len(labels), dtype=torch.bool)
    for c in labels.unique():
        at = (labels == c).nonzero().flatten()
        shuffled = torch.from_numpy(random.permutation(len(at)).astype(np.int64))
        taken[at[shuffled[: count(len(at))]]] = True
    return taken


def register_data(name: str) -> Callable[[Reader], Reader]:
    """Register a reader: a function that reads a data set from its folder. Its `val` is empty unless the data set has one.

    Examples:
        >>> @register_data("noise")
        ... def read_noise(root, reading):
        ...     split = Split(torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8) % 2)
        ...     none = split.subset(torch.arange(0))
        ...     return Dataset("noise", split, none, split, classes=("a", "b"), mean=(0.5,) * 3, std=(0.25,) * 3, flip=True)
        >>> len(load_data("noise", val=0.25).val)
        2
        >>> _ = READERS.remove("noise")
    """

    def register(read: Reader) -> Reader:
        READERS.add(name, read)
        return read

    return register


def unknown_data(name: str) -> DataError:
    """The error for a name that is no data set; for the path of a folder, it says how to read one."""
    if Path(name).is_dir():
        return DataError(f"{name!r} is a folder, not a data set; use the data set 'folder' with `root={name!r}`")
    return DataError(f"there is no data set {name!r}; nearest: {nearest(name, READERS)}")


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
    """Load a data set by its name. If it has no validation split, one is held out from its training images.

    Args:
        root: the folder with the official files; digits needs none.
        val: share of the training images of every class to hold out.
        fraction: share of the remaining training images of every class to keep, at least one; a smaller share is a subset of a larger.
        seed: seed of these two draws. Not a run's seed: runs are compared on the same images. The test split never changes.
        size: this and the next three are for image files, see `Reading`.
        unlabelled: more training images, without labels: a folder or a pattern, see `letkd.data.images`; or "rest" for the images that
            `fraction` leaves out. Images that are also in the test or validation split are not added.

    Examples:
        >>> import letkd
        >>> data = letkd.load_data("digits", val=0.1)
        >>> len(data.train), len(data.val), len(data.test)
        (968, 109, 720)
    """
    if name not in READERS:
        raise unknown_data(name)
    if not 0 <= val < 1:
        raise DataError(f"val={val} for {name}: the share held out for validation must be 0 or more and less than 1")
    if not 0 < fraction <= 1:
        raise DataError(
            f"fraction={fraction} for {name}: the share of training images to keep must be more than 0 and at most 1"
        )
    if not 0 <= seed < 2**32:
        raise DataError(f"seed={seed} for {name}: the seed of its splits must be 0 or more and less than 2^32")
    reading = Reading(size=size, resize=resize, workers=workers, corrupt=corrupt)
    data = READERS[name](None if root is None else Path(root).expanduser(), reading)
    if size is not None and data.image_size != reading.sides:
        h, w = data.image_size
        raise DataError(f"size={size} for {name}: its images are {h}x{w} and cannot be scaled; leave `size=` out")
    train, held_out = data.train, data.val
    if val > 0 and not len(held_out):
        mask = stratified(train.labels, lambda n: min(int(val * n + 0.5), n - 1), seed=(seed, 1))
        train, held_out = train.subset(~mask), train.subset(mask)
    rest = train.subset(torch.arange(0))
    if fraction < 1:
        kept = stratified(train.labels, lambda n: max(int(fraction * n + 0.5), 1), seed=(seed, 2))
        train, rest = train.subset(kept), train.subset(~kept)
    data = replace(data, train=train, val=held_out)
    if unlabelled is None:
        return data
    from letkd.data.unlabelled import add_unlabelled  # here, because it imports this file

    return add_unlabelled(data, unlabelled, rest, reading)
