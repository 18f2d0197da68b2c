"""A split of image files, decoded on demand."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from letkd.data.augment import Augment
from letkd.data.base import Request, Split
from letkd.data.pictures import as_tensor, read_picture
from letkd.data.workers import in_workers
from letkd.errors import DataError
from letkd.progress import bar

BATCH = 256


@dataclass(frozen=True, eq=False)
class FileSplit:
    """Image files and their labels; the same interface as `Split`.

    Args:
        root: the folder that `paths` are relative to.
        paths: encoded, in one numpy array of bytes, which is compact and not copied by workers.
        lengths: sizes of the files in bytes, for the fingerprint and to find duplicates.
        labels: int64 `[n]`, 0 or more; −1 for an image without a label.
        size: height and width of the images that are read.
        resize: as for `letkd.data.pictures.centred`.
        workers: processes that decode images; 0 decodes in this process.
    """

    root: Path
    paths: np.ndarray
    lengths: np.ndarray
    labels: Tensor
    size: tuple[int, int]
    resize: int | None
    workers: int

    def __post_init__(self):
        if not len(self.paths) == len(self.lengths) == len(self.labels):
            raise DataError(f"a split has {len(self.paths)} files but {len(self.labels)} labels; it needs one label per file")

    @property
    def image_size(self) -> tuple[int, int]:
        return self.size

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Int64[Tensor, " m"] | Bool[Tensor, " n"]) -> "FileSplit":
        at = index.numpy()
        parts = self.paths[at], self.lengths[at], self.labels[index]
        return FileSplit(self.root, *parts, size=self.size, resize=self.resize, workers=self.workers)

    def path(self, i: int) -> Path:
        """Path of image `i`."""
        return self.root / os.fsdecode(self.paths[i])

    def read(self, requests: Iterable[Request], augment: Augment) -> Iterator[UInt8[Tensor, "b 3 h w"]]:
        # As arrays: each tensor sent to a worker would need a file descriptor.
        sent = ((index.numpy(), [rows.numpy() for rows in draws]) for index, draws in requests)
        yield from in_workers(partial(self._decode, augment), sent, workers=self.workers)

    def _decode(self, augment: Augment, request: tuple[np.ndarray, list[np.ndarray]]) -> UInt8[Tensor, "b 3 h w"]:
        index, draws = request[0], [torch.from_numpy(rows) for rows in request[1]]
        images = torch.empty(len(index), 3, *self.size, dtype=torch.uint8)
        for k, i in enumerate(index):
            try:
                picture = read_picture(self.path(i))
            except DataError as error:
                raise DataError(
                    f"{error}; replace the file, or skip such files with `data.corrupt=skip` (`letkd data check` lists them)"
                ) from None
            images[k] = as_tensor(augment.picture(picture, *(rows[k] for rows in draws), size=self.size, resize=self.resize))
        return augment.batch(images, *draws)

    def fingerprint(self) -> str:
        """SHA-256 over names, lengths, labels, `size` and `resize`; the files' content is not read. Computed once."""
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        digest = hashlib.sha256(f"files 3 {self.size} {self.resize}\n".encode())  # raise the number if decoding changes pixels
        for path, length, label in zip(self.paths.tolist(), self.lengths.tolist(), self.labels.tolist(), strict=True):
            digest.update(b"%s\0%d %d\n" % (path, length, label))
        return digest.hexdigest()

    def in_memory(self, description: str) -> Split:
        """All images decoded, with the centre crop of evaluation: n · 3 · h · w bytes."""
        images = torch.empty(len(self), 3, *self.size, dtype=torch.uint8)
        at = 0
        with bar(description, len(self)) as tick:
            for part in self.read(((index, ()) for index in torch.arange(len(self)).split(BATCH)), Augment()):
                images[at : at + len(part)] = part
                at += len(part)
                tick(advance=len(part))
        return Split(images, self.labels, self.resize)
