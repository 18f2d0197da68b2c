"""Mixing, erasing, the policies' draws and label smoothing against slow definitions, image by image."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from letkd.batch import Batch
from letkd.data import Augment, Chain, CropFlip, Erase, Loader, Mix, RandAugment, ResizedCropFlip, Split, TrivialAugment
from letkd.data.operations import OPERATIONS
from letkd.distiller import Distiller
from letkd.errors import DataError, LetkdError, UnsupportedPair
from letkd.methods import CRD, DKD, KD, TDD, letkd1, letkd2
from letkd.methods.dkd import dkd_loss
from tests.support.pair import a_distiller, a_student
from tests.support.pillow import OneDevice, by_pillow

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


def a_split(n: int, h: int = 8, w: int = 6) -> Split:
    g = torch.Generator().manual_seed(n)
    return Split(torch.randint(0, 256, (n, 3, h, w), dtype=torch.uint8, generator=g), torch.randint(5, (n,), generator=g))


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixed_batches_by_loops(kind):
    """Each image with the one before it; y has the larger share, which for CutMix is that of the pixels."""
    split, shares = a_split(30), []
    plain, mixed = (Loader(split, 7, mean=MEAN, std=STD, shuffle=True, mix=mix) for mix in (None, Mix(kind)))
    for epoch in range(1, 6):
        plain.set_epoch(epoch)
        mixed.set_epoch(epoch)
        for whole, batch in zip(plain, mixed, strict=True):
            assert torch.equal(batch.y, whole.y)
            assert torch.equal(batch.index, whole.index)
            assert 0.5 <= batch.lam <= 1
            shares.append(batch.lam)
            b = len(batch.y)
            for i in range(b):
                own, other = whole.x[i], whole.x[(i - 1) % b]
                assert batch.y2[i] == whole.y[(i - 1) % b]
                if kind == "mixup":
                    expected = batch.lam * own.double() + (1 - batch.lam) * other.double()
                    torch.testing.assert_close(batch.x[i].double(), expected, rtol=0, atol=1e-5)
                elif b > 1:
                    same, taken = ((batch.x[i] == image).all(dim=0) for image in (own, other))
                    assert (same | taken).all()
                    assert same.double().mean() == pytest.approx(batch.lam)
                    assert is_box(same) or is_box(~same)
    assert len({round(share, 6) for share in shares}) > 5


def is_box(mask: torch.Tensor) -> bool:
    at = mask.nonzero()
    return not len(at) or len(at) == int((at.amax(dim=0) - at.amin(dim=0) + 1).prod())


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_come_from_beta(alpha):
    g = torch.Generator().manual_seed(0)
    drawn = np.array([Mix("mixup", alpha).draw(8, 8, g)[0] for _ in range(3000)])
    assert abs(drawn.mean() - 0.5) < 5 * drawn.std() / 3000**0.5
    assert drawn.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.15)


@pytest.mark.slow
def test_boxes_of_cutmix_follow_the_definition():
    g, draws, inside = torch.Generator().manual_seed(0), [], 0
    for _ in range(2000):
        share, (rows, cols) = Mix("cutmix").draw(20, 30, g)
        height, width = rows.stop - rows.start, cols.stop - cols.start
        assert 0 <= rows.start <= rows.stop <= 20
        assert 0 <= cols.start <= cols.stop <= 30
        assert share == pytest.approx(1 - height * width / 600)
        if rows.start > 0 and rows.stop < 20 and cols.start > 0 and cols.stop < 30:
            inside += 1
            assert abs(width - 1.5 * height) <= 3  # of the image's shape, each half side rounded down
        draws.append((share, (rows.start + rows.stop) / 2, (cols.start + cols.stop) / 2))
    assert inside > 100
    share, y, x = np.array(draws).T
    assert abs(y.mean() - 10) < 0.7
    assert abs(x.mean() - 15) < 1.0
    assert 0.5 < share.mean() < 0.75  # more than 1/2: what lies beyond the border is not pasted


def test_wrong_settings():
    with pytest.raises(DataError, match="mixed by 'blur': choose 'mixup' or 'cutmix'"):
        Mix("blur")
    with pytest.raises(DataError, match="alpha=0: it must be greater than 0"):
        Mix("mixup", 0)
    with pytest.raises(DataError, match=r"p=1\.5: the probability must be from 0 to 1"):
        Erase(1.5)
    with pytest.raises(DataError, match="operations=0: the number of operations must be 1 or more"):
        RandAugment(operations=0)
    with pytest.raises(DataError, match="magnitude=31: the strength must be from 0 to 30"):
        RandAugment(magnitude=31)
    with pytest.raises(DataError, match=r"views=2 and cutmix: a mixed image is new in every epoch.* data\.mix=none"):
        Loader(a_split(4), 2, mean=MEAN, std=STD, views=2, mix=Mix("cutmix"))


@pytest.mark.parametrize(("h", "w"), [(8, 8), (20, 9), (2, 2)])
def test_erasing_by_loops(h, w):
    b, augment = 200, Erase(0.6)
    x = torch.rand(b, 3, h, w) + 1
    chosen, shape, place = augment.draw(b, torch.Generator().manual_seed(0))
    got = augment.normalised(x, chosen, shape, place)
    erased = 0
    for k in range(b):
        expected = x[k].clone()
        for area, tall in shape[k].tolist() if chosen[k] else []:
            part, ratio = (0.02 + 0.31 * area) * h * w, 0.3 * (3.3 / 0.3) ** tall
            eh, ew = round(math.sqrt(part * ratio)), round(math.sqrt(part / ratio))
            if eh < h and ew < w:
                top, left = int(place[k, 0] * (h - eh + 1)), int(place[k, 1] * (w - ew + 1))
                expected[:, top : top + eh, left : left + ew] = 0
                break
        assert torch.equal(got[k], expected), k
        erased += not torch.equal(expected, x[k])
    assert 0.3 * b < erased < 0.75 * b
    assert (x > 0).all()


def level_of(name: str, strength: int, h: int, w: int, *, wide: bool) -> float:
    """The tables of the two papers, as torchvision has them."""
    share = strength / 30
    largest = {"shear": 0.99 if wide else 0.3, "rotate": 135 if wide else 30, "posterize": 6 if wide else 4, "solarize": 255}
    largest |= {"translate_x": 32 if wide else 150 / 331 * w, "translate_y": 32 if wide else 150 / 331 * h}
    return share * largest.get(name, largest.get(name.partition("_")[0], 0.99 if wide else 0.9))


@pytest.mark.parametrize("augment", [RandAugment(), RandAugment(3, 25), TrivialAugment()])
def test_policies_do_what_they_draw_one_operation_after_the_other(augment):
    images = a_split(40, 24, 17).images
    operation, strength = augment.draw(40, torch.Generator().manual_seed(2))
    assert operation.shape == strength.shape == (40, getattr(augment, "operations", 1))
    got = augment(images, operation, strength)
    for k in range(40):
        expected = images[k]
        for op, s in zip(operation[k].tolist(), strength[k].tolist(), strict=True):
            level = level_of(OPERATIONS[op], s, 24, 17, wide=isinstance(augment, TrivialAugment))
            expected = by_pillow(expected, OPERATIONS[op], level)
        assert torch.equal(got[k], expected), k


def test_policies_draw_uniformly():
    n, bound = 28_000, lambda share: 5 * (share * (1 - share) / 28_000) ** 0.5
    operation, strength = TrivialAugment().draw(n, torch.Generator().manual_seed(0))
    assert (operation.flatten().bincount(minlength=14) / n - 1 / 14).abs().max() < bound(1 / 14)
    assert (strength.abs().flatten().bincount(minlength=31) / n - 1 / 31).abs().max() < bound(1 / 31)
    assert abs((strength > 0).double().mean() - 15 / 31) < bound(0.5)
    operation, strength = RandAugment(2, 7).draw(n // 2, torch.Generator().manual_seed(0))
    assert (operation.flatten().bincount(minlength=14) / n - 1 / 14).abs().max() < bound(1 / 14)
    assert set(strength.flatten().tolist()) == {-7, 7}
    assert abs((strength > 0).double().mean() - 0.5) < bound(0.5)


def test_a_chain_is_its_parts_in_order():
    parts = (CropFlip(pad=2), RandAugment(), Erase(0.9))
    chain, images = Chain(parts), a_split(12).images
    draws, g = chain.draw(12, torch.Generator().manual_seed(0)), torch.Generator().manual_seed(0)
    one, two, three = (part.draw(12, g) for part in parts)
    assert [len(own) for own in (one, two, three)] == [part.draws for part in parts]
    assert torch.equal(chain(images, *draws), parts[1](parts[0](images, *one), *two))
    x = images.float() + 1
    assert torch.equal(chain.normalised(x, *draws), parts[2].normalised(x, *three))
    with pytest.raises(DataError, match="reflect padding of 2 pixels on images of 2x9"):
        chain.check(2, 9)


def test_a_chain_begins_with_a_picture_s_own_view():
    chain = Chain((ResizedCropFlip(), TrivialAugment()))
    picture = Image.fromarray(a_split(1, 40, 30).images[0].permute(1, 2, 0).contiguous().numpy())
    draws = chain.draw(1, torch.Generator().manual_seed(5))
    cut = chain.picture(picture, *(rows[0] for rows in draws), size=(16, 16), resize=20)
    assert cut == ResizedCropFlip().picture(picture, *(rows[0] for rows in draws[:3]), size=(16, 16), resize=20)
    image = torch.from_numpy(np.array(cut)).permute(2, 0, 1)[None]
    assert torch.equal(chain.batch(image, *draws), TrivialAugment()(image, *draws[3:]))


@pytest.mark.parametrize("augment", [RandAugment(3), TrivialAugment(), Erase(0.5)])
def test_augmenting_on_another_device(augment):
    draws = augment.draw(20, torch.Generator().manual_seed(0))
    with OneDevice():
        images = augment(torch.empty(20, 3, 8, 6, dtype=torch.uint8, device="meta"), *draws)
        assert augment.normalised(images.float(), *draws).device.type == "meta"


def test_augments_say_what_they_are():
    """Their names go into a cache's fingerprint, so they must hold every setting and no address."""
    one, two = Chain((Augment(), Erase(0.1))), Chain((Augment(), Erase(0.2)))
    assert str(vars(one)) != str(vars(two))
    assert "0x" not in str(vars(one))


