"""Every operation of RandAugment and TrivialAugment against Pillow, image by image: all of them agree exactly."""

import pytest
import torch

from letkd.data.operations import OPERATIONS, operate
from tests.support.pillow import PILLOW, OneDevice, by_pillow

LARGEST = {"translate_x": 32, "translate_y": 32, "rotate": 180, "posterize": 7, "solarize": 255}  # 0.99 for the others


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


@pytest.mark.parametrize("name", OPERATIONS)
def test_images_on_another_device_are_neither_moved_nor_read_back(name):
    """On the meta device, whose tensors have no values that could be read."""
    operation, level = torch.full((4,), OPERATIONS.index(name)), torch.full((4,), 0.5, dtype=torch.float64)
    with OneDevice():
        got = operate(torch.empty(4, 3, 8, 8, dtype=torch.uint8, device="meta"), operation, level)
    assert got.device.type == "meta"
    assert got.shape == (4, 3, 8, 8)
