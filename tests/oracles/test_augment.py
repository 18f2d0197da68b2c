"""Every augmentation against a slow one, image by image: numpy, Pillow or float64; normalisation against float64."""

import numpy as np
import pytest
import torch
from PIL import Image

from letkd.data import Augment, CropFlip, ResizedCropFlip, RotateFlip
from letkd.data.augment import crop_flip, resized_crop_box, rotate_flip
from letkd.data.loader import normalise
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


@pytest.mark.parametrize("augment", [CropFlip(), CropFlip(mode="zero"), CropFlip(pad=1, flip=False), CropFlip(pad=0)])
def test_a_call_does_what_it_draws(augment):
    images = some_images(50, 8, 8)
    top, left, flip = augment.draw(50, torch.Generator().manual_seed(3))
    got = augment(images, top, left, flip)
    assert torch.equal(got, slow(images, top, left, flip, augment.pad, augment.mode))
    assert not torch.equal(got, augment(images, *augment.draw(50, torch.Generator().manual_seed(4))))


def test_draws_are_uniform():
    n = 20_000
    top, left, flip = CropFlip().draw(n, torch.Generator().manual_seed(0))
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
        augment = CropFlip(mode=mode)
        augment(images, *augment.draw(9, torch.Generator().manual_seed(0)))
    assert torch.equal(images, before)


def test_nothing_to_do_changes_nothing():
    images = some_images(9, 8, 8)
    assert torch.equal(CropFlip(pad=0, flip=False)(images), images)


def test_reflect_padding_needs_enough_pixels():
    with pytest.raises(DataError, match=r"reflect padding of 4 pixels on images of 9x4: .* smaller than both sides"):
        CropFlip(pad=4)(some_images(2, 9, 4))


def test_wrong_settings():
    with pytest.raises(DataError, match="pad=-1: the padding must be 0 pixels or more"):
        CropFlip(pad=-1)
    with pytest.raises(DataError, match="mode='mirror': choose 'reflect' or 'zero'"):
        CropFlip(mode="mirror")


def test_normalisation_against_float64():
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 3, 16, 16).contiguous()
    m, s = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (mean, std))
    x = normalise(images, mean, std)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.double(), (images.double() / 255 - m) / s, rtol=0, atol=1e-6)


def test_rotation_is_pillow_s():
    for h, w in ((64, 64), (33, 20)):
        images = some_images(40, h, w)
        degrees = torch.linspace(-20, 20, 40, dtype=torch.float64)
        fast = rotate_flip(images, degrees, flip=torch.arange(40) % 2 == 1)
        for k in range(40):
            slow = Image.fromarray(images[k].permute(1, 2, 0).numpy()).rotate(float(degrees[k]))
            slow = slow.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if k % 2 else slow
            same = (fast[k].permute(1, 2, 0).numpy() == np.asarray(slow)).all(axis=2)
            # Pillow counts in fixed point, so a pixel whose source lies on a border may come from the other side of it.
            assert same.mean() > 0.99, (k, h, w)


def test_right_angles_are_exact():
    images = some_images(5, 12, 12)
    turned = rotate_flip(
        images, torch.tensor([0.0, 90, 180, -90, 0], dtype=torch.float64), flip=torch.tensor([0, 0, 0, 0, 1]) == 1
    )
    expected = [
        images[0],
        images[1].rot90(1, (1, 2)),
        images[2].rot90(2, (1, 2)),
        images[3].rot90(-1, (1, 2)),
        images[4].flip(2),
    ]
    assert torch.equal(turned, torch.stack(expected))


def test_rotations_are_drawn_uniformly_and_done():
    n = 20_000
    degrees, flip = RotateFlip().draw(n, torch.Generator().manual_seed(0))
    assert degrees.abs().max() <= 20
    share = ((degrees + 20) / 4).long().clamp(0, 9).bincount(minlength=10) / n
    assert (share - 0.1).abs().max() < 5 * (0.09 / n) ** 0.5
    assert abs(flip.double().mean() - 0.5) < 5 * 0.5 / n**0.5
    images = some_images(8, 9, 9)
    assert torch.equal(RotateFlip()(images, degrees[:8], flip[:8]), rotate_flip(images, degrees[:8], flip=flip[:8]))
    assert not RotateFlip(flip=False).draw(99, torch.Generator())[1].any()
    with pytest.raises(DataError, match="degrees=-1: the largest angle must be from 0 to 180"):
        RotateFlip(degrees=-1)