def mixed_batch(lam: float = 0.7) -> Batch:
    g = torch.Generator().manual_seed(0)
    y, y2 = torch.randint(3, (2, 8), generator=g)
    return Batch(torch.randn(8, 3, 16, 16, generator=g), y, torch.arange(8), y2=y2, lam=lam)


def soft_cross_entropy(logits: torch.Tensor, y: torch.Tensor, eps: float) -> torch.Tensor:
    """−1/b Σ_i Σ_c q_ic log p_ic with q = (1 − ε) one-hot(y) + ε/C, by loops in float64."""
    p, total = logits.double().softmax(dim=1), torch.zeros((), dtype=torch.float64)
    b, C = p.shape
    for i in range(b):
        for c in range(C):
            q = (1 - eps) * (int(y[i]) == c) + eps / C
            total = total - q * p[i, c].log() / b
    return total


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("lam", [0.5, 0.7, 1.0])
def test_cross_entropy_of_mixed_and_smoothed_labels(eps, lam):
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=eps) if eps else None
    step = Distiller(a_student(), criterion=criterion)(batch := mixed_batch(lam))
    expected = [soft_cross_entropy(step.logits.detach(), y, eps) for y in (batch.y, batch.y2)]
    torch.testing.assert_close(step.terms["ce"].double(), lam * expected[0] + (1 - lam) * expected[1], rtol=1e-5, atol=1e-6)


