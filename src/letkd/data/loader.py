"""Batches of a split, the same for the same seed and epoch, in one process or shared among several."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from letkd.batch import Batch
from letkd.data.augment import Augment
from letkd.data.base import AnySplit, Request
from letkd.data.mix import Box, Mix
from letkd.data.shares import Shares
from letkd.errors import DataError

EVAL_BATCH, EVAL_PIXELS = 128, 128 * 64 * 64
SECOND = 0x7365636F  # goes into the seed of the second view's draws
PASSES = 0x70617373  # goes into the seed of passes over images without a label
Mixing = tuple[float, Box | None] | None  # what `Mix.draw` gives for a batch
# Images, their draws, what `Mix` drew, and the labelled images per process if a process cannot tell by itself.
Planned = tuple[Tensor, tuple[Tensor, ...], Mixing, float | None]
VIEWS = 0x76696577  # the seed of the views' draws: the same in every run, so that runs share what was made of a view


def normalise(images: UInt8[Tensor, "b c h w"], mean: Sequence[float], std: Sequence[float]) -> Float32[Tensor, "b c h w"]:
    """(images / 255 − mean) / std, channel by channel."""
    return images.to(torch.float32).sub_(_of_channels(tuple(mean))).div_(_of_channels(tuple(std)))


@lru_cache(maxsize=8)
def _of_channels(values: tuple[float, ...]) -> Float32[Tensor, "c 1 1"]:
    """255 times the value of each channel: made once, for it takes as long as normalising a small batch."""
    return (255 * torch.tensor(values, dtype=torch.float64))[:, None, None].to(torch.float32)


def eval_batch(image_size: tuple[int, int], batch_size: int = 1) -> int:
    """Images per batch where no gradient is needed: 128 up to 64x64 pixels, fewer of larger ones, at least `batch_size`.

    Examples:
        >>> eval_batch((32, 32), 16), eval_batch((224, 224), 16), eval_batch((224, 224), 256)
        (128, 16, 256)
    """
    h, w = image_size
    return max(batch_size, min(EVAL_BATCH, EVAL_PIXELS // (h * w)), 1)


def _generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))


class Loader:
    """Batches of a split. The same seed and epoch give the same batches, whatever else draws random numbers.

    Args:
        mean: of each channel, see `Dataset`.
        std: likewise.
        augment: drawn anew for every image of every epoch, or as `views` says.
        shuffle: another order every epoch; without it, the order of the split.
        drop_last: leaves out the last batch where it is smaller than the others.
        seed: of order and augmentation, together with the epoch.
        rank: which of `world` processes this one is, counted from 0.
        world: processes that share every batch. `batch_size` is that of all of them together: each takes its part of the
            one-process batch, in order, the first ones one image more where it does not divide. Of a last, smaller batch a
            process may get no image; it still gets the batch, empty, so that all of them count the same steps.
        views: so many fixed views of every image, one an epoch in turn. What is drawn then depends on the view and the image
            alone, not on `seed`, epoch or order; 0 for fresh draws in every epoch.
        second: how a second view of every image is drawn, `Batch.second`; None for no such view. Its draws are independent of the
            first view's and leave these as they are without it. Image files are decoded once for each view.
        mix: mixes every image with the one before it in the batch of all processes, the first with the last.
        unlabelled_share: of every batch, images without a label (rounded, and at least one image of either kind unless it is 0 or 1).
            An epoch then shows every labelled image once, and goes through the others in passes of their own, from epoch to epoch;
            with 1 it shows every image without a label once. None: each image once per epoch, as they come.
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
        views: int = 0,
        second: Augment | None = None,
        mix: Mix | None = None,
        unlabelled_share: float | None = None,
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
        if views < 0:
            raise DataError(f"a loader with views={views}: it is a number of fixed views, 0 for none")
        if second is not None and (views or mix is not None):
            raise DataError(
                "a loader with a second view and fixed views or mixed images: a second view goes with neither; leave out one of the two"
            )
        if views and mix is not None:
            raise DataError(
                f"a loader with views={views} and {mix.kind}: a mixed image is new in every epoch, so it has no fixed views; "
                "train without --cache (train.cache_views) or with data.mix=none"
            )
        if not 0 <= rank < world:
            raise DataError(f"a loader with rank={rank} of world={world}: ranks count from 0 to world − 1")
        if world > batch_size:
            raise DataError(f"a loader with batch_size={batch_size} for {world} processes: each needs an image of every batch")
        self._shares: Shares | None = None
        if unlabelled_share is not None:
            self._shares = Shares(split.labels, batch_size, unlabelled_share)
        self._partly = bool((split.labels < 0).any())
        self.split, self.batch_size = split, batch_size
        self.mean, self.std, self.augment = mean, std, augment or Augment()
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed
        self.rank, self.world, self.views, self.second, self.mix = rank, world, views, second, mix
        self.epoch, self.start = 1, 0
        self._drawn: tuple[int | None, tuple[Tensor, ...]] = None, ()

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

    def view(self, epoch: int) -> int | None:
        """The fixed view that an epoch shows, counted from 0; None where every epoch draws anew."""
        return (epoch - 1) % self.views if self.views else None

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever it is begun."""
        if self._shares is not None:
            return self._shares.batches(drop_last=self.drop_last)
        whole, rest = divmod(len(self.split), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self.epoch, self.start
        batches = self._batches(self._requests(epoch, start), epoch, self.view(epoch))
        return batches if self.second is None else self._with_second(batches, self.second, epoch, start)

    def of_view(self, view: int, index: Int64[Tensor, " m"]) -> Iterator[Batch]:
        """The images at `index`, in that order, as a fixed view shows them; in batches that depend on nothing else."""
        table = self._table(view)
        size = eval_batch(self.split.image_size)
        requests = ((part, tuple(rows[part] for rows in table), None, None) for part in index.split(size))
        return self._batches(requests, view + 1, view)

    def _batches(
        self,
        requests: Iterable[Planned],
        epoch: int,
        view: int | None,
        second: Augment | None = None,
    ) -> Iterator[Batch]:
        augment = second or self.augment
        asked: deque[Planned] = deque()  # a split may look at requests ahead
        known = None if self._partly else True

        def noted() -> Iterator[Request]:
            for planned in requests:
                asked.append(planned)
                yield planned[:2]

        for images in self.split.read(noted(), augment):
            index, draws, mixing, labelled = asked.popleft()
            x = augment.normalised(normalise(images, self.mean, self.std), *draws)
            y = self.split.labels[index]
            if self.mix is None or mixing is None:
                yield Batch(x, y, index, epoch, view, labelled_per_process=labelled, all_labelled=known)
            else:
                x, lam = self.mix(x[1:], x[:-1], *mixing)
                yield Batch(
                    x, y[1:], index[1:], epoch, view, y2=y[:-1], lam=lam, labelled_per_process=labelled, all_labelled=known
                )

    def _with_second(self, batches: Iterable[Batch], second: Augment, epoch: int, start: int) -> Iterator[Batch]:
        others = self._batches(self._requests(epoch, start, second), epoch, None, second)
        for batch, other in zip(batches, others, strict=True):
            yield replace(batch, second=other.x)

    def _table(self, view: int) -> tuple[Tensor, ...]:
        """What is drawn for all images in a fixed view; the last one asked for is kept."""
        if self._drawn[0] != view:
            self._drawn = view, self.augment.draw(len(self.split), _generator(VIEWS, view))
        return self._drawn[1]

    def _requests(self, epoch: int, start: int, second: Augment | None = None) -> Iterator[Planned]:
        """The images of each batch and what is drawn for them; with `second`, what is drawn for the second view."""
        # The order is drawn first, so it is the same whether or not the images are augmented.
        generator = _generator(self.seed, epoch)
        n, view = len(self.split), self.view(epoch)
        table = None if view is None else self._table(view)
        order = torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)
        if self._shares is not None:
            order = self._shares.order(order, (epoch - 1) * len(self), len(self), self._pass)
        augment = self.augment
        if second is not None:
            augment, generator = second, _generator(self.seed, epoch, SECOND)
        for k in range(len(self)):
            index = order[k * self.batch_size : (k + 1) * self.batch_size]
            # For the whole batch, and for batches left out too: what a process draws does not depend on what it is given.
            draws = augment.draw(len(index), generator) if table is None else tuple(part[index] for part in table)
            mixing = None if self.mix is None else self.mix.draw(*self.split.image_size, generator)
            if k >= start:
                at = torch.arange(len(index)).tensor_split(self.world)[self.rank]
                if mixing is not None:
                    at = torch.cat([at[:1] - 1, at])  # the image before comes along, to be mixed with the first
                yield index[at], tuple(part[at] for part in draws), mixing, self._mean_labelled(index)

    def _pass(self, n: int, p: int) -> Tensor:
        """The order of the p-th pass over images without a label."""
        return torch.randperm(n, generator=_generator(self.seed, p, PASSES)) if self.shuffle else torch.arange(n)

    def _mean_labelled(self, index: Tensor) -> float | None:
        """Labelled images per process in a batch of all processes; None if a process can tell by itself."""
        if self.world == 1 or not self._partly:
            return None
        return max(int((self.split.labels[index] >= 0).sum()), 1) / self.world