def test_boxes_of_resized_crops_follow_the_definition():
    g = torch.Generator().manual_seed(0)
    shapes, places, _ = ResizedCropFlip().draw(2000, g)
    areas, lefts = [], []
    for w, h in ((500, 375), (60, 90)):
        for shape, place in zip(shapes, places, strict=True):
            left, top, right, bottom = resized_crop_box(w, h, shape, place, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
            assert 0 <= left < right <= w
            assert 0 <= top < bottom <= h
            fits = None
            for u, v in shape.tolist():  # the definition, in logarithms to base 2
                area = (0.08 + 0.92 * u) * w * h
                aspect = 2 ** (np.log2(3 / 4) + v * (np.log2(4 / 3) - np.log2(3 / 4)))
                cw, ch = np.rint((area * aspect) ** 0.5), np.rint((area / aspect) ** 0.5)
                if cw <= w and ch <= h:
                    fits = (cw, ch)
                    break
            assert fits == (right - left, bottom - top)
            areas.append((right - left) * (bottom - top) / (w * h))
            if right - left < w:
                lefts.append(left / (w - (right - left)))
    assert 0.075 < min(areas) < 0.12
    assert max(areas) > 0.9
    assert abs(np.mean(lefts) - 0.5) < 0.03


@pytest.mark.parametrize(
    ("size", "box"), [((300, 10), (143, 0, 156, 10)), ((10, 300), (0, 143, 10, 156)), ((1, 1), (0, 0, 1, 1))]
)
def test_an_image_too_long_for_every_try_gives_its_centre(size, box):
    shape = torch.ones(10, 2, dtype=torch.float64)  # the whole area, at the widest ratio
    place = torch.zeros(2, dtype=torch.float64)
    left, top, right, bottom = resized_crop_box(*size, shape, place, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    assert (left, top, right, bottom) == box


def triangle(image: np.ndarray, out: int, axis: int) -> np.ndarray:
    """Bilinear scaling that takes all pixels into account: a triangle as wide as an output pixel, at least two pixels."""
    n = image.shape[axis]
    step = n / out
    centre = (np.arange(out) + 0.5) * step
    weight = np.maximum(0, 1 - np.abs(np.arange(n) + 0.5 - centre[:, None]) / max(step, 1))
    weight /= weight.sum(axis=1, keepdims=True)
    return np.moveaxis(np.tensordot(weight, image, (1, axis)), 0, axis)


def smooth_picture(w: int, h: int) -> Image.Image:
    y, x = np.mgrid[:h, :w]
    return Image.fromarray(np.stack([x * 255 / w, y * 255 / h, 127 + 120 * np.sin(x / 5 + y / 9)], axis=2).astype(np.uint8))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("w", "h"), [(90, 60), (20, 31)])
def test_resized_crops_against_float64(w, h, flip):
    picture, augment = smooth_picture(w, h), ResizedCropFlip()
    shape, place, _ = augment.draw(1, torch.Generator().manual_seed(4))
    left, top, right, bottom = resized_crop_box(w, h, shape[0], place[0], scale=augment.scale, ratio=augment.ratio)
    cut = np.asarray(picture, np.float64)[top:bottom, left:right]
    expected = triangle(triangle(cut, 24, 0), 24, 1)
    expected = expected[:, ::-1] if flip else expected
    got = augment.picture(picture, shape[0], place[0], torch.tensor(flip), size=(24, 24), resize=99)
    assert np.abs(np.asarray(got, np.float64) - expected).max() <= 1.01  # each direction is rounded once


def test_resized_crops_in_memory_are_those_of_pictures():
    augment = ResizedCropFlip()
    draws = augment.draw(6, torch.Generator().manual_seed(0))
    images = some_images(6, 16, 16)
    got = augment(images, *draws)
    for k in range(6):
        picture = Image.fromarray(images[k].permute(1, 2, 0).numpy())
        one = augment.picture(picture, *(rows[k] for rows in draws), size=(16, 16), resize=16)
        assert np.array_equal(np.asarray(one), got[k].permute(1, 2, 0).numpy())
    assert augment(images[:0], *(rows[:0] for rows in draws)).shape == (0, 3, 16, 16)


@pytest.mark.parametrize(("w", "h"), [(90, 60), (60, 90), (20, 31), (48, 48)])
def test_the_view_of_evaluation_against_float64(w, h):
    picture = smooth_picture(w, h)
    long = {90: 72, 31: 74, 48: 48}[max(w, h)]  # 48 of the shorter side, the longer in proportion
    sw, sh = (long, 48) if w > h else (48, long)
    scaled = triangle(triangle(np.asarray(picture, np.float64), sh, 0), sw, 1)
    top, left = (sh - 42) // 2, (sw - 42) // 2
    got = np.asarray(Augment().picture(picture, size=(42, 42), resize=48), np.float64)
    assert np.abs(got - scaled[top : top + 42, left : left + 42]).max() <= 1.01
