"""Every operation of RandAugment and TrivialAugment against Pillow, image by image: all of them agree exactly."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from letkd.data.operations import OPERATIONS, operate


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
LARGEST = {"translate_x": 32, "translate_y": 32, "rotate": 180, "posterize": 7, "solarize": 255}  # 0.99 for the others


def by_pillow(image: torch.Tensor, name: str, level: float) -> torch.Tensor:
    picture = PILLOW[name](Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()), level)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def some_images(b: int, h: int, w: int) -> torch.Tensor:
    """Of noise, of few levels, dark, flat and smooth by turns."""
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (b, 3, h, w), dtype=torch.uint8, generator=g)
    images[1::5] = images[1::5] // 64 * 50
    images[2::5] = images[2::5] // 9 + 20
    images[3::5] = torch.tensor([7, 200, 255], dtype=torch.uint8)[:, None, None]
    images[4::5] = (torch.arange(h)[:, None] * 3 + torch.arange(w) * 5).clamp(max=255).to(torch.uint8)
    return images


def test_pillow_defines_every_operation():
    assert set(PILLOW) == set(OPERATIONS)


@pytest.mark.parametrize(("h", "w"), [(32, 32), (33, 20), (5, 40), (2, 9), (1, 1)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_pillow_s_to_the_last_bit(name, h, w):
    b = 40
    images = some_images(b, h, w)
    level = LARGEST.get(name, 0.99) * torch.linspace(-1, 1, b, dtype=torch.float64)
    got = operate(images, torch.full((b,), OPERATIONS.index(name)), level)
    assert got.dtype == torch.uint8
    for k in range(b):
        assert torch.equal(got[k], by_pillow(images[k], name, float(level[k]))), (k, float(level[k]))


def test_every_image_of_a_batch_gets_its_own_operation():
    b = 6 * len(OPERATIONS)
    images, before = some_images(b, 12, 17), some_images(b, 12, 17)
    g = torch.Generator().manual_seed(1)
    operation = torch.randint(len(OPERATIONS), (b,), generator=g)
    level = 1.8 * torch.rand(b, generator=g, dtype=torch.float64) - 0.9
    got = operate(images, operation, level)
    assert torch.equal(images, before)
    for k in range(b):
        assert torch.equal(got[k], by_pillow(images[k], OPERATIONS[operation[k]], float(level[k]))), k
    assert operate(images[:0], operation[:0], level[:0]).shape == (0, 3, 12, 17)


class OneDevice(TorchDispatchMode):
    """Refuses operations between tensors of different devices, as a GPU does, other than copies."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        devices = {part.device.type for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor) and part.ndim}
        assert len(devices) <= 1 or str(function).startswith(("aten._to_copy", "aten.copy_")), f"{function} on {devices}"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPERATIONS)
def test_images_on_another_device_are_neither_moved_nor_read_back(name):
    """On the meta device, whose tensors have no values that could be read."""
    operation, level = torch.full((4,), OPERATIONS.index(name)), torch.full((4,), 0.5, dtype=torch.float64)
    with OneDevice():
        got = operate(torch.empty(4, 3, 8, 8, dtype=torch.uint8, device="meta"), operation, level)
    assert got.device.type == "meta"
    assert got.shape == (4, 3, 8, 8)
