"""Labelled and unlabelled images as one split."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import tee

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from letkd.data.augment import Augment
from letkd.data.base import AnySplit, Request
from letkd.errors import DataError


@dataclass(frozen=True, eq=False)
class Joined:
    """Two splits, concatenated; the same interface as `Split`. Images of both have the same size."""

    first: AnySplit
    second: AnySplit

    def __post_init__(self):
        one, two = self.first.image_size, self.second.image_size
        if one != two:
            raise DataError(f"images of {one[0]}x{one[1]} and of {two[0]}x{two[1]} in one data set; give both the same size")

    @cached_property
    def _labels(self) -> Tensor:
        return torch.cat([self.first.labels, self.second.labels])

    @property
    def labels(self) -> Tensor:
        return self._labels

    @property
    def image_size(self) -> tuple[int, int]:
        return self.first.image_size

    @property
    def resize(self) -> int | None:
        return self.first.resize

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def subset(self, index: Int64[Tensor, " m"] | Bool[Tensor, " n"]) -> AnySplit:
        """The images at `index`, those of the first split first."""
        index = index.nonzero().squeeze(1) if index.dtype == torch.bool else index
        n = len(self.first)
        one, two = index[index < n], index[index >= n] - n
        if not len(two):
            return self.first.subset(one)
        return Joined(self.first.subset(one), self.second.subset(two))

    def fingerprint(self) -> str:
        both = f"{self.first.fingerprint()} {self.second.fingerprint()}"
        return hashlib.sha256(both.encode()).hexdigest()

    def read(self, requests: Iterable[Request], augment: Augment) -> Iterator[UInt8[Tensor, "b 3 h w"]]:
        n = len(self.first)
        for_first, for_second, whole = tee(requests, 3)

        def part(requests: Iterable[Request], low: int, high: int) -> Iterator[Request]:
            for index, draws in requests:
                at = ((index >= low) & (index < high)).nonzero().squeeze(1)
                if len(at):
                    yield index[at] - low, tuple(rows[at] for rows in draws)

        parts = (
            self.first.read(part(for_first, 0, n), augment),
            self.second.read(part(for_second, n, len(self)), augment),
        )
        for index, _ in whole:
            images = torch.empty(len(index), 3, *self.image_size, dtype=torch.uint8)
            for read, at in zip(parts, (index < n, index >= n), strict=True):
                if at.any():
                    images[at] = next(read)
            yield images
