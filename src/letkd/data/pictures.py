"""One image file to RGB pixels with Pillow, and the views that are cut out of it."""

import os
import warnings
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from letkd.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
# What a file is, is told by its content. Formats that Pillow hands to other programs (EPS) are not among them.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


def shown(path: str | bytes | Path) -> str:
    """A path as a message can print it, whatever bytes its name has."""
    return os.fsdecode(path).encode("utf-8", "backslashreplace").decode()


def read_picture(path: Path) -> Image.Image:
    """The file's pixels in RGB; of an animation the first frame.

    Grey-scale, palette, CMYK and 16-bit images become RGB of 8 bits; transparency is dropped, the colour under it stays. The
    orientation that a camera noted in EXIF is left alone, as the field's loaders leave it. JPEGs are decoded at
    full size: their own fast scaling would give other pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on damaged EXIF and the like, which nobody reads here
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as picture:
                return _rgb(picture)
    except Exception as error:  # bytes that are no image can fail in any way at all
        why = "it is no image of a kind that is read here" if isinstance(error, Image.UnidentifiedImageError) else error
        raise DataError(f"{shown(path)} cannot be decoded ({shown(str(why))})") from None


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG"):  # older Pillow reads these as I
        values = np.asarray(picture).astype(np.int64)
        grey = ((values * 255 + 32767) // 65535).clip(0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if picture.mode in ("I", "F"):
        raise ValueError("grey values of 32 bits, of which nobody knows what is white")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")  # a copy: the file may be closed


def centred(picture: Image.Image, size: int, resize: int) -> Image.Image:
    """The view of evaluation: the shorter side scaled to `resize` (bilinear), then `size` x `size` from the centre."""
    w, h = picture.size
    short = min(w, h)
    if short != resize:
        w, h = (max(int(resize * side / short), resize) for side in (w, h))
        picture = picture.resize((w, h), Image.Resampling.BILINEAR)
    left, top = round((w - size) / 2), round((h - size) / 2)
    return picture.crop((left, top, left + size, top + size))


def as_tensor(picture: Image.Image) -> UInt8[Tensor, "3 h w"]:
    """Channels first."""
    return torch.from_numpy(np.array(picture, np.uint8)).permute(2, 0, 1)


def as_picture(image: UInt8[Tensor, "3 h w"]) -> Image.Image:
    """The other way round."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
