"""Crops and flips of a batch against numpy's padding, image by image; normalisation against float64."""

import numpy as np
import pytest
import torch

from letkd.data import Augment
from letkd.data.augment import crop_flip
from letkd.data.base import normalise
from letkd.errors import DataError


def some_images(b: int, h: int, w: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (b, 3, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def slow(images, top, left, flip, pad, mode):
    """One image at a time: pad, cut, mirror."""
    out = []
    for image, y, x, f in zip(images.numpy(), top.tolist(), left.tolist(), flip.tolist(), strict=True):
        how = {"mode": "reflect"} if mode == "reflect" else {"mode": "constant", "constant_values": 0}
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), **how)
        h, w = image.shape[-2:]
        cut = padded[:, y : y + h, x : x + w]
        out.append(cut[:, :, ::-1] if f else cut)
    return torch.from_numpy(np.stack(out))


@pytest.mark.parametrize("mode", ["reflect", "zero"])
@pytest.mark.parametrize(("h", "w", "pad"), [(6, 6, 2), (5, 8, 4), (7, 3, 2), (4, 4, 0), (32, 32, 4)])
def test_every_offset_with_and_without_flip(mode, h, w, pad):
    top, left, flip = torch.cartesian_prod(torch.arange(2 * pad + 1), torch.arange(2 * pad + 1), torch.arange(2)).unbind(1)
    images = some_images(len(top), h, w)
    fast = crop_flip(images, top, left, flip=flip.bool(), pad=pad, mode=mode)
    assert fast.dtype == torch.uint8
    assert torch.equal(fast, slow(images, top, left, flip, pad, mode))


def test_zero_padding_wider_than_the_image():
    top, left, flip = torch.cartesian_prod(torch.arange(11), torch.arange(11), torch.arange(2)).unbind(1)
    images = some_images(len(top), 3, 4)
    fast = crop_flip(images, top, left, flip=flip.bool(), pad=5, mode="zero")
    assert torch.equal(fast, slow(images, top, left, flip, 5, "zero"))


@pytest.mark.parametrize("augment", [Augment(), Augment(mode="zero"), Augment(pad=1, flip=False), Augment(pad=0)])
def test_a_call_does_what_it_draws(augment):
    images = some_images(50, 8, 8)
    top, left, flip = augment.draw(50, torch.Generator().manual_seed(3))
    got = augment(images, torch.Generator().manual_seed(3))
    assert torch.equal(got, slow(images, top, left, flip, augment.pad, augment.mode))
    assert not torch.equal(got, augment(images, torch.Generator().manual_seed(4)))


def test_draws_are_uniform():
    n = 20_000
    top, left, flip = Augment().draw(n, torch.Generator().manual_seed(0))
    for offset in (top, left):
        share = offset.bincount(minlength=9) / n
        assert len(share) == 9
        assert (share - 1 / 9).abs().max() < 5 * (1 / 9 * 8 / 9 / n) ** 0.5
    assert abs(flip.double().mean() - 0.5) < 5 * 0.5 / n**0.5
    together = torch.stack([top, left, flip.long()]).double()
    assert (torch.corrcoef(together) - torch.eye(3)).abs().max() < 5 / n**0.5


def test_the_images_given_stay_as_they_were():
    images = some_images(9, 8, 8)
    before = images.clone()
    for mode in ("reflect", "zero"):
        Augment(mode=mode)(images, torch.Generator().manual_seed(0))
    assert torch.equal(images, before)


def test_nothing_to_do_changes_nothing():
    images = some_images(9, 8, 8)
    assert torch.equal(Augment(pad=0, flip=False)(images, torch.Generator()), images)


def test_reflect_padding_needs_enough_pixels():
    with pytest.raises(DataError, match=r"reflect padding of 4 pixels on images of 9x4: .* smaller than both sides"):
        Augment(pad=4)(some_images(2, 9, 4), torch.Generator())


def test_wrong_settings():
    with pytest.raises(DataError, match="pad=-1: the padding is a number of pixels"):
        Augment(pad=-1)
    with pytest.raises(DataError, match="mode='mirror': there are 'reflect' and 'zero'"):
        Augment(mode="mirror")


def test_normalisation_against_float64():
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 3, 16, 16).contiguous()
    m, s = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (mean, std))
    x = normalise(images, mean, std)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.double(), (images.double() / 255 - m) / s, rtol=0, atol=1e-6)
