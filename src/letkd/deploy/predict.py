"""Classification of image files with a shipped model."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from letkd.data.listing import files_below
from letkd.data.pictures import SUFFIXES, as_tensor, centred, printable, read_picture
from letkd.deploy.runners import Runner
from letkd.distiller.facts import Facts
from letkd.errors import DataError

BATCH = 32
PIXELS = BATCH * 512 * 512  # per batch: large images come in smaller batches


@dataclass(frozen=True)
class Prediction:
    """The top classes of one image with their probabilities, best first; `error` says why the image could not be read."""

    path: Path
    top: list[tuple[str, float]]
    error: str = ""


def find_images(paths: Iterable[Path]) -> list[Path]:
    """The given files, and for each folder the images in it and its sub-folders, sorted by name; hidden ones are left out."""
    found = []
    for path in paths:
        if not path.exists():
            raise DataError(f"there is no image or folder {printable(path)}; check the path")
        inside = [path]
        if path.is_dir():
            files = (Path(os.fsdecode(name)) for name, _ in files_below(path))
            inside = sorted(file for file in files if file.suffix.lower() in SUFFIXES and file.is_file())
        if not inside:
            raise DataError(f"the folder {printable(path)} has no images (files ending in {', '.join(SUFFIXES)})")
        found += inside
    return found


def read_image(path: Path, facts: Facts) -> UInt8[Tensor, "3 h w"]:
    """An image file, preprocessed as in evaluation; at its own size if the facts contain no size."""
    picture = read_picture(path)
    if facts.size is None:
        return as_tensor(picture)
    return as_tensor(centred(picture, facts.size, facts.resize))


def predict(model: Runner, paths: Iterable[Path], *, top: int = 5) -> Iterator[Prediction]:
    """Classify image files, in order. An unreadable file gives a prediction with `error` set.

    Args:
        top: number of classes per image.
    """
    h, w = model.facts.size or (1, 1)
    largest = max(1, min(BATCH, PIXELS // (h * w)))
    batch: list[tuple[Path, Tensor | str]] = []
    for path in paths:
        try:
            batch.append((path, read_image(path, model.facts)))
        except DataError as error:
            batch.append((path, str(error)))
        if len(batch) == largest:
            yield from _classify(model, batch, top)
            batch = []
    yield from _classify(model, batch, top)


def _classify(model: Runner, batch: list[tuple[Path, Tensor | str]], top: int) -> Iterator[Prediction]:
    images = [image for _, image in batch if isinstance(image, Tensor)]
    same = len({image.shape for image in images}) == 1  # if the sizes differ, the model takes images one by one
    groups = [torch.stack(images)] if same else [image[None] for image in images]
    rows = iter([row for group in groups for row in model(group).float().softmax(dim=1)])
    for path, image in batch:
        if isinstance(image, str):
            yield Prediction(path, [], image)
            continue
        best = next(rows).topk(min(top, model.facts.num_classes))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        yield Prediction(path, [(model.facts.name_of(label), probability) for label, probability in pairs])
