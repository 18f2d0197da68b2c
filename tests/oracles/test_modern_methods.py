"""The methods after the paper's tables, against loops in float64 written from their formulas, and what their formulas imply."""

import math

import pytest
import torch
from torch import Tensor

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.errors import UnsupportedPair
from letkd.methods import DKD, KD
from letkd.methods.dkd import dkd_loss
from letkd.methods.kd import kd_loss, standardise
from tests.conftest import a_distiller, a_net, a_stream, images

b, C = 6, 7


def logits(seed: int = 0, n: int = b) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, C, dtype=torch.float64, generator=g), 2 * torch.randn(n, C, dtype=torch.float64, generator=g)


# ------------------------------------------------------------------------------------------------ logit standardisation


def test_standardise_divides_by_the_samples_deviation():
    z = logits()[0]
    for row, found in zip(z.tolist(), standardise(z).tolist(), strict=True):
        mean = sum(row) / C
        s = math.sqrt(sum((v - mean) ** 2 for v in row) / (C - 1))
        assert found == pytest.approx([(v - mean) / (s + 1e-7) for v in row], rel=1e-12)


def test_standardised_losses_ignore_shift_and_scale_of_each_images_logits():
    s, t = logits()
    y = torch.arange(b)
    shift, scale = torch.randn(2, b, 1, dtype=torch.float64)
    moved = scale.exp() * s + shift
    # The eps of 1e-7 beside a deviation near 1 is what is left.
    torch.testing.assert_close(standardise(moved), standardise(s), rtol=1e-6, atol=1e-7)
    for loss in (kd_loss, lambda one, two, T: dkd_loss(one, two, y, T=T)):
        before, after = (loss(standardise(z), standardise(t), 2.0) for z in (s, moved))
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9)
        assert abs(float(loss(moved, t, 2.0) - loss(s, t, 2.0))) > 1e-3  # without it they do not


def test_the_gradient_of_a_standardised_loss_is_orthogonal_to_shift_and_scale():
    """It runs through mean and deviation: Σ_c dL/dz_c = 0 and Σ_c (z_c − mean) dL/dz_c = 0 for every image."""
    s, t = logits()
    s.requires_grad_()
    kd_loss(standardise(s), standardise(t), 2.0).backward()
    z = s.detach()
    assert s.grad.abs().max() > 1e-3
    torch.testing.assert_close(s.grad.sum(dim=1), torch.zeros(b, dtype=torch.float64), atol=1e-12, rtol=0)
    along = (s.grad * (z - z.mean(dim=1, keepdim=True))).sum(dim=1)
    torch.testing.assert_close(along, torch.zeros(b, dtype=torch.float64), atol=1e-7, rtol=0)


@pytest.mark.parametrize("make", [KD, lambda **options: DKD(warmup=0, **options)])
def test_the_methods_standardise_both_networks_logits(make):
    distiller = a_distiller(make(T=2.0, standardise=True)).eval()
    x, y = images(8)
    step = distiller(Batch(x, y))
    s, t = standardise(step.logits), standardise(distiller.teacher(x))
    expected = kd_loss(s, t, 2.0) if isinstance(distiller.methods[0], KD) else dkd_loss(s, t, y, T=2.0)
    torch.testing.assert_close(step.terms[distiller.methods[0].name], expected)


def test_standardised_logits_of_two_classes_are_refused():
    nets = [a_net(4, seed=seed, num_classes=2) for seed in (0, 1)]
    z = standardise(torch.randn(b, 2, dtype=torch.float64))
    torch.testing.assert_close(z.abs(), torch.full_like(z, 0.5**0.5), rtol=1e-5, atol=0)
    with pytest.raises(UnsupportedPair, match="standardised logits of 2 classes"):
        Distiller(*nets, KD(standardise=True), example=a_stream()[0].x[:1])
