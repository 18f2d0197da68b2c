"""Batches of a split, the same for the same seed and epoch, in one process or shared among several."""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from letkd.batch import Batch
from letkd.data.augment import Augment
from letkd.data.base import AnySplit, Request
from letkd.errors import DataError


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
        rank: which of `world` processes this one is, counted from 0.
        world: processes that share every batch. `batch_size` is that of all of them together: each takes its part of the
            one-process batch, in order, the first ones one image more where it does not divide. Of a last, smaller batch a
            process may get no image; it still gets the batch, empty, so that all of them count the same steps.
    """

    def __init__(
        self,
        split: AnySplit,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
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
        if not 0 <= rank < world:
            raise DataError(f"a loader with rank={rank} of world={world}: ranks count from 0 to world − 1")
        if world > batch_size:
            raise DataError(f"a loader with batch_size={batch_size} for {world} processes: each needs an image of every batch")
        self.split, self.batch_size = split, batch_size
        self.mean, self.std, self.augment = mean, std, augment or Augment()
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed
        self.rank, self.world = rank, world
        self.epoch, self.start = 1, 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Names the epoch, counted from 1, whose batches come next.

        Args:
            start: how many of its first batches are left out; the others are what they are in the whole epoch.
        """
        if epoch < 1:
            raise DataError(f"epoch {epoch} asked of a loader: epochs count from 1")
        if not 0 <= start <= len(self):
            raise DataError(f"batch {start} asked of a loader as the first of an epoch, which has {len(self)}")
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever it is begun."""
        whole, rest = divmod(len(self.split), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self.epoch, self.start)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        asked: deque[Tensor] = deque()  # a split may look at requests ahead

        def requests() -> Iterator[Request]:
            for index, draws in self._requests(epoch, start):
                asked.append(index)
                yield index, draws

        for images in self.split.read(requests(), self.augment):
            index = asked.popleft()
            yield Batch(normalise(images, self.mean, self.std), self.split.labels[index], index, epoch)

    def _requests(self, epoch: int, start: int) -> Iterator[Request]:
        # The order is drawn first, so it is the same whether or not the images are augmented.
        mixed = np.random.SeedSequence((self.seed, epoch)).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        n = len(self.split)
        order = torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)
        for k in range(len(self)):
            index = order[k * self.batch_size : (k + 1) * self.batch_size]
            # For the whole batch, and for batches left out too: what a process draws does not depend on what it is given.
            draws = self.augment.draw(len(index), generator)
            if k >= start:
                parts = [part.tensor_split(self.world)[self.rank] for part in (index, *draws)]
                yield parts[0], tuple(parts[1:])
