"""FitNet, AT, SP, VID and DKD: losses against float64 loops, adapters, what leaves a loss as it is, pairs they cannot serve, recipes."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.errors import RecipeError, TapError, UnsupportedPair
from letkd.layer import KDLayer
from letkd.methods import METHODS as REGISTRY
from letkd.methods.at import AT, at_loss
from letkd.methods.base import Method
from letkd.methods.dkd import DKD, dkd_loss, nckd, tckd
from letkd.methods.fitnet import FitNet, fitnet_loss, regressor
from letkd.methods.kd import kd_loss
from letkd.methods.sp import SP, sp_loss
from letkd.methods.vid import VID, predictor, vid_loss
from letkd.models import create_model
from letkd.recipes import Recipe, resolve
from tests.support.pair import SIZE, C, Net, a_distiller, a_stream, steps

STAGES = {"stage1": "first", "stage2": "last.0", "stage3": "last"}
CLASSES: dict[str, type[Method]] = dict(REGISTRY) | {cls.name: cls for cls in (FitNet, AT, SP, VID, DKD)}
OWN = [FitNet, AT, SP, VID, DKD]


def a_pair(method: Method | list[Method], pair: str = "equal", **options) -> Distiller:
    return a_distiller(method, pair, **{"student_taps": STAGES, "teacher_taps": STAGES, **options})


def maps(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def close(value: Tensor, expected: float) -> None:
    assert value.shape == ()
    assert value.item() == pytest.approx(expected, rel=1e-12)


def window_mean(f: Tensor, h: int, w: int) -> Tensor:
    """Average over whole windows, by loops: the map as h x w."""
    m, n = f.shape[2] // h, f.shape[3] // w
    out = torch.zeros(*f.shape[:2], h, w, dtype=f.dtype)
    for i in range(h):
        for j in range(w):
            out[:, :, i, j] = sum(f[:, :, i * m + u, j * n + v] for u in range(m) for v in range(n)) / (m * n)
    return out


# FitNet


def test_fitnet_loss_is_the_mean_over_all_elements():
    r_S, f_T = maps((2, 3, 4, 5), (2, 3, 4, 5))
    total = sum((s - t) ** 2 for s, t in zip(r_S.flatten().tolist(), f_T.flatten().tolist(), strict=True))
    close(fitnet_loss(r_S, f_T), total / (2 * 3 * 4 * 5))


@pytest.mark.parametrize(
    ("size_S", "size_T", "kind", "kernel", "stride", "padding"),
    [
        ((8, 8), (8, 8), nn.Conv2d, (1, 1), (1, 1), (0, 0)),
        ((16, 16), (8, 8), nn.Conv2d, (3, 3), (2, 2), (1, 1)),
        ((8, 8), (16, 16), nn.ConvTranspose2d, (4, 4), (2, 2), (1, 1)),
        ((16, 16), (4, 4), nn.Conv2d, (13, 13), (1, 1), (0, 0)),
        ((7, 7), (5, 5), nn.Conv2d, (3, 3), (1, 1), (0, 0)),
        ((8, 12), (8, 6), nn.Conv2d, (1, 3), (1, 2), (0, 1)),
        ((8, 9), (4, 7), nn.Conv2d, (3, 3), (2, 1), (1, 0)),
        ((4, 6), (8, 6), nn.ConvTranspose2d, (4, 1), (2, 1), (1, 0)),
        ((2, 3), (4, 6), nn.ConvTranspose2d, (4, 4), (2, 2), (1, 1)),
    ],
)
@pytest.mark.parametrize("relu", [True, False])
def test_the_adapter_has_the_fields_kernel_and_the_teachers_shape(size_S, size_T, kind, kernel, stride, padding, relu):
    adapter = regressor(3, 5, size_S, size_T, relu=relu)
    assert [type(layer) for layer in adapter] == [kind, nn.BatchNorm2d, *([nn.ReLU] if relu else [])]
    assert (adapter[0].kernel_size, adapter[0].stride, adapter[0].padding) == (kernel, stride, padding)
    out = adapter(torch.randn(2, 3, *size_S))
    assert out.shape == (2, 5, *size_T)
    assert bool((out < 0).any()) is not relu
    # kernel, bias, and BN's two values a channel
    assert sum(p.numel() for p in adapter.parameters()) == 3 * 5 * kernel[0] * kernel[1] + 5 + 2 * 5


@pytest.mark.parametrize(("size_S", "size_T"), [((4, 4), (12, 12)), ((5, 5), (8, 8)), ((8, 4), (4, 8))])
def test_no_adapter_for_a_student_that_is_smaller_but_not_half(size_S, size_T):
    message = f"{size_S[0]}x{size_S[1]} map to the teacher's {size_T[0]}x{size_T[1]}: .* as large, larger, or exactly half"
    with pytest.raises(UnsupportedPair, match=message):
        regressor(3, 5, size_S, size_T, relu=True)


@pytest.mark.parametrize("pair", ["equal", "unequal"])
def test_fitnet_compares_the_adapted_map_with_the_teachers_at_its_role(pair):
    distiller, batch = a_pair(FitNet("stage3"), pair), a_stream()[0]
    value = distiller(batch).terms["fitnet"]
    assert [type(layer).__name__ for layer in distiller.methods[0].adapter][1:] == ["BatchNorm2d", "ReLU"]
    with torch.no_grad():
        r_S = distiller.methods[0].adapter(distiller.student.last(distiller.student.first(batch.x)))
        f_T = distiller.teacher.last(distiller.teacher.first(batch.x))
    torch.testing.assert_close(value, (r_S - f_T).square().mean())


# AT


@pytest.mark.parametrize(("size_S", "size_T"), [((4, 6), (4, 6)), ((4, 6), (2, 3)), ((2, 3), (4, 6))])
def test_at_loss_is_the_mean_squared_difference_of_unit_attentions(size_S, size_T):
    f_S, f_T = maps((2, 3, *size_S), (2, 5, *size_T))
    h, w = min(size_S, size_T)

    def unit(f: Tensor, b: int) -> list[float]:
        f = window_mean(f, h, w)  # before squaring
        q = [sum(f[b, d, i, j].item() ** 2 for d in range(f.shape[1])) / f.shape[1] for i in range(h) for j in range(w)]
        length = math.sqrt(sum(v * v for v in q))
        return [v / length for v in q]

    total = sum((s - t) ** 2 for b in range(2) for s, t in zip(unit(f_S, b), unit(f_T, b), strict=True))
    close(at_loss(f_S, f_T), total / (2 * h * w))


def test_at_does_not_see_the_order_of_channels_nor_a_factor():
    f_S, f_T = maps((4, 6, 3, 5), (4, 7, 3, 5))
    expected = at_loss(f_S, f_T)
    torch.testing.assert_close(at_loss(f_S[:, torch.randperm(6)], f_T[:, torch.randperm(7)]), expected)
    torch.testing.assert_close(at_loss(30 * f_S, -0.02 * f_T), expected)
    torch.testing.assert_close(at_loss(f_S * torch.tensor([1.0, 2, 3, 4])[:, None, None, None], f_T), expected)  # one an image
    assert at_loss(f_S, f_S[:, torch.randperm(6)]) < 1e-25
    assert abs(at_loss(f_S.flip(3), f_T) - expected) > 1e-4  # where it looks, it does see


def test_at_and_vid_sum_over_the_stages_of_both_networks():
    batch = a_stream()[0]
    distiller = a_pair([AT(), VID()], "unequal")
    terms = distiller(batch).terms
    features = []
    with torch.no_grad():
        for net in (distiller.student, distiller.teacher):
            first = net.first(batch.x)
            middle = net.last[0](first)
            features.append((first, middle, net.last[1](middle)))
        at, vid = 0.0, 0.0
        for role, f_S, f_T in zip(STAGES, *features, strict=True):
            at += at_loss(f_S, f_T)
            f_T = window_mean(f_T, *f_S.shape[2:])
            vid += vid_loss(distiller.methods[1].predictor[role](f_S), f_T, distiller.methods[1].alpha[role])
    torch.testing.assert_close(terms["at"], at)
    torch.testing.assert_close(terms["vid"], vid)


# SP


def test_sp_loss_compares_normalised_similarities_of_the_batch():
    f_S, f_T = maps((4, 3, 2, 2), (4, 5, 3, 1))

    def rows(f: Tensor) -> list[list[float]]:
        flat = f.flatten(1).tolist()
        gram = [[sum(x * y for x, y in zip(one, two, strict=True)) for two in flat] for one in flat]
        return [[v / math.sqrt(sum(u * u for u in row)) for v in row] for row in gram]

    G_S, G_T = rows(f_S), rows(f_T)
    close(sp_loss(f_S, f_T), sum((G_S[i][j] - G_T[i][j]) ** 2 for i in range(4) for j in range(4)) / 4**2)


def test_sp_does_not_see_a_rotation_nor_a_factor():
    f_S, f_T = maps((5, 3, 2, 4), (5, 2, 3, 3))
    expected = sp_loss(f_S, f_T)
    for f, other in ((f_S, f_T), (f_T, f_S)):
        n = f[0].numel()
        rotation = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
        torch.testing.assert_close(sp_loss((f.flatten(1) @ rotation).reshape(f.shape), other), expected)
        torch.testing.assert_close(sp_loss(-7 * f, other), expected)
    assert abs(sp_loss(f_S + 1, f_T) - expected) > 1e-3  # a shift it does see


def test_sp_reads_the_last_stage_of_each_network_or_the_role_it_is_given():
    batch = a_stream()[0]
    two_stages = {"stage1": "first", "stage2": "last"}
    expected = a_pair(SP())(batch).terms["sp"]
    assert torch.equal(a_pair(SP(), student_taps=two_stages)(batch).terms["sp"], expected)
    assert torch.equal(a_pair(SP(), teacher_taps={"penultimate": "last"})(batch).terms["sp"], expected)
    assert torch.equal(a_pair(SP("stage3"))(batch).terms["sp"], expected)
    assert not torch.equal(a_pair(SP("stage1"))(batch).terms["sp"], expected)


# VID


def test_vid_loss_is_the_mean_over_all_elements():
    mu, f_T, alpha = maps((2, 3, 2, 4), (2, 3, 2, 4), (3,))
    total = 0.0
    for b in range(2):
        for d in range(3):
            var = math.log1p(math.exp(alpha[d].item())) + 1e-5
            for i in range(2):
                for j in range(4):
                    total += 0.5 * ((mu[b, d, i, j] - f_T[b, d, i, j]).item() ** 2 / var + math.log(var))
    close(vid_loss(mu, f_T, alpha), total / (2 * 3 * 2 * 4))


def test_the_best_variance_of_vid_is_the_mean_squared_error_of_its_channel():
    mu, f_T = maps((4, 3, 5, 5), (4, 3, 5, 5))
    var = (mu - f_T).square().mean(dim=(0, 2, 3))
    alpha = torch.log(torch.expm1(var - 1e-5)).requires_grad_()
    vid_loss(mu, f_T, alpha).backward()
    assert alpha.grad.abs().max() < 1e-12


def test_vids_predictor_is_three_convolutions_without_bias():
    mean = predictor(4, 6)
    assert [type(layer) for layer in mean] == [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.ReLU, nn.Conv2d]
    assert all(layer.kernel_size == (1, 1) for layer in mean if isinstance(layer, nn.Conv2d))
    assert sum(p.numel() for p in mean.parameters()) == 4 * 6 + 2 * 6 * 6
    assert mean(torch.randn(2, 4, 3, 5)).shape == (2, 6, 3, 5)


def test_vids_variances_begin_at_5_and_are_trained_and_saved():
    distiller = a_pair(VID(), "unequal")
    alpha = distiller.methods[0].alpha
    assert {role: tuple(value.shape) for role, value in alpha.items()} == {"stage1": (5,), "stage2": (10,), "stage3": (10,)}
    for value in alpha.values():
        torch.testing.assert_close(value, torch.full_like(value, 4.99323), rtol=0, atol=1e-5)
        torch.testing.assert_close(F.softplus(value) + 1e-5, torch.full_like(value, 5.0))
    before = {role: value.detach().clone() for role, value in alpha.items()}
    steps(distiller, a_stream(), torch.optim.SGD(distiller.parameters(), lr=0.1))
    assert all((value != before[role]).all() for role, value in alpha.items())
    assert {f"methods.0.alpha.{role}" for role in STAGES} <= distiller.state_dict().keys()


# DKD


def logits(b: int = 6, classes: int = 7, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    s, t = spread * torch.randn(2, b, classes, dtype=torch.float64)
    return s, t, torch.randint(classes, (b,))


def softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in values)
    return [math.exp(v) / total for v in values]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("T", [1.0, 4.0])
def test_dkds_parts_are_target_against_rest_and_the_rest_among_themselves(T):
    s, t, y = logits()
    target, rest = [], []
    for row_S, row_T, c in zip(s.tolist(), t.tolist(), y.tolist(), strict=True):
        p_S, p_T = (softmax([v / T for v in row]) for row in (row_S, row_T))
        target.append(kl([p_T[c], 1 - p_T[c]], [p_S[c], 1 - p_S[c]]))
        others_S, others_T = ([v for k, v in enumerate(p) if k != c] for p in (p_S, p_T))
        rest.append(kl([v / sum(others_T) for v in others_T], [v / sum(others_S) for v in others_S]))
    assert tckd(s, t, y, T).tolist() == pytest.approx(target, rel=1e-9)
    assert nckd(s, t, y, T).tolist() == pytest.approx(rest, rel=1e-9)
    total = T**2 * (1.5 * sum(target) + 6 * sum(rest)) / 6
    assert dkd_loss(s, t, y, alpha=1.5, beta=6.0, T=T).item() == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("T", [1.0, 4.0])
def test_kd_is_tckd_plus_the_teachers_rest_times_nckd(T):
    s, t, y = logits(b=16)
    p_t = torch.softmax(t / T, dim=1)[torch.arange(16), y]
    whole = tckd(s, t, y, T) + (1 - p_t) * nckd(s, t, y, T)
    for b in range(16):
        torch.testing.assert_close(T**2 * whole[b], kd_loss(s[b : b + 1], t[b : b + 1], T))


def test_nckd_does_not_see_the_target_and_is_the_fields_to_float_precision():
    s, t, y = (part.float() if part.is_floating_point() else part for part in logits())
    expected = nckd(s, t, y)
    one_hot = F.one_hot(y, 7)
    assert torch.equal(nckd(s + 50 * one_hot, t - 3 * one_hot, y), expected)
    lowered = [F.log_softmax(z / 4 - 1000 * one_hot, dim=1) for z in (s, t)]
    fields = F.kl_div(lowered[0], lowered[1], reduction="none", log_target=True).sum(dim=1)
    torch.testing.assert_close(expected, fields)


def test_dkd_stays_finite_where_the_teacher_is_certain():
    s = torch.zeros(2, 4, requires_grad=True)
    t = torch.tensor([[400.0, 0, 0, 0], [0, 0, 400.0, 0]])
    y = torch.tensor([0, 1])  # once right, once wrong
    loss = dkd_loss(s, t, y, T=1.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(s.grad).all()
    assert tckd(s, t, y, 1.0).tolist() == pytest.approx([math.log(4), math.log(4 / 3)], rel=1e-5)


def test_dkd_warms_up_from_epoch_1():
    x, y = a_stream()[0].x, a_stream()[0].y
    for warmup, epochs in ((20, {1: 1 / 20, 10: 1 / 2, 20: 1.0, 21: 1.0, 240: 1.0}), (1, {1: 1.0, 2: 1.0}), (0, {1: 1.0})):
        distiller = a_pair(DKD(warmup=warmup, beta=2.0))
        step = distiller(Batch(x, y))
        with torch.no_grad():
            full = dkd_loss(step.logits, distiller.teacher(x), y, beta=2.0)
        for epoch, factor in epochs.items():
            torch.testing.assert_close(distiller(Batch(x, y, epoch=epoch)).terms["dkd"], factor * full)
        torch.testing.assert_close(distiller((x, y)).terms["dkd"], full)  # the epoch is not known


@pytest.mark.parametrize("init_var", [1e-4, 5.0, 1e4])
def test_vid_starts_at_its_variance(init_var):
    method = VID(init_var)
    a_pair(method, "unequal")
    for alpha in method.alpha.values():
        torch.testing.assert_close(F.softplus(alpha) + method.eps, torch.full_like(alpha, init_var), rtol=1e-3, atol=0)
    with pytest.raises(
        RecipeError, match="VID with init_var=1e-06: the variance is at least eps=1e-05; choose a larger init_var"
    ):
        VID(1e-6)


def test_dkd_refuses_two_classes():
    nets = [Net(4, num_classes=2) for _ in range(2)]
    with pytest.raises(UnsupportedPair, match="with 2 classes only one is left, so there is nothing to compare; use KD"):
        Distiller(*nets, DKD(), example=torch.zeros(1, 3, *SIZE))


# All of them


@pytest.mark.parametrize("loss", [fitnet_loss, at_loss, sp_loss], ids=lambda loss: loss.__name__)
def test_losses_of_low_precision_maps_are_computed_in_float32(loss):
    f_S, f_T = (100 * torch.randn(8, 64, 4, 4).bfloat16() for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(f_S, f_T)
        vid = vid_loss(f_S, f_T, torch.zeros(64))
    assert value.dtype == vid.dtype == torch.float32
    torch.testing.assert_close(value, loss(f_S.double(), f_T.double()).float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(vid, vid_loss(f_S.double(), f_T.double(), torch.zeros(64).double()).float(), rtol=1e-5, atol=0)


def test_dkd_of_low_precision_logits_is_computed_in_float32():
    s, t = torch.randn(2, 8, 50).bfloat16()
    y = torch.randint(50, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = dkd_loss(s, t, y)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, dkd_loss(s.double(), t.double(), y).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("pair", ["equal", "unequal"])
@pytest.mark.parametrize("make", OWN, ids=lambda make: make.name)
def test_every_trainable_parameter_gets_a_gradient(make, pair):
    distiller = a_pair(make(), pair)
    step = distiller(a_stream()[0])
    assert set(step.terms) == {"ce", make.name}
    step.loss.backward()
    for key, parameter in distiller.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        # BN takes the mean away, so what the convolution's bias gets is no more than rounding
        assert parameter.grad.abs().max() > 0 or key.endswith("adapter.0.bias"), key


@pytest.mark.parametrize("make", OWN, ids=lambda make: make.name)
def test_nothing_of_them_ships(make):
    student = a_pair(make(), "unequal").export()
    assert student.state_dict().keys() == Net(4).state_dict().keys()


@pytest.mark.parametrize("make", [AT, VID], ids=lambda make: make.name)
def test_stages_that_make_no_pairs(make):
    two_stages = {"stage1": "first", "stage2": "last"}
    with pytest.raises(
        UnsupportedPair, match="the student Net has stage1, stage2 and the teacher Net stage1, stage2, stage3, so"
    ):
        a_pair(make(), student_taps=two_stages)
    with pytest.raises(TapError, match="the teacher Net has no tap for the role 'stage1'"):
        a_pair(make(), teacher_taps={"penultimate": "last"})
    with pytest.raises(TapError, match=r"tap 'stage3' of the student: 'fc' gives \[b 3\], and a map"):
        a_pair(make(), student_taps=STAGES | {"stage3": "fc"})


@pytest.mark.parametrize("method", [FitNet, SP], ids=lambda make: make.name)
def test_a_role_that_a_network_does_not_have(method):
    with pytest.raises(TapError, match="the teacher Net has no tap for the role 'stage2'"):
        a_pair(method("stage2"), teacher_taps={"penultimate": "last"})


def test_defaults_are_the_fields():
    def defaults(cls: type) -> dict:
        return {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}

    assert defaults(FitNet) == {"role": "stage2"}
    assert defaults(AT) == {}
    assert defaults(SP) == {"role": None}
    assert defaults(VID) == {"init_var": 5.0, "eps": 1e-5}
    assert defaults(DKD) == {"alpha": 1.0, "beta": 8.0, "T": 4.0, "warmup": 20, "standardise": False}


# Recipes


WEIGHTS = {
    "fitnet": {"ce": 1.0, "fitnet": 100.0},
    "at": {"ce": 1.0, "at": 1000.0},
    "sp": {"ce": 1.0, "sp": 3000.0},
    "vid": {"ce": 1.0, "vid": 1.0},
    "dkd": {"ce": 1.0, "dkd": 1.0},
    "at-kd": {"ce": 0.1, "at": 1000.0, "kd": 0.9},
    "fitnet-layer": {"ce": 1.0, "fitnet": 100.0, "kd/penultimate": 0.0},
    "fitnet-letkd-1": {"ce": 1.0, "fitnet": 100.0, "kd/penultimate": 1.0},
}


def small(recipe: Recipe) -> Distiller:
    """The recipe's methods and weights on small networks of the zoo."""
    methods = [CLASSES[name].from_recipe(table) for name, table in recipe.methods.items()]
    nets = [create_model(name, num_classes=C) for name in ("resnet8_tiny", "resnet8")]
    return Distiller(*nets, methods, weights=recipe.weights, example=torch.zeros(1, 3, 16, 16))


