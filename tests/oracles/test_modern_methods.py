"""The methods after the paper's tables, against loops in float64 written from their formulas, and what their formulas imply."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.errors import DataError, LetkdError, UnsupportedPair
from letkd.methods import DIST, DKD, KD, SRD, ReviewKD
from letkd.methods.dist import correlation, dist_loss
from letkd.methods.dkd import dkd_loss
from letkd.methods.kd import kd_loss, standardise
from letkd.methods.reviewkd import Fusion, hcl_loss
from letkd.methods.srd import srd_loss
from letkd.models import create_model
from letkd.recipes import resolve
from tests.support.pair import TAPS, a_distiller, a_net, a_stream, a_teacher, images

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


# ------------------------------------------------------------------------------------------------ DIST


def rho(u: list[float], v: list[float]) -> float:
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    both = sum((a - mean_u) * (c - mean_v) for a, c in zip(u, v, strict=True))
    norms = [math.sqrt(sum((a - mean) ** 2 for a in row)) for row, mean in ((u, mean_u), (v, mean_v))]
    return both / (norms[0] * norms[1] + 1e-8)


def softened(z: Tensor, T: float) -> list[list[float]]:
    rows = [[math.exp(v / T) for v in row] for row in z.tolist()]
    return [[v / sum(row) for v in row] for row in rows]


@pytest.mark.parametrize("T", [1.0, 4.0])
def test_dist_is_one_minus_the_correlation_over_classes_and_over_images(T):
    s, t = logits()
    q_S, q_T = softened(s, T), softened(t, T)
    inter = 1 - sum(rho(q_S[i], q_T[i]) for i in range(b)) / b
    intra = 1 - sum(rho([row[c] for row in q_S], [row[c] for row in q_T]) for c in range(C)) / C
    total = T**2 * (1.5 * inter + 0.5 * intra)
    assert dist_loss(s, t, T, beta=1.5, gamma=0.5).item() == pytest.approx(total, rel=1e-10)


def test_correlation_ignores_a_shift_and_a_positive_factor_on_each_row():
    u, v = logits()
    shift, scale = torch.randn(2, b, 1, dtype=torch.float64)
    torch.testing.assert_close(correlation(scale.exp() * u + shift, v), correlation(u, v), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(correlation(-u, v), -correlation(u, v))


def test_dist_ignores_affine_maps_of_the_predictions():
    """Of each image's where it correlates over classes, one for all images where it correlates over these too."""
    s, t = logits()
    q = torch.softmax(s, dim=1)
    own = torch.linspace(0.2, 0.9, b, dtype=torch.float64)[:, None]
    mixed = [(share * q + (1 - share) / C).log() for share in (own, 0.3)]  # still probabilities
    torch.testing.assert_close(dist_loss(mixed[0], t, 1.0, gamma=0.0), dist_loss(s, t, 1.0, gamma=0.0), rtol=1e-6, atol=0)
    torch.testing.assert_close(dist_loss(mixed[1], t, 1.0), dist_loss(s, t, 1.0), rtol=1e-6, atol=0)
    assert abs(float(kd_loss(mixed[1], t, 1.0) - kd_loss(s, t, 1.0))) > 0.1  # which KD does not


def test_dist_of_equal_predictions_is_zero_and_of_one_image_has_a_gradient():
    s, t = logits()
    assert dist_loss(s, s, 1.0).item() == pytest.approx(0, abs=1e-5)  # not exactly, for the 1e-8
    one = s[:1].clone().requires_grad_()
    dist_loss(one, t[:1]).backward()
    assert torch.isfinite(one.grad).all()
    assert one.grad.abs().max() > 0


def test_dist_refuses_two_classes():
    nets = [a_net(4, seed=seed, num_classes=2) for seed in (0, 1)]
    with pytest.raises(UnsupportedPair, match="DIST correlates predictions over classes"):
        Distiller(*nets, DIST(), example=a_stream()[0].x[:1])


# ------------------------------------------------------------------------------------------------ ReviewKD


def mse(one: Tensor, two: Tensor) -> float:
    return sum((a - c) ** 2 for a, c in zip(one.flatten().tolist(), two.flatten().tolist(), strict=True)) / one.numel()


