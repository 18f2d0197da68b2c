"""Reads an image file as RGB pixels with Pillow, and crops it for evaluation."""

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
# The format is detected from the content. Formats that Pillow passes to other programs (EPS) are not included.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


LONGEST = 200  # times the shorter side: scaling a strip of one pixel could need gigabytes
BITS, PHOTOMETRIC = 258, 262  # TIFF tags
# EXIF tag of the camera's orientation, and the transposition that makes the picture upright.
ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def printable(path: str | bytes | Path) -> str:
    """A path as text for messages, whatever bytes it contains: on one line, without control characters."""
    text = os.fsdecode(path)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def read_picture(path: Path) -> Image.Image:
    """The file's pixels in RGB; the first frame of an animation.

    Grey-scale, palette, CMYK and 16-bit images are converted to 8-bit RGB; transparency is dropped, the colour under it stays. The
    picture is turned upright according to its EXIF orientation. JPEGs are decoded at full size, because their built-in scaling
    gives other pixels. Pictures with more pixels than Pillow's `Image.MAX_IMAGE_PIXELS` are refused, and those whose one side is
    more than `LONGEST` times the other.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged EXIF and similar
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # By a file object: otherwise Pillow maps an uncompressed TIFF into memory, with the sides that it has when upright.
            with open(path, "rb") as file, Image.open(file, formats=FORMATS) as picture:
                w, h = picture.size
                if max(w, h) > LONGEST * min(w, h):
                    raise ValueError(f"{w}x{h} pixels: one side is more than {LONGEST} times the other")
                return _upright(picture, _rgb(picture))
    except Exception as error:  # bytes that are not an image can raise any error
        why = error
        if isinstance(error, Image.UnidentifiedImageError):
            empty = os.path.getsize(path) == 0
            why = "the file is empty" if empty else f"it is not an image in one of the formats {', '.join(FORMATS)}"
        raise DataError(f"{printable(path)} cannot be decoded ({printable(str(why)[:300])})") from None


def _upright(picture: Image.Image, pixels: Image.Image) -> Image.Image:
    """`pixels`, rotated according to the EXIF orientation of the loaded file `picture`; damaged EXIF is ignored."""
    try:
        turn = UPRIGHT.get(picture.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF can raise any error, and the pixels are intact
        turn = None
    return pixels if turn is None else pixels.transpose(turn)


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I;16") or (
        picture.mode == "I" and picture.format in ("PNG", "PPM")
    ):  # older Pillow reads PNG as I
        tags = getattr(picture, "tag_v2", {})  # of a TIFF
        white = 2 ** tags.get(BITS, (16,))[0] - 1  # Pillow reads 12 bits as 16, too
        values = np.asarray(picture).clip(0, white).astype(np.int32)
        if tags.get(PHOTOMETRIC) == 0:  # 0 is white
            values = white - values
        grey = ((values * 255 + white // 2) // white).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if picture.mode in ("I", "F"):
        raise ValueError("grey values of 32 bits, whose value of white is unknown")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")  # a copy: the file may be closed


def default_resize(size: tuple[int, int]) -> int:
    """8/7 of the shorter side: 256 for 224."""
    return round(min(size) * 8 / 7)


def centred(picture: Image.Image, size: tuple[int, int], resize: int | None = None) -> Image.Image:
    """The centre crop of evaluation: scaled (bilinear) to just cover `size` with a margin, then cropped to `size`.

    Args:
        size: height and width.
        resize: `min(size)` with the margin; for a square `size`, the length that the picture's shorter side is scaled to.
            Default: 8/7 of `min(size)`; a picture that already has this size is returned unchanged.
    """
    h, w = size
    if resize is None:
        if picture.size == (w, h):
            return picture
        resize = default_resize(size)
    cover_h, cover_w = (max(round(side * resize / min(size)), side) for side in size)
    W, H = picture.size
    if W * cover_h >= H * cover_w:
        scaled = max(int(cover_h * W / H), cover_w), cover_h
    else:
        scaled = cover_w, max(int(cover_w * H / W), cover_h)
    if scaled != (W, H):
        picture = picture.resize(scaled, Image.Resampling.BILINEAR)
    left, top = round((scaled[0] - w) / 2), round((scaled[1] - h) / 2)
    return picture.crop((left, top, left + w, top + h))


def as_tensor(picture: Image.Image) -> UInt8[Tensor, "3 h w"]:
    """A picture as a tensor, channels first."""
    return torch.from_numpy(np.array(picture, np.uint8)).permute(2, 0, 1)


def as_picture(image: UInt8[Tensor, "3 h w"]) -> Image.Image:
    """A tensor, channels first, as a picture."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