def test_a_criterion_takes_the_place_of_the_cross_entropy():
    def squared(logits, y):
        return (logits.softmax(dim=1) - F.one_hot(y, 3)).square().sum(dim=1).mean()

    batch = mixed_batch()
    step = a_distiller(KD(), criterion=squared)(Batch(batch.x, batch.y))
    assert torch.equal(step.terms["ce"], squared(step.logits, batch.y))
    step = a_distiller(KD(), criterion=squared, weights={"ce": 2.0, "kd": 0.0})(batch)
    torch.testing.assert_close(step.loss, 2 * (0.7 * squared(step.logits, batch.y) + 0.3 * squared(step.logits, batch.y2)))
    with pytest.raises(
        LetkdError, match=r"must return a scalar tensor, but it returned shape \[8\]; average it over the batch"
    ):
        Distiller(a_student(), criterion=torch.nn.CrossEntropyLoss(reduction="none"))(batch)
    with pytest.raises(LetkdError, match="must return a scalar tensor, but it returned float"):
        Distiller(a_student(), criterion=lambda logits, y: 1.0)(batch)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("make", [lambda: DKD(warmup=1), TDD, lambda: letkd2(6, 2)], ids=["dkd", "tdd", "letkd-2"])
def test_terms_that_read_the_labels_are_weighed_by_share(make, fused):
    distiller = a_distiller(make(), fused=fused).fit([Batch(mixed_batch().x, torch.arange(8) % 3, torch.arange(8))]).eval()
    batch = mixed_batch(0.8)
    with torch.no_grad():
        got = distiller(batch).terms
        first, second = (distiller(Batch(batch.x, y)).terms for y in (batch.y, batch.y2))
    for name in got:
        torch.testing.assert_close(
            got[name], 0.8 * first[name] + 0.2 * second[name], msg=lambda text, name=name: f"{name}: {text}"
        )
    differ = [name for name in got if not torch.equal(first[name], second[name])]
    assert differ == (["ce", "kd/intermediate"] if "kd/intermediate" in got else list(got))
    if "dkd" in got:
        logits_T = distiller.teacher(batch.x)
        expected = [dkd_loss(distiller.student(batch.x), logits_T, y) for y in (batch.y, batch.y2)]
        torch.testing.assert_close(got["dkd"], 0.8 * expected[0] + 0.2 * expected[1])


