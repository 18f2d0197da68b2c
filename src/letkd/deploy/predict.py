"""Classes of image files, by a shipped model alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from letkd.deploy.runners import Runner
from letkd.errors import DataError

BATCH = 32


@dataclass(frozen=True)
class Prediction:
    """The first classes of one image with their probabilities, best first; or, where it could not be read, why."""

    path: Path
    top: list[tuple[str, float]]
    error: str = ""


def find_images(paths: Iterable[Path]) -> list[Path]:
    """The files named, and for every folder the images in it and below, by name."""
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    found = []
    for path in paths:
        if not path.exists():
            raise DataError(f"there is no image or folder {path}; check the path")
        inside = (
            sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes and file.is_file())
            if path.is_dir()
            else [path]
        )
        if not inside:
            raise DataError(f"the folder {path} has no images that Pillow could read")
        found += inside
    return found


def read_image(path: Path, size: tuple[int, int] | None) -> UInt8[Tensor, "3 h w"]:
    """An image file as RGB from 0 to 255, turned as its EXIF says, scaled to the size's shorter fit and cut out of the middle.

    Args:
        size: height and width; None for the image's own.
    """
    with Image.open(path) as file:
        image = _as_rgb(ImageOps.exif_transpose(file))
    if size is not None and (image.height, image.width) != size:
        image = ImageOps.fit(image, (size[1], size[0]), method=Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255 and not scale
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def predict(model: Runner, paths: Iterable[Path], *, top: int = 5) -> Iterator[Prediction]:
    """The classes of image files, in their order; a file that cannot be read is told as such, and the others go on.

    Args:
        top: how many classes of each.
    """
    batch: list[tuple[Path, Tensor | str]] = []
    for path in paths:
        try:
            batch.append((path, read_image(path, model.facts.size)))
        except Exception as error:  # damaged files make Pillow's readers fail in many ways
            batch.append((path, _why(error)))
        if len(batch) == BATCH:
            yield from _classify(model, batch, top)
            batch = []
    yield from _classify(model, batch, top)


def _classify(model: Runner, batch: list[tuple[Path, Tensor | str]], top: int) -> Iterator[Prediction]:
    images = [image for _, image in batch if isinstance(image, Tensor)]
    same = len({image.shape for image in images}) == 1  # without a size of its own the model takes images one by one
    groups = [torch.stack(images)] if same else [image[None] for image in images]
    rows = iter([row for group in groups for row in model(group).float().softmax(dim=1)])
    for path, image in batch:
        if isinstance(image, str):
            yield Prediction(path, [], image)
            continue
        best = next(rows).topk(min(top, model.facts.num_classes))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        yield Prediction(path, [(model.facts.name_of(label), probability) for label, probability in pairs])


def _why(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
