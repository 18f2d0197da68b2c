"""Pillow's operations, as RandAugment and TrivialAugment use them, and a check that nothing leaves its device."""

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def transformed(picture: Image.Image, *matrix: float) -> Image.Image:
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


PILLOW = {
    "identity": lambda picture, level: picture,
    "shear_x": lambda picture, level: transformed(picture, 1, level, 0, 0, 1, 0),
    "shear_y": lambda picture, level: transformed(picture, 1, 0, 0, level, 1, 0),
    "translate_x": lambda picture, level: transformed(picture, 1, 0, -int(level), 0, 1, 0),
    "translate_y": lambda picture, level: transformed(picture, 1, 0, 0, 0, 1, -int(level)),
    "rotate": lambda picture, level: picture.rotate(level, Image.Resampling.NEAREST),
    "color": lambda picture, level: ImageEnhance.Color(picture).enhance(1 + level),
    "sharpness": lambda picture, level: ImageEnhance.Sharpness(picture).enhance(1 + level),
    "brightness": lambda picture, level: ImageEnhance.Brightness(picture).enhance(1 + level),
    "contrast": lambda picture, level: ImageEnhance.Contrast(picture).enhance(1 + level),
    "posterize": lambda picture, level: ImageOps.posterize(picture, 8 - round(abs(level))),
    "solarize": lambda picture, level: ImageOps.solarize(picture, 255 - abs(level)),
    "autocontrast": lambda picture, level: ImageOps.autocontrast(picture),
    "equalize": lambda picture, level: ImageOps.equalize(picture),
}


def by_pillow(image: torch.Tensor, name: str, level: float) -> torch.Tensor:
    picture = PILLOW[name](Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()), level)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


class OneDevice(TorchDispatchMode):
    """Refuses operations between tensors of different devices, as a GPU does, other than copies."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        devices = {part.device.type for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor) and part.ndim}
        assert len(devices) <= 1 or str(function).startswith(("aten._to_copy", "aten.copy_")), f"{function} on {devices}"
        return function(*args, **(kwargs or {}))