@pytest.mark.parametrize("name", WEIGHTS)
def test_recipes_carry_the_fields_weights_and_build(name):
    recipe = resolve(f"cifar100/rn56-rn20/{name}")
    assert recipe.weights == WEIGHTS[name]
    assert recipe.phases == []
    assert small(recipe).weights == WEIGHTS[name]


def test_recipes_of_single_methods_repeat_the_defaults():
    for name in ("fitnet", "at", "sp", "vid"):
        recipe, cls = resolve(f"cifar100/rn56-rn20/{name}"), CLASSES[name]
        for key, value in recipe.methods[name].items():
            assert value == inspect.signature(cls).parameters[key].default


@pytest.mark.parametrize(("pair", "beta"), [("rn56-rn20", 2.0), ("rn110-rn32", 2.0), ("rn32x4-rn8x4", 8.0)])
def test_dkds_beta_is_the_pairs(pair, beta):
    assert resolve(f"cifar100/{pair}/dkd").methods == {"dkd": {"alpha": 1.0, "beta": beta, "T": 4.0, "warmup": 20}}


def test_at_and_kd_stand_side_by_side():
    distiller = small(resolve("cifar100/rn56-rn20/at-kd"))
    assert [type(method).name for method in distiller.methods] == ["at", "kd"]
    step = distiller(a_stream()[0])
    terms = step.terms
    torch.testing.assert_close(step.loss, 0.1 * terms["ce"] + 1000 * terms["at"] + 0.9 * terms["kd"])