def grid(f: Tensor, size: int) -> Tensor:
    """Means over size x size equal windows, by loops."""
    m, n = f.shape[-2] // size, f.shape[-1] // size
    windows = [[f[..., i * m : (i + 1) * m, j * n : (j + 1) * n].mean(dim=(-2, -1)) for j in range(size)] for i in range(size)]
    return torch.stack([torch.stack(row, dim=-1) for row in windows], dim=-2)


@pytest.mark.parametrize(
    ("size", "weights"),
    [((8, 8), {4: 1 / 2, 2: 1 / 4, 1: 1 / 8}), ((4, 8), {2: 1 / 2, 1: 1 / 4}), ((2, 2), {1: 1 / 2}), ((1, 1), {})],
)
def test_hcl_averages_over_coarser_grids(size, weights):
    o, f = torch.randn(2, 3, 5, *size, dtype=torch.float64)
    total = mse(o, f) + sum(w * mse(grid(o, n), grid(f, n)) for n, w in weights.items())
    assert hcl_loss(o, f).item() == pytest.approx(total / (1 + sum(weights.values())), rel=1e-12)


def test_a_fusion_is_its_formula():
    """By loops over pixels, with BN in eval mode: u, the attention of u and r, and the 3x3 on what is resized to the teacher."""
    torch.manual_seed(1)
    fusion = Fusion(3, 5, 4, last=False).double().eval()
    for module in fusion.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    f_S, r = torch.randn(2, 3, 2, 2, dtype=torch.float64), torch.randn(2, 4, 1, 1, dtype=torch.float64)
    o, passed = fusion(f_S, r, (4, 4))
    (conv, bn), att = fusion.enter, fusion.attention
    expected = torch.zeros(2, 4, 4, 4, dtype=torch.float64)
    for n in range(2):
        for i in range(4):
            for j in range(4):
                pixel = f_S[n, :, i // 2, j // 2]  # nearest, from 2x2 to 4x4
                u = (conv.weight[:, :, 0, 0] @ pixel - bn.running_mean) / (bn.running_var + 1e-5).sqrt()
                deeper = r[n, :, 0, 0]
                a = 1 / (1 + torch.exp(-(att.weight[:, :, 0, 0] @ torch.cat([u, deeper]) + att.bias)))
                expected[n, :, i, j] = a[0] * u + a[1] * deeper
    torch.testing.assert_close(passed, expected)
    torch.testing.assert_close(o, fusion.leave(expected))
    assert [type(module) for module in fusion.leave] == [nn.Conv2d, nn.BatchNorm2d]
    assert (fusion.leave[0].kernel_size, fusion.leave[0].bias, att.bias is None) == ((3, 3), None, False)


def test_the_deepest_fusion_has_no_attention():
    assert Fusion(3, 5, 4, last=True).attention is None


PARAMETERS = {
    "wrn40-2-wrn16-2": 453_830,
    "wrn40-2-wrn40-1": 216_006,
    "rn56-rn20": 114_278,
    "rn32x4-rn8x4": 1_808_774,
    "rn32x4-snv1": 4_607_366,
    "rn32x4-snv2": 4_195_718,
    "wrn40-2-snv1": 2_984_646,
    "rn50-mnv2": 27_933_192,
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", PARAMETERS)
def test_fusions_have_as_many_parameters_as_the_authors(pair):
    """Which all widths and the number of places go into."""
    recipe = resolve(f"cifar100/{pair}/reviewkd")
    with torch.device("meta"):
        nets = [create_model(network.model, num_classes=100) for network in (recipe.student, recipe.teacher)]
    student, teacher = (net.to_empty(device="cpu") for net in nets)
    method = ReviewKD()
    Distiller(student, teacher, method)
    assert sum(parameter.numel() for parameter in method.parameters()) == PARAMETERS[pair]


def test_reviewkd_of_equal_pyramids_through_identities_is_zero():
    """Where fusions pass the student's own maps on, and these are the teacher's, nothing is left to learn."""
    teacher = a_teacher()
    taps = TAPS | {f"stage{i}.preact": TAPS[f"stage{i}"] for i in (1, 2, 3)}
    method = ReviewKD(warmup=0)
    distiller = Distiller(
        copy.deepcopy(teacher), teacher, method, student_taps=taps, teacher_taps=taps, example=a_stream()[0].x[:1]
    )
    for fusion in method.fusions:
        fusion.enter = fusion.leave = nn.Identity()
        fusion.attention = None  # a₁ = 1, a₂ = 0
    distiller.eval()
    assert distiller(a_stream()[0]).terms["reviewkd"] == 0
    distiller.student.last[1].conv.weight.data += 0.1
    assert distiller(a_stream()[0]).terms["reviewkd"] > 0


def test_reviewkd_warms_up_from_nothing_in_the_first_epoch():
    distiller = a_distiller(ReviewKD(warmup=20)).eval()
    found = [distiller(replace(a_stream()[0], epoch=epoch)).terms["reviewkd"].item() for epoch in (1, 11, 21, 240)]
    assert found[0] == 0
    assert found == pytest.approx([0, found[3] / 2, found[3], found[3]])
    unknown = distiller((a_stream()[0].x, a_stream()[0].y)).terms["reviewkd"].item()
    assert unknown == pytest.approx(found[3])


def test_reviewkd_takes_images_of_another_size_but_not_a_single_one():
    distiller = a_distiller(ReviewKD(warmup=0), "unequal")
    x, y = images(4, size=(24, 40))
    assert distiller((x, y)).terms["reviewkd"] > 0
    with pytest.raises(DataError, match="ReviewKD normalises over the batch, but this one has a single image"):
        distiller((x[:1], y[:1]))
    distiller.eval()
    assert distiller((x[:1], y[:1])).terms["reviewkd"] > 0


@pytest.mark.parametrize(("method", "term"), [(ReviewKD, "reviewkd"), (DKD, "dkd")])
def test_a_term_that_warms_up_has_no_automatic_weight(method, term):
    a_distiller(method(warmup=0), weights={term: "auto"})
    with pytest.raises(
        LetkdError, match=f"'{term}' is 'auto'.* rises over 20 epochs; set its method's warmup to 0, or give a number"
    ):
        a_distiller(method(), weights={term: "auto"})


# ------------------------------------------------------------------------------------------------ SRD


def test_srd_is_the_logarithm_of_the_summed_fourth_powers():
    s, t = logits()

    def standard(rows: list[list[float]]) -> list[list[float]]:
        columns = []
        for column in zip(*rows, strict=True):
            mean = sum(column) / b
            var = sum((v - mean) ** 2 for v in column) / b
            columns.append([(v - mean) / math.sqrt(var + 1e-4) for v in column])
        return columns

    u, v = standard(s.tolist()), standard(t.tolist())
    total = sum((a - c) ** 4 for one, two in zip(u, v, strict=True) for a, c in zip(one, two, strict=True))
    assert srd_loss(s, t).item() == pytest.approx(math.log(total + 1e-5), rel=1e-12)


def test_srd_ignores_shift_and_scale_of_each_channel_and_the_order_of_images_and_channels():
    s, t = logits()
    shift, scale = torch.randn(2, C, dtype=torch.float64)
    for moved in ((scale.exp() * s + shift, t), (s, scale.exp() * t + shift)):
        torch.testing.assert_close(srd_loss(*moved), srd_loss(s, t), rtol=1e-3, atol=0)  # but for the 1e-4 of the variance
    rows, columns = torch.randperm(b), torch.randperm(C)
    torch.testing.assert_close(srd_loss(s[rows][:, columns], t[rows][:, columns]), srd_loss(s, t))
    assert abs(float(srd_loss(s[rows.roll(1)], t[rows]) - srd_loss(s, t))) > 1e-2


def test_srd_of_equal_vectors_is_finite_and_its_gradient_does_not_shrink_with_the_error():
    s, t = logits()
    assert srd_loss(t, t).item() == pytest.approx(math.log(1e-5))
    gradients = []
    for error in (0.5, 0.05):
        near = (t + error * s).requires_grad_()
        srd_loss(near, t, 1e-12).backward()
        gradients.append(error * near.grad.norm())  # d log(error⁴) / d error = 4 / error
    assert gradients[1] == pytest.approx(gradients[0], rel=0.5)


def test_srd_reads_pooled_vectors_and_refuses_a_single_image():
    distiller = a_distiller(SRD(), "unequal").eval()
    batch = a_stream()[0]
    with torch.no_grad():
        p_S, p_T = (net.last(net.first(batch.x)).mean(dim=(2, 3)) for net in (distiller.student, distiller.teacher))
    projected = p_S @ distiller.methods[0].projector.weight.T
    torch.testing.assert_close(distiller(batch).terms["srd"], srd_loss(projected, p_T))
    with pytest.raises(DataError, match="SRD normalises over the batch"):
        distiller(Batch(batch.x[:1], batch.y[:1]))
