"""The KD layer and the soft match against slow loops over b, k, i in float64, written from the paper's formulas."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import LinearConstraint, linprog, minimize

from letkd.layer import CosineConv1x1, KDLayer, soft_match


def a_map(b: int = 2, d: int = 4, h: int = 2, w: int = 3) -> torch.Tensor:
    return torch.randn(b, d, h, w, dtype=torch.float64)


def a_layer(d: int = 4, K: int = 5, **options) -> KDLayer:
    """A layer as after training: nothing at its first value."""
    layer = KDLayer(d, K, **options).double()
    for name, parameter in layer.named_parameters():
        torch.nn.init.uniform_(parameter, *((0.5, 1.5) if name == "bn.weight" else (-1.0, 1.0)))
    layer.bn.running_mean.normal_(std=0.3)
    layer.bn.running_var.uniform_(0.5, 1.5)
    return layer


def length(v) -> float:
    return math.sqrt(sum(float(e) ** 2 for e in v))


def cosine_by_loops(x: torch.Tensor, weight: torch.Tensor, scale: float, normalize_input: bool = True) -> torch.Tensor:
    """a_{k|i} = s · (w_k / ‖w_k‖)ᵀ (x_i / ‖x_i‖), or x_i as it is."""
    weight, (b, _, h, w) = weight.detach(), x.shape
    out = torch.empty(b, len(weight), h, w, dtype=torch.float64)
    for n in range(b):
        for i in range(h):
            for j in range(w):
                pixel = x[n, :, i, j]
                for k, kernel in enumerate(weight[:, :, 0, 0]):
                    dot = sum(float(p) * float(q) for p, q in zip(pixel, kernel, strict=True))
                    by = length(kernel) * (length(pixel) if normalize_input else 1.0)
                    out[n, k, i, j] = scale * dot / by if by else 0.0
    return out


def bn_relu_by_loops(a: torch.Tensor, bn: torch.nn.BatchNorm2d, mean: list[float], var: list[float]) -> torch.Tensor:
    out = torch.empty_like(a)
    for k in range(a.shape[1]):
        normed = (a[:, k] - mean[k]) / math.sqrt(var[k] + bn.eps)
        out[:, k] = torch.clamp(bn.weight[k].item() * normed + bn.bias[k].item(), min=0)
    return out


@pytest.mark.parametrize("normalize_input", [True, False])
def test_cosine_conv_is_the_scaled_cosine(normalize_input):
    conv = CosineConv1x1(4, 5, scale=-1.75, normalize_input=normalize_input).double()
    x = a_map()
    expected = cosine_by_loops(x, conv.weight, -1.75, normalize_input)
    torch.testing.assert_close(conv(x).detach(), expected, rtol=1e-12, atol=1e-12)


def test_cosine_conv_of_a_zero_pixel_is_zero():
    x = a_map()
    x[1, :, 0, 2] = 0
    conv = CosineConv1x1(4, 5, scale=3.0).double()
    assert torch.equal(conv(x)[1, :, 0, 2], torch.zeros(5, dtype=torch.float64))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad((conv(x) * a_map(d=5)).sum(), x)
    assert not gradient[1, :, 0, 2].any()
    assert (gradient.abs().amax(dim=1) > 0).sum() == 2 * 2 * 3 - 1
    assert not conv.half()(x.detach().half())[1, :, 0, 2].any()


@pytest.mark.parametrize("options", [{}, {"alpha": 0.3}, {"normalize_value_input": False}, {"alpha": -2.0}])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_kd_layer_is_figure_2(mode, options):
    layer, x = a_layer(**options).train(mode == "train"), a_map()
    before = layer.bn.running_mean.clone(), layer.bn.running_var.clone()
    a = cosine_by_loops(x, layer.omega.weight, layer.omega.scale.item())
    n = a.numel() // a.shape[1]
    batch_mean = [float(a[:, k].sum()) / n for k in range(5)]
    batch_var = [float(((a[:, k] - batch_mean[k]) ** 2).sum()) / n for k in range(5)]
    mean, var = (batch_mean, batch_var) if mode == "train" else ([float(v) for v in part] for part in before)
    p = bn_relu_by_loops(a, layer.bn, mean, var)
    x_prime = cosine_by_loops(p, layer.nu.weight, layer.nu.scale.item(), options.get("normalize_value_input", True))
    with torch.no_grad():
        x_hat = layer(x)
    torch.testing.assert_close(x_hat, x + options.get("alpha", 1.0) * x_prime, rtol=1e-10, atol=1e-10)

    share = 0.1 if mode == "train" else 0.0  # the batch's, in the running statistics; of the variance the unbiased one
    for k in range(5):
        assert float(layer.bn.running_mean[k]) == pytest.approx((1 - share) * float(before[0][k]) + share * batch_mean[k])
        assert float(layer.bn.running_var[k]) == pytest.approx(
            (1 - share) * float(before[1][k]) + share * batch_var[k] * n / (n - 1)
        )


@pytest.mark.parametrize(("beta", "share"), [(0.0, 0.5), (-1.0, 0.1587), (-2.0, 0.0228)])
def test_beta_decides_how_many_templates_a_pixel_matches(beta, share):
    """With γ = 1 a template matches if its whitened score is above −β; the scores of random pixels are normal."""
    torch.manual_seed(0)
    layer = KDLayer(64, 128, beta=beta)
    p = layer.bn(layer.omega(torch.randn(8, 64, 16, 16))).relu()
    assert float((p > 0).float().mean()) == pytest.approx(share, rel=0.05)


def test_kd_layer_gradients_are_those_of_its_formula():
    layer, x = a_layer(K=3), a_map(b=1).requires_grad_()
    layer.bn.weight.data.abs_()
    assert torch.autograd.gradcheck(layer, (x,), atol=1e-5)


def pixels_of(a: torch.Tensor) -> list[np.ndarray]:
    return [a[n, :, i].numpy() for n in range(a.shape[0]) for i in range(a.shape[2])]


def with_q(p: torch.Tensor) -> list[np.ndarray]:
    """p and the missing weight q, pixel by pixel."""
    return pixels_of(torch.cat([p, 1 - p.sum(dim=1, keepdim=True)], dim=1))


CASES = [(0.0, 1.0), (0.4, 0.5), (-0.7, 3.0)]


@pytest.mark.parametrize(("mu", "epsilon"), CASES)
def test_soft_match_is_the_optimum_of_a2_that_a_solver_finds(mu, epsilon):
    a = torch.randn(2, 4, 3, dtype=torch.float64)
    for pixel, found in zip(pixels_of(a), with_q(soft_match(a, mu=mu, epsilon=epsilon)), strict=True):
        gain = np.append(pixel, mu)

        def loss(pq, gain=gain):
            return -(pq @ gain - (pq @ np.log(pq)) / epsilon)  # minus the objective of (A.2)

        solved = minimize(
            loss,
            np.full(5, 0.2),
            jac=lambda pq, gain=gain: -(gain - (np.log(pq) + 1) / epsilon),
            bounds=[(1e-9, 1)] * 5,
            constraints=LinearConstraint(np.ones((1, 5)), 1, 1),
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert solved.success
        np.testing.assert_allclose(found, solved.x, atol=1e-5)
        assert loss(found) <= solved.fun + 1e-12


@pytest.mark.parametrize(("mu", "epsilon"), CASES)
def test_soft_match_meets_the_optimality_conditions_of_a2(mu, epsilon):
    """At an inner optimum on the simplex the derivative a_k − (log p_k + 1)/ε, and μ − (log q + 1)/ε, is one and the same."""
    a = torch.randn(3, 6, 4, dtype=torch.float64)
    for pixel, pq in zip(pixels_of(a), with_q(soft_match(a, mu=mu, epsilon=epsilon)), strict=True):
        assert pq.min() > 0
        assert pq.sum() == pytest.approx(1, abs=1e-12)
        slope = np.append(pixel, mu) - (np.log(pq) + 1) / epsilon
        assert np.ptp(slope) < 1e-9


@pytest.mark.parametrize("mu", [-0.3, 0.0, 1.0])
def test_soft_match_tends_to_the_arg_max_of_a1(mu):
    a = torch.randn(4, 5, 6, dtype=torch.float64)
    for pixel, pq in zip(pixels_of(a), with_q(soft_match(a, mu=mu, epsilon=1e5)), strict=True):
        solved = linprog(-np.append(pixel, mu), A_eq=np.ones((1, 6)), b_eq=[1])  # (A.1): p, q >= 0 is linprog's default
        np.testing.assert_allclose(pq, solved.x, atol=1e-9)
        assert (pq[:-1].max() < 1e-9) == (pixel.max() < mu)


def test_soft_match_by_loops():
    a, mu, epsilon = torch.randn(2, 3, 2, 2, dtype=torch.float64), 0.2, 1.3
    p = soft_match(a, mu=mu, epsilon=epsilon)
    for n in range(2):
        for i in range(2):
            for j in range(2):
                total = math.exp(epsilon * mu) + sum(math.exp(epsilon * float(v)) for v in a[n, :, i, j])
                for k in range(3):
                    assert float(p[n, k, i, j]) == pytest.approx(math.exp(epsilon * float(a[n, k, i, j])) / total, rel=1e-12)


def test_soft_match_takes_large_scores_without_overflow():
    a = torch.tensor([[[900.0], [1000.0]]])
    assert torch.equal(soft_match(a, epsilon=10.0), torch.tensor([[[0.0], [1.0]]]))
    assert torch.equal(soft_match(-a, epsilon=10.0), torch.zeros(1, 2, 1))
