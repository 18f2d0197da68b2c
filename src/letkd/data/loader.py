"""Batches of a split, reproducible from seed and epoch, in one process or divided among several."""

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
SECOND = 0x7365636F  # part of the seed of the second view's draws
PASSES = 0x70617373  # part of the seed of passes over unlabelled images
Mixing = tuple[float, Box | None] | None  # the result of `Mix.draw` for a batch
# Indices of images, their draws, the result of `Mix.draw`, and labelled images per process (None if all are labelled).
Planned = tuple[Tensor, tuple[Tensor, ...], Mixing, float | None]
VIEWS = 0x76696577  # seed of the fixed views' draws: the same in every run, so that runs can share a cache


def normalise(images: UInt8[Tensor, "b c h w"], mean: Sequence[float], std: Sequence[float]) -> Float32[Tensor, "b c h w"]:
    """(images / 255 − mean) / std, channel by channel."""
    return images.to(torch.float32).sub_(_of_channels(tuple(mean))).div_(_of_channels(tuple(std)))


@lru_cache(maxsize=8)
def _of_channels(values: tuple[float, ...]) -> Float32[Tensor, "c 1 1"]:
    """255 times the value of each channel; cached, because computing it takes as long as normalising a small batch."""
    return (255 * torch.tensor(values, dtype=torch.float64))[:, None, None].to(torch.float32)


def eval_batch(image_size: tuple[int, int], batch_size: int = 1) -> int:
    """Images per batch if no gradient is needed: 128 up to 64x64 pixels, fewer if they are larger, at least `batch_size`.

    Examples:
        >>> eval_batch((32, 32), 16), eval_batch((224, 224), 16), eval_batch((224, 224), 256)
        (128, 16, 256)
    """
    h, w = image_size
    return max(batch_size, min(EVAL_BATCH, EVAL_PIXELS // (h * w)), 1)


def _generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))