def test_labels_of_pixels_are_not_mixed():
    distiller = a_distiller(letkd1(6)).fit([Batch(mixed_batch().x, torch.arange(8) % 3, torch.arange(8))]).eval()
    batch, calls = mixed_batch(), []
    supervision = distiller.methods[0].sites["penultimate"].supervision
    labels = supervision.labels
    supervision.labels = lambda f_T, y: calls.append(y) or labels(f_T, y)
    got = distiller(batch).terms["kd/penultimate"]
    assert len(calls) == 1
    assert torch.equal(got, distiller(Batch(batch.x, batch.y)).terms["kd/penultimate"])


def test_what_cannot_be_mixed_is_told():
    crd = a_distiller(CRD(K=4, feat_dim=6))
    with pytest.raises(
        UnsupportedPair, match=r"crd cannot learn from mixed images: its memory has one row per image.* data\.mix=none"
    ):
        crd(mixed_batch())
    with pytest.raises(DataError, match=r"fit\(\) got mixed images"):
        crd.fit([mixed_batch()])
    bad = mixed_batch()
    bad.y2[3] = 3
    with pytest.raises(DataError, match="a label is 3, but with 3 classes"):
        a_distiller(KD())(bad)


def test_a_mixed_batch_moves_whole():
    moved = mixed_batch().to("meta")
    assert {part.device.type for part in (moved.x, moved.y, moved.y2, moved.index)} == {"meta"}
    assert moved.lam == 0.7