def test_fitnet_with_a_kd_layer_that_nobody_supervises_trains_the_layer_by_cross_entropy():
    recipe = resolve("cifar100/rn56-rn20/fitnet-layer")
    distiller = small(recipe)  # and is not fitted: there is nothing to fit
    step = distiller(a_stream()[0])
    assert set(step.terms) == {"ce", "fitnet"}
    step.loss.backward()
    (layer,) = [module for module in distiller.student.modules() if isinstance(module, KDLayer)]
    assert layer.omega.weight.shape[0] == 4096
    names = {name for name, parameter in layer.named_parameters() if parameter.grad is not None and parameter.grad.any()}
    assert names == {"omega.weight", "omega.scale", "bn.weight", "bn.bias", "nu.weight", "nu.scale"}
    by_ce = torch.autograd.grad(distiller(a_stream()[0]).terms["ce"], list(layer.parameters()))
    for parameter, grad in zip(layer.parameters(), by_ce, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    assert [type(module) for module in distiller.export().modules()].count(KDLayer) == 1


def test_fitnet_with_a_supervised_kd_layer_is_the_same_student_with_one_term_more():
    setting = "methods.letkd.sites.penultimate.supervision.K=8"
    bare, taught = (
        small(resolve(f"cifar100/rn56-rn20/{name}", settings=[setting])) for name in ("fitnet-layer", "fitnet-letkd-1")
    )
    assert bare.student.state_dict().keys() == taught.student.state_dict().keys()
    step = taught.fit(a_stream())(a_stream()[0])
    assert set(step.terms) == {"ce", "fitnet", "kd/penultimate"}
    assert step.terms["kd/penultimate"] > 0
