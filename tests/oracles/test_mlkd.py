"""MLKD against loops in float64, and its strong views against what each operation says."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from letkd.data.augment import Augment, CropFlip, rotate_flip
from letkd.data.strong import EACH, GREY, OPERATIONS, Strong, strong_view
from letkd.errors import DataError, LetkdError
from letkd.methods import KD, MLKD, Method
from letkd.methods.base import View
from letkd.methods.mlkd import mlkd_terms
from tests.support.pair import a_distiller, a_stream

b, C = 7, 5  # odd, so that a median is one of the values


def rows(z: Tensor, T: float) -> list[list[float]]:
    powers = [[math.exp(v / T) for v in row] for row in z.tolist()]
    return [[v / sum(row) for v in row] for row in powers]


def kl(s: Tensor, t: Tensor, T: float) -> float:
    pairs = zip(rows(s, T), rows(t, T), strict=True)
    return T**2 * sum(p * math.log(p / q) for q_S, q_T in pairs for q, p in zip(q_S, q_T, strict=True)) / len(s)


def gram(q: list[list[float]]) -> list[list[float]]:
    return [[sum(x * y for x, y in zip(one, two, strict=True)) for two in q] for one in q]


def difference(one: list[list[float]], two: list[list[float]]) -> float:
    """Squared difference of the Gram matrices, divided by their size."""
    G, H = gram(one), gram(two)
    return sum((x - y) ** 2 for r, s in zip(G, H, strict=True) for x, y in zip(r, s, strict=True)) / len(G)


def columns(q: list[list[float]]) -> list[list[float]]:
    return [list(column) for column in zip(*q, strict=True)]


@pytest.mark.parametrize(("n", "T"), [(b, 4.0), (6, 1.0)])
def test_mlkd_is_its_authors_sum(n, T):
    s, t, strong_s, strong_t = torch.randn(4, n, C, dtype=torch.float64)
    p = rows(t, 1.0)
    largest, summed = [max(row) for row in p], [sum(column) for column in columns(p)]
    mu, nu = (sum(v <= statistics.median(values) for v in values) / len(values) for values in (largest, summed))
    every = (T, 3, 5, 2, 6)
    instance = (
        mu * sum(kl(s, t, k) for k in every) + sum(kl(strong_s, strong_t, k) for k in (T, 3, 5)) + kl(s, t, 2) + kl(s, t, 6)
    )
    by_class = nu * sum(difference(columns(rows(s, k)), columns(rows(t, k))) for k in every)
    by_batch = mu * sum(difference(rows(s, k), rows(t, k)) for k in every)
    found = [term.item() for term in mlkd_terms(s, t, strong_s, strong_t, T)]
    assert found == pytest.approx([instance, by_class, by_batch], rel=1e-10)
    assert mu == (0.5 if n == 6 else 4 / 7)


def test_mlkd_of_equal_predictions_is_zero_and_a_shift_of_an_images_logits_has_no_effect():
    s, t, strong_s, strong_t = torch.randn(4, b, C, dtype=torch.float64)
    assert all(abs(term.item()) < 1e-12 for term in mlkd_terms(t, t, strong_t, strong_t))
    shift = torch.randn(b, 1, dtype=torch.float64)
    torch.testing.assert_close(mlkd_terms(s + shift, t, strong_s - shift, strong_t), mlkd_terms(s, t, strong_s, strong_t))


def test_the_networks_see_each_view_by_itself():
    """As two forwards would: BN takes its statistics from each view, first of the one, then of the other."""
    distiller, twin = (a_distiller(MLKD(2.0)).train() for _ in range(2))
    batch = a_stream()[0]
    step = distiller(batch)
    weak, strong = twin.student(batch.x), twin.student(batch.second)
    assert torch.equal(step.logits, weak)
    torch.testing.assert_close(step.terms["ce"], torch.nn.functional.cross_entropy(weak, batch.y))
    torch.testing.assert_close(step.terms["mlkd/ce"], torch.nn.functional.cross_entropy(strong, batch.y))
    expected = mlkd_terms(weak, twin.teacher(batch.x), strong, twin.teacher(batch.second), 2.0)
    torch.testing.assert_close([step.terms[f"mlkd/{name}"] for name in ("instance", "class", "batch")], list(expected))
    for name, buffer in twin.student.named_buffers():
        assert torch.equal(distiller.student.get_buffer(name), buffer), name


def test_a_batch_with_one_view_is_refused_and_other_methods_leave_the_second_alone():
    batch = a_stream()[0]
    with pytest.raises(DataError, match="'mlkd' compares two views of every image, but the batch has only one"):
        a_distiller(MLKD())(replace(batch, second=None))
    one, two = a_distiller(KD()), a_distiller(KD())
    assert one(batch).loss == two(replace(batch, second=None)).loss


def test_a_cache_is_refused():
    with pytest.raises(LetkdError, match="stores one view of every image per epoch, but 'mlkd' needs two"):
        a_distiller([MLKD(), KD()]).lessons()


def test_a_method_that_does_not_ask_for_a_second_view_has_none():
    class Careless(Method):
        name, paper, loss, formulae = "careless", "", "", ()

        def terms(self, view: View) -> dict[str, Tensor]:
            return {"careless": view.of_second().student["logits"].mean()}

    with pytest.raises(LetkdError, match="set two_views = True"):
        a_distiller(Careless())(a_stream()[0])


# ------------------------------------------------------------------------------------------------ strong views

NOWHERE = torch.zeros(3, dtype=torch.float64)  # a square of no side


def an_image(h: int = 12, w: int = 16) -> Tensor:
    return torch.randint(256, (3, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def after(name: str, value: float, image: Tensor, square: Tensor = NOWHERE) -> Tensor:
    k = [operation.name for operation in OPERATIONS].index(name)
    low, high = OPERATIONS[k].low, OPERATIONS[k].high
    share = torch.tensor([(value - low) / (high - low)], dtype=torch.float64)
    return strong_view(image, torch.tensor([k]), share, square)


def test_there_are_the_fourteen_operations_with_their_ranges():
    ranges = {operation.name: (operation.low, operation.high) for operation in OPERATIONS}
    assert len(ranges) == len(OPERATIONS) == 14
    for name in ("brightness", "color", "contrast", "sharpness"):
        assert ranges[name] == (0.05, 0.95)
    for name in ("shear-x", "shear-y", "translate-x", "translate-y"):
        assert ranges[name] == (-0.3, 0.3)
    assert (ranges["rotate"], ranges["posterize"], ranges["solarize"]) == ((-30, 30), (4, 8), (0, 256))


def test_operations_without_effect():
    image = an_image()
    for name, value in (
        ("identity", 0.5),
        ("rotate", 0),
        ("shear-x", 0),
        ("translate-y", 0),
        ("posterize", 8),
        ("solarize", 256),
    ):
        assert torch.equal(after(name, value, image), image), name


def test_operations_by_pixel():
    image = an_image()
    assert (after("brightness", 0.5, image).int() - image.int() // 2).abs().max() <= 1
    grey = torch.from_numpy(np.array(Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L"))).int()
    assert (after("color", 0.5, image).int() - (image.int() + grey) // 2).abs().max() <= 1
    assert torch.equal(after("posterize", 4.5, image), image & 0b11110000)
    assert torch.equal(after("solarize", 100, image), torch.where(image < 100, image, 255 - image))
    stretched = after("autocontrast", 0, image // 2 + 20)
    assert (stretched.amin(), stretched.amax()) == (0, 255)


def test_operations_that_move_pixels():
    image = an_image()
    moved = after("translate-x", 0.25, image)  # a quarter of 16
    assert torch.equal(moved[:, :, :12], image[:, :, 4:])
    assert not moved[:, :, 12:].any()
    assert torch.equal(after("translate-y", -0.25, image)[:, 3:], image[:, :9])
    turn = torch.tensor([17.0], dtype=torch.float64)
    assert torch.equal(after("rotate", 17, image), rotate_flip(image[None], turn, flip=torch.tensor([False]))[0])
    sheared = after("shear-x", 0.3, image)
    for y in range(12):
        for x in range(16):
            source = math.floor(x + 0.5 + 0.3 * (y + 0.5))
            expected = image[:, y, source] if source < 16 else torch.zeros(3, dtype=torch.uint8)
            assert torch.equal(sheared[:, y, x], expected)


def test_the_square_is_grey_and_cut_off_at_the_border():
    image = an_image()
    view = after("identity", 0.5, image, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))  # side 4, centre (6, 0)
    inside = torch.zeros(12, 16, dtype=torch.bool)
    inside[4:8, 0:2] = True
    assert torch.equal(view[:, inside], torch.tensor(GREY, dtype=torch.uint8)[:, None].expand(3, 8))
    assert torch.equal(view[:, ~inside], image[:, ~inside])


def test_a_strong_view_is_a_function_of_its_own_draws():
    """So that a part of a batch gets what it would get in the whole; after the weaker augmentation with its own draws."""
    images = torch.stack([an_image()] * 6)
    strong = Strong(CropFlip(pad=2))
    draws = strong.draw(6, torch.Generator().manual_seed(0))
    whole = strong(images, *draws)
    assert [tuple(draw.shape) for draw in draws[-3:]] == [(6, EACH), (6, EACH), (6, 3)]
    assert torch.equal(strong(images[2:5], *(draw[2:5] for draw in draws)), whole[2:5])
    assert len({tuple(view.flatten().tolist()) for view in whole}) == 6
    weak = CropFlip(pad=2)(images, *draws[:-3])
    assert torch.equal(whole, Strong(Augment())(weak, *draws[-3:]))
    assert torch.equal(strong.batch(images, *draws), whole)
    assert strong(images[:0], *(draw[:0] for draw in draws)).shape == (0, 3, 12, 16)
