"""The losses against loops over b, k, i in float64, written from their formulas."""

import math

import pytest
import torch

from letkd.functional import match_to, pixel_kl, pixels
from letkd.methods.kd import kd_loss


def softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in values)
    return [math.exp(v) / total for v in values]


def kl(p: list[float], q: list[float]) -> float:
    return sum(pk * (math.log(pk) - math.log(qk)) for pk, qk in zip(p, q, strict=True) if pk > 0)


@pytest.mark.parametrize("zeros", [False, True])
def test_pixel_kl_is_the_mean_over_pixels_of_the_sum_over_labels(zeros):
    p_T = torch.softmax(torch.randn(2, 5, 3, 4, dtype=torch.float64), dim=1)
    if zeros:  # as s_T has them: 0 · log 0 = 0
        p_T[:, 1:3] = 0
        p_T = p_T / p_T.sum(dim=1, keepdim=True)
    a = 3 * torch.randn(2, 5, 3, 4, dtype=torch.float64)
    total = 0.0
    for b in range(2):
        for i in range(3):
            for j in range(4):
                total += kl(p_T[b, :, i, j].tolist(), softmax(a[b, :, i, j].tolist()))
    assert float(pixel_kl(p_T, a)) == pytest.approx(total / (2 * 3 * 4), rel=1e-12)


def test_pixel_kl_gradient_is_the_difference_of_the_distributions():
    """d KL / d a = (p_S − p_T) / (number of pixels), also where p_T is zero."""
    p_T = torch.eye(4, dtype=torch.float64)[[0, 2, 1]].T.reshape(1, 4, 1, 3)
    a = torch.randn(1, 4, 1, 3, dtype=torch.float64, requires_grad=True)
    pixel_kl(p_T, a).backward()
    torch.testing.assert_close(a.grad, (torch.softmax(a.detach(), dim=1) - p_T) / 3)


def test_pixel_kl_of_low_precision_maps_is_computed_in_float32():
    p_T = torch.softmax(torch.randn(2, 50, 3, 3), dim=1)
    a = torch.randn(2, 50, 3, 3).bfloat16()
    loss = pixel_kl(p_T, a)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, pixel_kl(p_T.double(), a.double()).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("T", [1.0, 4.0])
def test_kd_loss_is_hintons(T):
    s, t = torch.randn(2, 6, 7, dtype=torch.float64).unbind()
    rows = [
        kl(softmax([v / T for v in t_row]), softmax([v / T for v in s_row]))
        for s_row, t_row in zip(s.tolist(), t.tolist(), strict=True)
    ]
    assert float(kd_loss(s, t, T)) == pytest.approx(T**2 * sum(rows) / 6, rel=1e-12)


def test_kd_loss_gradient_keeps_its_size_as_T_grows():
    """T² makes d/d logits tend to (z_S − z_T − their means)/(b·C), whatever T (Hinton et al. 2015)."""
    s = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    t = torch.randn(6, 7, dtype=torch.float64)
    kd_loss(s, t, 1e4).backward()
    difference = s.detach() - t
    torch.testing.assert_close(s.grad, (difference - difference.mean(dim=1, keepdim=True)) / (6 * 7), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("have", "want"), [((4, 6), (2, 3)), ((4, 6), (4, 2)), ((3, 3), (1, 1)), ((2, 2), (2, 2))])
def test_pool_to_averages_whole_windows(have, want):
    f = torch.randn(2, 3, *have, dtype=torch.float64)
    pooled = match_to(f, want, "here")
    assert pooled.shape == (2, 3, *want)
    m, n = have[0] // want[0], have[1] // want[1]
    for i in range(want[0]):
        for j in range(want[1]):
            window = [f[:, :, i * m + u, j * n + v] for u in range(m) for v in range(n)]
            torch.testing.assert_close(pooled[:, :, i, j], sum(window) / (m * n))


def test_pixels_go_image_by_image_row_by_row():
    f = torch.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2).float()
    expected = [f[b, :, i, j] for b in range(2) for i in range(2) for j in range(2)]
    assert torch.equal(pixels(f), torch.stack(expected))
