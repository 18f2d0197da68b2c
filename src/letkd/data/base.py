"""Images in memory: Split, Dataset, Loader, and load_data, which finds a data set by its name."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor

from letkd.batch import Batch
from letkd.data.augment import Augment
from letkd.errors import DataError, nearest

Reader = Callable[[Path | None], "Dataset"]
READERS: dict[str, Reader] = {}


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels, checked when made. The tensors are shared, not copied: do not write to them.

    Args:
        images: uint8 `[n 3 h w]`.
        labels: int64 `[n]`, 0 or more.
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
        bad = (self.labels < 0).nonzero()
        if len(bad):
            at = int(bad[0])
            raise DataError(f"the label at index {at} of a split is {int(self.labels[at])}; labels count from 0")

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Int64[Tensor, " m"] | Bool[Tensor, " n"]) -> "Split":
        """The images at `index` (positions, in that order, or a mask)."""
        return Split(self.images[index], self.labels[index])

    def fingerprint(self) -> str:
        """A name for the content: SHA-256 over shapes, images and labels. Worked out once."""
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
        classes: a name for every class, in the order of the labels.
        mean: of each channel, where 0 is black and 1 is white; subtracted from the images.
        std: of each channel; the images are divided by it.
        flip: whether a mirror image keeps its class.
    """

    name: str
    train: Split
    val: Split
    test: Split
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


def normalise(images: UInt8[Tensor, "b c h w"], mean: Sequence[float], std: Sequence[float]) -> Float32[Tensor, "b c h w"]:
    """(images / 255 − mean) / std, channel by channel."""
    m, s = (255 * torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (mean, std))
    return images.to(torch.float32).sub_(m.to(torch.float32)).div_(s.to(torch.float32))


class Loader:
    """Batches of a split. The same seed and epoch give the same batches, whatever else draws random numbers.

    Args:
        mean: of each channel, see `Dataset`.
        std: likewise.
        augment: drawn anew for every image of every epoch.
        shuffle: another order every epoch; without it, the order of the split.
        drop_last: leaves out the last batch where it is smaller than the others.
        seed: of order and augmentation, together with the epoch.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ):
        if batch_size < 1:
            raise DataError(f"a loader with batch_size={batch_size}: a batch has 1 image or more")
        if drop_last and 0 < len(split) < batch_size:
            raise DataError(
                f"a loader with batch_size={batch_size} and drop_last would leave out all {len(split)} images of its split; "
                f"choose a batch_size of {len(split)} or less"
            )
        if seed < 0:
            raise DataError(f"a loader with seed={seed}: seeds are 0 or more")
        self.split, self.batch_size = split, batch_size
        self.mean, self.std, self.augment = mean, std, augment
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed
        self.epoch = 1

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch, counted from 1, whose batches come next."""
        if epoch < 1:
            raise DataError(f"epoch {epoch} asked of a loader: epochs count from 1")
        self.epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.split), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self.epoch)

    def _batches(self, epoch: int) -> Iterator[Batch]:
        # The order is drawn first, so it is the same whether or not the images are augmented.
        mixed = np.random.SeedSequence((self.seed, epoch)).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        n = len(self.split)
        order = torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)
        for k in range(len(self)):
            index = order[k * self.batch_size : (k + 1) * self.batch_size]
            images = self.split.images[index]
            if self.augment is not None:
                images = self.augment(images, generator)
            yield Batch(normalise(images, self.mean, self.std), self.split.labels[index], index, epoch)


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


def reader(name: str) -> Callable[[Reader], Reader]:
    """Registers a function that gives a data set from its folder: official training images as `train`, `val` empty."""

    def register(read: Reader) -> Reader:
        READERS[name] = read
        return read

    return register


def load_data(
    name: str, *, root: str | os.PathLike[str] | None = None, val: float = 0.1, fraction: float = 1.0, seed: int = 0
) -> Dataset:
    """A data set by its name, with a validation split held out from its official training images.

    Args:
        root: the folder with the official files; digits needs none.
        val: share of every class's training images held out.
        fraction: share of every class's remaining training images kept, at least one; a smaller one is part of a larger.
        seed: of these two draws alone. Not a run's seed: runs are compared on the same images. The test split never changes.
    """
    if name not in READERS:
        raise DataError(f"there is no data set {name!r}; nearest: {nearest(name, READERS)}")
    if not 0 <= val < 1:
        raise DataError(f"val={val} asked of {name}: the share held out for validation is 0 or more and less than 1")
    if not 0 < fraction <= 1:
        raise DataError(f"fraction={fraction} asked of {name}: the share of training images kept is more than 0, at most 1")
    if not 0 <= seed < 2**32:
        raise DataError(f"seed={seed} asked of {name}: the seed of its splits is 0 or more and less than 2^32")
    data = READERS[name](None if root is None else Path(root).expanduser())
    train, held = data.train, data.val
    if val > 0:
        mask = stratified(train.labels, lambda n: min(int(val * n + 0.5), n - 1), seed=(seed, 1))
        train, held = train.subset(~mask), train.subset(mask)
    if fraction < 1:
        train = train.subset(stratified(train.labels, lambda n: max(int(fraction * n + 0.5), 1), seed=(seed, 2)))
    return replace(data, train=train, val=held)