class Loader:
    """Batches of a split. The same seed and epoch always give the same batches, independently of other random generators.

    Args:
        mean: mean of each channel, see `Dataset`.
        std: standard deviation of each channel, see `Dataset`.
        augment: redrawn for every image in every epoch, unless `views` is set.
        shuffle: use a new order in every epoch; otherwise the order of the split.
        drop_last: leave out the last batch if it is smaller than the others.
        seed: seed of order and augmentation, together with the epoch.
        rank: index of this process, from 0 to `world` − 1.
        world: number of processes that share every batch. `batch_size` is the total over processes: each gets a contiguous part of the
            one-process batch; if the size does not divide evenly, the first processes get one image more. A process may get no
            image of a smaller last batch; it then yields an empty batch, so that all processes have the same number of steps.
        views: number of fixed views of every image, one per epoch in turn. The draws then depend only on the view and the image,
            not on `seed`, epoch or order. 0: new draws in every epoch.
        second: augmentation of a second view of every image (`Batch.second`); None for no second view. Its draws are independent of
            the first view's, which do not change. Image files are decoded once per view.
        mix: mixes every image with the one before it in the batch of all processes, the first with the last.
        unlabelled_share: share of unlabelled images in every batch (rounded; at least one image of each kind unless it is 0 or 1).
            An epoch then shows every labelled image once; passes over the unlabelled images continue from epoch to epoch. With 1, an
            epoch shows every unlabelled image once. None: every image once per epoch, in the order drawn for all images.

    Examples:
        >>> from letkd.data import CropFlip, Split
        >>> split = Split(torch.randint(256, (10, 3, 32, 32), dtype=torch.uint8), torch.arange(10) % 2)
        >>> loader = Loader(split, 4, mean=(0.5,) * 3, std=(0.25,) * 3, augment=CropFlip(), shuffle=True)
        >>> loader.set_epoch(2)
        >>> [(len(batch.x), batch.epoch) for batch in loader]
        [(4, 2), (4, 2), (2, 2)]
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
            raise DataError(f"a loader with batch_size={batch_size}: a batch must have 1 image or more")
        if drop_last and 0 < len(split) < batch_size:
            raise DataError(
                f"a loader with batch_size={batch_size} and drop_last would leave out all {len(split)} images of its split; "
                f"choose a batch_size of {len(split)} or less"
            )
        if seed < 0:
            raise DataError(f"a loader with seed={seed}: the seed must be 0 or more")
        if views < 0:
            raise DataError(f"a loader with views={views}: the number of fixed views must be 0 or more")
        if second is not None and (views or mix is not None):
            raise DataError(
                "a loader with a second view and fixed views or mixed images: a second view cannot be combined with them; leave out one"
            )
        if views and mix is not None:
            raise DataError(
                f"a loader with views={views} and {mix.kind}: a mixed image is new in every epoch, so it has no fixed views; "
                "train without --cache (train.cache_views) or with data.mix=none"
            )
        if not 0 <= rank < world:
            raise DataError(f"a loader with rank={rank} of world={world}: ranks count from 0 to world − 1")
        if world > batch_size:
            raise DataError(
                f"a loader with batch_size={batch_size} for {world} processes: each needs at least one image per batch"
            )
        self._shares: Shares | None = None
        if unlabelled_share is not None:
            self._shares = Shares(split.labels, batch_size, unlabelled_share)
            self._shares.batches(drop_last=drop_last)  # raises an error if there are too few images for one
        self._partly = bool((split.labels < 0).any())
        self.split, self.batch_size = split, batch_size
        self.mean, self.std, self.augment = mean, std, augment or Augment()
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed
        self.rank, self.world, self.views, self.second, self.mix = rank, world, views, second, mix
        self.epoch, self.start = 1, 0
        self._drawn: tuple[int | None, tuple[Tensor, ...]] = None, ()

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch, counted from 1, whose batches the next iteration yields.

        Args:
            start: number of batches to skip at its beginning; the other batches do not change.
        """
        if epoch < 1:
            raise DataError(f"a loader was set to epoch {epoch}: epochs count from 1")
        if not 0 <= start <= len(self):
            raise DataError(f"a loader was set to start at batch {start} of an epoch, which has {len(self)}")
        self.epoch, self.start = epoch, start

    def view(self, epoch: int) -> int | None:
        """The fixed view that an epoch shows, counted from 0; None if there are no fixed views."""
        return (epoch - 1) % self.views if self.views else None

    def __len__(self) -> int:
        """Number of batches in a whole epoch, whatever its `start`."""
        if self._shares is not None:
            return self._shares.batches(drop_last=self.drop_last)
        whole, rest = divmod(len(self.split), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self.epoch, self.start
        batches = self._batches(self._requests(epoch, start), epoch, self.view(epoch))
        return batches if self.second is None else self._with_second(batches, self.second, epoch, start)

    def of_view(self, view: int, index: Int64[Tensor, " m"]) -> Iterator[Batch]:
        """The images at `index` in a fixed view, in that order; the batches depend only on the two arguments."""
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
        pending: deque[Planned] = deque()  # a split may read requests ahead
        known = None if self._partly else True

        def sent() -> Iterator[Request]:
            for planned in requests:
                pending.append(planned)
                yield planned[:2]

        for images in self.split.read(sent(), augment):
            index, draws, mixing, labelled = pending.popleft()
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
        """The draws of all images in a fixed view; those of the last view are cached."""
        if self._drawn[0] != view:
            self._drawn = view, self.augment.draw(len(self.split), _generator(VIEWS, view))
        return self._drawn[1]

    def _requests(self, epoch: int, start: int, second: Augment | None = None) -> Iterator[Planned]:
        """The images of each batch and their draws; with `second`, the draws of the second view."""
        # The order is drawn first, so it does not depend on the augmentation.
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
            # For the whole batch, and for skipped batches too, so that the draws depend neither on the process nor on the start.
            draws = augment.draw(len(index), generator) if table is None else tuple(part[index] for part in table)
            mixing = None if self.mix is None else self.mix.draw(*self.split.image_size, generator)
            if k >= start:
                at = torch.arange(len(index)).tensor_split(self.world)[self.rank]
                if mixing is not None:
                    at = torch.cat([at[:1] - 1, at])  # add the previous image, to mix it with the first
                yield index[at], tuple(part[at] for part in draws), mixing, self._mean_labelled(index)

    def _pass(self, n: int, p: int) -> Tensor:
        """The order of the p-th pass over unlabelled images."""
        return torch.randperm(n, generator=_generator(self.seed, p, PASSES)) if self.shuffle else torch.arange(n)

    def _mean_labelled(self, index: Tensor) -> float | None:
        """Mean number of labelled images per process in a batch; None with one process, or if all images have a label."""
        if self.world == 1 or not self._partly:
            return None
        return max(int((self.split.labels[index] >= 0).sum()), 1) / self.world
