"""AB, FSP and SimKD: losses against loops in float64, adapters, what is refused, and what each leaves in the student."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from letkd.distiller import Distiller
from letkd.errors import LetkdError, TapError, UnsupportedPair
from letkd.methods.ab import AB, ab_loss
from letkd.methods.base import Method
from letkd.methods.fsp import FSP, fsp_loss, fsp_matrix
from letkd.methods.simkd import FrozenLinear, Projector, SimKD, simkd_loss
from letkd.models import create_model
from letkd.recipes import resolve
from letkd.taps import Tap
from tests.support.pair import SIZE, Net, a_net, a_stream, a_teacher, images, same_state, steps

TAPS: dict[str, Tap | str] = {
    "stem": "first",
    "stage1": "last.0",
    "stage1.preact": Tap("last.0.relu", io="input"),
    "stage2": "last",
    "stage2.preact": Tap("last.1.relu", io="input"),
    "penultimate": "last",
    "pooled": Tap("fc", io="input"),
}

# The teacher has 10 channels at 4x4. FSP cannot serve other channels, so there only the sizes differ.
STUDENTS = {
    "equal": lambda: a_net(5, seed=0),
    "smaller": lambda: a_net(4, seed=0, stride=4),
    "larger": lambda: a_net(4, seed=0, stride=1),
    "smaller, same channels": lambda: a_net(5, seed=0, stride=4),
    "larger, same channels": lambda: a_net(5, seed=0, stride=1),
}
CASES = [
    *[pytest.param(AB, pair, id=f"ab, {pair}") for pair in ("equal", "smaller", "larger", "smaller, same channels")],
    *[pytest.param(FSP, pair, id=f"fsp, {pair}") for pair in ("equal", "smaller, same channels", "larger, same channels")],
    *[pytest.param(SimKD, pair, id=f"simkd, {pair}") for pair in ("equal", "smaller", "larger")],
]
every_case = pytest.mark.parametrize(("method", "pair"), CASES)


def a_distiller(
    method: Method | list[Method], pair: str = "equal", *, student: nn.Module | None = None, **options
) -> Distiller:
    options = {"student_taps": TAPS, "teacher_taps": TAPS, "example": torch.zeros(1, 3, *SIZE), **options}
    torch.manual_seed(0)
    return Distiller(student or STUDENTS[pair](), options.pop("teacher", None) or a_teacher(), method, **options)


def maps(*shape: int, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pooled_by_hand(f: Tensor, h: int, w: int) -> Tensor:
    m, n = f.shape[-2] // h, f.shape[-1] // w
    rows = [[f[..., i * m : (i + 1) * m, j * n : (j + 1) * n].mean(dim=(-2, -1)) for j in range(w)] for i in range(h)]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


# ------------------------------------------------------------------------------------------------ AB


@pytest.mark.parametrize("m", [1.0, 0.3])
def test_ab_loss_is_its_formula(m):
    shapes = [(2, 3, 4, 2), (2, 5, 2, 1), (2, 4, 1, 2)]
    s, t = ([maps(*shape, seed=seed + i) for i, shape in enumerate(shapes)] for seed in (0, 10))
    s[0][0, 0, 0, 0], t[0][0, 0, 0, 0] = 0.5, 0.0  # at 0 the teacher is not active
    s[0][0, 0, 1, 0], t[0][0, 0, 1, 0] = m, 1.0  # at the margin nothing is left to pay
    total = 0.0
    for i, n in enumerate([3, 3, 3]):
        stage = 0.0
        for a, b in zip(s[i].flatten().tolist(), t[i].flatten().tolist(), strict=True):
            if b <= 0 and a > -m:
                stage += (a + m) ** 2
            if b > 0 and a <= m:
                stage += (a - m) ** 2
        total += 2 ** (i - n + 1) * stage
    assert float(ab_loss(s, t, m)) == pytest.approx(3 / 1000 * total / 2, rel=1e-12)


def test_ab_weighs_the_last_stage_fully_and_halves_down():
    s, t = [torch.zeros(1, 1, 1, 1, dtype=torch.float64)] * 4, [torch.ones(1, 1, 1, 1, dtype=torch.float64)] * 4
    met = [torch.ones(1, 1, 1, 1, dtype=torch.float64)] * 4
    alone = [ab_loss([s[i] if i == k else met[i] for i in range(4)], t) for k in range(4)]
    assert [float(x) / 0.003 for x in alone] == pytest.approx([1 / 8, 1 / 4, 1 / 2, 1])


def test_ab_sees_only_the_sign_of_the_teacher():
    s, t = [maps(2, 3, 4, 4)], [maps(2, 3, 4, 4, seed=1)]
    assert torch.equal(ab_loss(s, t), ab_loss(s, [100 * t[0]]))
    assert torch.equal(ab_loss(s, t), ab_loss(s, [t[0].sign()]))
    assert not torch.equal(ab_loss(s, t), ab_loss(s, [-t[0]]))


def test_ab_is_zero_beyond_the_margin_and_pulls_nowhere_else():
    t = maps(2, 3, 4, 4)
    s = (t.sign() * (1.0 + torch.rand_like(t))).requires_grad_()
    loss = ab_loss([s], [t])
    loss.backward()
    assert loss == 0
    assert torch.equal(s.grad, torch.zeros_like(s))
    assert ab_loss([0.5 * t.sign()], [t]) > 0


def test_ab_divides_by_the_batch():
    s, t = maps(1, 3, 4, 4), maps(1, 3, 4, 4, seed=1)
    torch.testing.assert_close(ab_loss([s.repeat(5, 1, 1, 1)], [t.repeat(5, 1, 1, 1)]), ab_loss([s], [t]))


def test_ab_connectors_stand_only_where_shapes_differ():
    same = a_distiller(AB(), "equal").methods[0]
    assert [type(part) for part in same.connectors] == [nn.Identity, nn.Identity]
    assert list(same.parameters()) == []
    wide = Distiller(create_model("resnet8_tiny", num_classes=3), create_model("resnet8", num_classes=3), AB())
    counts = [sum(p.numel() for p in part.parameters()) for part in wide.methods[0].connectors]
    assert counts == [d * e + e + 2 * e for d, e in ((8, 16), (16, 32), (32, 64))]  # 1x1 with bias, BN
    for part in wide.methods[0].connectors:
        assert [type(layer) for layer in part] == [nn.Conv2d, nn.BatchNorm2d]


@pytest.mark.parametrize("pair", ["smaller", "larger"])
def test_ab_connectors_give_the_teachers_shape(pair):
    distiller = a_distiller(AB(), pair)
    d, (h, w) = 8, ((2, 2) if pair == "smaller" else (8, 8))
    for part in distiller.methods[0].connectors:
        assert part(torch.zeros(2, d, h, w)).shape == (2, 10, 4, 4)


def test_ab_reads_before_the_activation():
    distiller = a_distiller(AB()).eval()
    batch = a_stream()[0]
    student, teacher = distiller.student, distiller.teacher

    def preacts(net: Net) -> list[Tensor]:
        found, x = [], net.first(batch.x)
        for block in net.last:
            found.append(block.bn(block.conv(x)) + block.shortcut(x))
            x = found[-1].relu()
        return found

    with torch.no_grad():
        torch.testing.assert_close(distiller(batch).terms["ab"], ab_loss(preacts(student), preacts(teacher)))


# ------------------------------------------------------------------------------------------------ FSP


@pytest.mark.parametrize("size", [(2, 3), (4, 6), (1, 1)])
def test_fsp_matrix_is_the_mean_product_over_positions(size):
    lower, upper = maps(2, 3, 4, 6), maps(2, 5, *size, seed=1)
    small = pooled_by_hand(lower, *size)
    expected = torch.zeros(2, 5, 3, dtype=torch.float64)
    for b in range(2):
        for e in range(5):
            for d in range(3):
                products = [float(upper[b, e, i, j] * small[b, d, i, j]) for i in range(size[0]) for j in range(size[1])]
                expected[b, e, d] = sum(products) / len(products)
    torch.testing.assert_close(fsp_matrix(lower, upper), expected, rtol=1e-12, atol=1e-14)


def test_fsp_loss_is_its_formula():
    shapes = [(2, 3, 8, 4), (2, 4, 8, 4), (2, 5, 4, 2), (2, 2, 1, 1)]
    s, t = ([maps(*shape, seed=seed + i) for i, shape in enumerate(shapes)] for seed in (0, 10))
    total = 0.0
    for k in range(3):
        G_S, G_T = (fsp_matrix(f[k], f[k + 1]) for f in (s, t))
        b, e, d = G_S.shape
        total += sum(
            float(G_S[i, j, m] - G_T[i, j, m]) ** 2 / (b * e * d) for i in range(b) for j in range(e) for m in range(d)
        )
    assert float(fsp_loss(s, t)) == pytest.approx(total, rel=1e-12)


def test_fsp_knows_no_position():
    lower, upper = maps(2, 3, 4, 4), maps(2, 5, 4, 4, seed=1)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    moved = [f.flatten(2)[:, :, order].reshape(f.shape) for f in (lower, upper)]
    torch.testing.assert_close(fsp_matrix(*moved), fsp_matrix(lower, upper))
    torch.testing.assert_close(fsp_matrix(upper, lower), fsp_matrix(lower, upper).transpose(1, 2))


def test_fsp_of_equal_networks_is_zero():
    teacher = a_teacher()
    distiller = a_distiller(FSP(), student=copy.deepcopy(teacher), teacher=teacher).eval()
    assert distiller(a_stream()[0]).terms["fsp"] == 0
    nn.init.normal_(distiller.student.last[1].conv.weight)
    assert distiller(a_stream()[0]).terms["fsp"] > 0


def test_fsp_reads_stem_and_stages():
    distiller = a_distiller(FSP()).eval()
    batch = a_stream()[0]

    def features(net: Net) -> list[Tensor]:
        stem = net.first(batch.x)
        return [stem, net.last[0](stem), net.last(stem)]

    with torch.no_grad():
        expected = fsp_loss(features(distiller.student), features(distiller.teacher))
        torch.testing.assert_close(distiller(batch).terms["fsp"], expected)


# ------------------------------------------------------------------------------------------------ SimKD


@pytest.mark.parametrize(("size_S", "size_T"), [((4, 4), (4, 4)), ((2, 4), (4, 4)), ((6, 4), (3, 2)), ((4, 2), (2, 4))])
def test_simkd_loss_is_the_mean_squared_error_of_fitted_maps(size_S, size_T):
    s, t = maps(2, 3, *size_S), maps(2, 3, *size_T, seed=1)
    size = (min(size_S[0], size_T[0]), min(size_S[1], size_T[1]))
    a, b = pooled_by_hand(s, *size).flatten().tolist(), pooled_by_hand(t, *size).flatten().tolist()
    expected = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a)
    assert float(simkd_loss(s, t)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("d_S", "d_T", "f", "extra"),
    [
        (256, 256, 2, 214_016),  # RN32x4-RN8x4, as published
        (160, 2048, 2, 11_706_368),  # RN50-MNV2 from its map of 160 channels, as published
        (3, 8, 4, 3 * 2 + 4 + 9 * 4 + 4 + 2 * 8 + 16),
    ],
)
def test_the_projectors_size(d_S, d_T, f, extra):
    with torch.device("meta"):
        projector = Projector(d_S, d_T, f=f)
    assert sum(parameter.numel() for parameter in projector.parameters()) == extra
    assert not any(key.endswith("bias") for key, value in projector.named_parameters() if value.ndim == 4)


def test_what_simkd_adds_to_resnet8x4_is_the_projector():
    bare = create_model("resnet8x4", num_classes=100)
    before = sum(parameter.numel() for parameter in bare.parameters())
    student = Distiller(bare, create_model("resnet32x4", num_classes=100), SimKD()).export()
    assert sum(parameter.numel() for parameter in student.parameters()) == before + 214_016 == 1_233_540 + 214_016


def test_the_projector_computes_its_definition():
    projector = Projector(3, 6, f=2).double().eval()
    for module in projector.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 1.5)
    x = y = maps(2, 3, 4, 4)
    convs = [module for module in projector.modules() if isinstance(module, nn.Conv2d)]
    norms = [module for module in projector.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [tuple(conv.weight.shape) for conv in convs] == [(3, 3, 1, 1), (3, 3, 3, 3), (6, 3, 1, 1)]
    for conv, bn in zip(convs, norms, strict=True):
        y = F.conv2d(y, conv.weight, padding=conv.weight.shape[-1] // 2)
        y = F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias).relu()
    torch.testing.assert_close(projector(x), y)


def test_the_projector_pools_to_the_smaller_map_and_never_enlarges():
    pooling, plain = Projector(3, 4, size=(2, 3)).eval(), Projector(3, 4).eval()
    plain.load_state_dict(pooling.state_dict())
    x = torch.randn(2, 3, 4, 6)
    torch.testing.assert_close(pooling(x), plain(pooled_by_hand(x, 2, 3)))
    torch.testing.assert_close(pooling(x[:, :, :1, :2]), plain(x[:, :, :1, :2]))


@pytest.mark.parametrize("pair", ["equal", "smaller", "larger"])
def test_the_student_predicts_as_simkd_does(pair):
    distiller = a_distiller(SimKD(), pair).eval()
    student, teacher, x = distiller.student, distiller.teacher, images(4)[0]
    with torch.no_grad():
        f_T = teacher.last(teacher.first(x))
        own = nn.Sequential(*list(student.last)[:2])(student.first(x))
        if pair == "larger":
            own = pooled_by_hand(own, 4, 4)
        f_S = student.last.kd_projector(own)
        assert f_S.shape[1:] == (10, *((2, 2) if pair == "smaller" else (4, 4)))
        torch.testing.assert_close(student(x), teacher.fc(f_S.mean(dim=(2, 3))))
        torch.testing.assert_close(distiller(a_stream(n=4, batch=4)[0]).terms["simkd"], simkd_loss(f_S, f_T))


def test_a_student_that_projects_to_the_teachers_map_answers_as_the_teacher():
    distiller = a_distiller(SimKD(), "smaller").eval()
    teacher, x = distiller.teacher, images(4)[0]
    with torch.no_grad():
        f_T = teacher.last(teacher.first(x))
        distiller.student.last.kd_projector.forward = lambda _: f_T
        torch.testing.assert_close(distiller.student(x), teacher(x))


@pytest.mark.parametrize("weights", [{"ce": 0.0}, {"ce": 1.0}])
def test_the_borrowed_classifier_is_a_copy_and_is_never_trained(weights):
    distiller = a_distiller(SimKD(), "smaller", weights=weights)
    classifier = distiller.student.fc
    before = copy.deepcopy(classifier.state_dict())
    assert same_state(before, distiller.teacher.fc.state_dict())
    assert classifier.weight.data_ptr() != distiller.teacher.fc.weight.data_ptr()
    optimizer = torch.optim.SGD(distiller.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    steps(distiller, a_stream(), optimizer)
    assert same_state(before, classifier.state_dict())
    assert classifier.weight.grad is None


def test_simkd_keeps_a_classifier_without_bias():
    teacher = a_teacher()
    teacher.fc = nn.Linear(10, 3, bias=False)
    student = a_distiller(SimKD(), "smaller", teacher=teacher).export()
    assert [key for key in student.state_dict() if key.startswith("fc")] == ["fc.weight"]


def test_a_simkd_student_can_teach_the_next():
    teacher = a_distiller(SimKD(), "smaller").export()
    next_one = a_distiller(SimKD(), "equal", teacher=teacher)
    assert torch.equal(next_one.student.fc.weight, teacher.fc.weight)
    assert next_one(a_stream()[0]).terms["simkd"] > 0


@pytest.mark.slow
def test_the_simkd_student_goes_through_torch_export():
    student, x = a_distiller(SimKD(), "larger").export(), images(2)[0]
    program = torch.export.export(student, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    x = images(5, seed=5)[0]
    torch.testing.assert_close(program.module()(x), student(x))


class Fails(Method):
    name = "fails"

    def build(self, student, teacher):
        raise LetkdError("on purpose")


def test_when_a_later_method_cannot_be_built_the_student_is_as_it_was():
    student = a_net(4, seed=0)
    classifier, before, x = student.fc, copy.deepcopy(student.state_dict()), images(2)[0]
    expected = student.eval()(x)
    with pytest.raises(LetkdError, match="on purpose"):
        a_distiller([SimKD(), Fails()], student=student)
    assert student.fc is classifier
    assert same_state(student.state_dict(), before)
    assert torch.equal(student(x), expected)
    assert a_distiller(SimKD(), student=student).student.fc is not classifier


# ------------------------------------------------------------------------------------------------ all three


@every_case
def test_every_trainable_parameter_gets_a_gradient(method, pair):
    distiller = a_distiller(method(), pair)
    distiller(a_stream()[0]).loss.backward()
    for key, parameter in distiller.named_parameters():
        if not parameter.requires_grad:
            assert (method, key.split(".")[1]) == (SimKD, "fc")
            continue
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        # A bias before BN has no effect, so no gradient but for rounding.
        assert parameter.grad.abs().max() > 0 or key.endswith("0.bias"), key


@pytest.mark.slow
@every_case
def test_the_loss_falls_on_one_batch(method, pair):
    distiller = a_distiller(method(), pair, weights={"ce": 0.0})
    optimizer = torch.optim.SGD(distiller.parameters(), lr=0.02, momentum=0.9)
    losses = steps(distiller, a_stream()[:1] * 25, optimizer)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(("method", "pair"), [(AB, "smaller"), (FSP, "equal")])
def test_the_first_phase_leaves_the_classifier_alone_and_the_second_the_method(method, pair):
    distiller = a_distiller(method(), pair)
    name = method.name
    distiller.set_weights({"ce": 0.0, name: 1.0})
    step = distiller(a_stream()[0])
    step.loss.backward()
    assert torch.equal(step.loss, step.terms[name])
    silent = {key for key, parameter in distiller.named_parameters() if parameter.grad is None}
    assert silent == {"student.fc.weight", "student.fc.bias"}

    distiller.zero_grad()
    distiller.set_weights({"ce": 1.0, name: 0.0})
    distiller.teacher.forward = None
    step = distiller(a_stream()[0])
    step.loss.backward()
    assert set(step.terms) == {"ce"}
    silent = {key for key, parameter in distiller.named_parameters() if parameter.grad is None}
    assert silent == {key for key, _ in distiller.named_parameters() if key.startswith("methods.")}


@every_case
def test_losses_are_in_float32_under_autocast_and_close(method, pair):
    distiller = a_distiller(method(), pair)
    batch = a_stream()[0]
    exact = distiller(batch).terms[method.name]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        term = distiller(batch).terms[method.name]
    assert term.dtype == torch.float32
    torch.testing.assert_close(term, exact, rtol=0.1, atol=0.01)


def test_fsp_matrices_are_not_multiplied_in_half_precision():
    lower, upper = torch.randn(2, 3, 8, 8), torch.randn(2, 5, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = fsp_matrix(lower, upper)
    torch.testing.assert_close(product, fsp_matrix(lower.double(), upper.double()).float(), rtol=1e-5, atol=1e-6)


@every_case
def test_only_simkd_stays_in_the_exported_student(method, pair):
    student = a_distiller(method(), pair).export()
    added = {key.split(".")[1] for key in student.state_dict().keys() - STUDENTS[pair]().state_dict().keys()}
    assert added == ({"kd_projector"} if method is SimKD else set())
    assert isinstance(student.fc, FrozenLinear) == (method is SimKD)


def test_published_defaults_and_recipes():
    recipes = {name: resolve(f"cifar100/rn56-rn20/{name}") for name in ("ab", "fsp", "simkd")}
    for method in (AB, FSP, SimKD):
        table = recipes[method.name].methods[method.name]
        defaults = {key: parameter.default for key, parameter in inspect.signature(method).parameters.items()}
        assert table == defaults
        assert isinstance(method.from_recipe(table), method)
    assert (AB().m, SimKD().f) == (1.0, 2)
    for name in ("ab", "fsp"):
        (phase,) = recipes[name].phases
        assert (phase.epochs, phase.weights, phase.lr) == (30, {"ce": 0.0, name: 1.0}, None)
        assert (recipes[name].weights, recipes[name].train.epochs) == ({"ce": 1.0, name: 0.0}, 240)
    assert (recipes["simkd"].weights, recipes["simkd"].phases) == ({"ce": 0.0, "simkd": 1.0}, [])


class Flat(Net):
    """A classifier over every pixel instead of their mean."""

    def __init__(self, d: int):
        super().__init__(d)
        self.fc = nn.Linear(2 * d * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.last(self.first(x)).flatten(1))


class Scaled(nn.Linear):
    """No plain linear layer any more."""

    def forward(self, input: Tensor) -> Tensor:
        return 3 * super().forward(input)


def with_head(head: nn.Module, **options) -> Net:
    net = a_net(4, seed=0, **options)
    net.fc = head
    return net


def without(*roles: str) -> dict[str, Tap | str]:
    return {role: tap for role, tap in TAPS.items() if role not in roles}


@pytest.mark.parametrize(
    ("method", "options", "error", "sentence"),
    [
        (
            AB,
            {"student_taps": without("stage1.preact", "stage2.preact")},
            UnsupportedPair,
            r"AB compares maps before their activation, and the student Net has none at stage1, stage2; .*\(stage1\.preact\)$",
        ),
        (
            AB,
            {"teacher_taps": without("stage1", "stage1.preact", "stage2", "stage2.preact")},
            UnsupportedPair,
            r"the teacher Net has none; if it has such maps, name them by taps \(stage1\.preact\)$",
        ),
        (AB, {"student_taps": without("stage2.preact")}, UnsupportedPair, r"none at stage2; .*\(stage2\.preact\)$"),
        (
            AB,
            {"teacher_taps": without("stage2", "stage2.preact")},
            UnsupportedPair,
            "the student Net has 2 pre-activation maps, the teacher Net 1; name equally many by taps",
        ),
        (
            FSP,
            {"pair": "smaller"},
            UnsupportedPair,
            "from stem to last stage the student Net has 4, 8, 8 and the teacher Net 5, 10, 10",
        ),
        (FSP, {"teacher_taps": without("stage2")}, UnsupportedPair, "has stage1, stage2 and the teacher Net stage1,"),
        (SimKD, {"student_taps": without("pooled")}, TapError, "the student Net has no tap for the role 'pooled'"),
        (
            SimKD,
            {"student": with_head(nn.Sequential(nn.Linear(8, 3)))},
            UnsupportedPair,
            "plain nn.Linear .* in the student Net from 8 to 3; but the module of the role 'pooled', 'fc', is a Sequential$",
        ),
        (SimKD, {"student": with_head(Scaled(8, 3))}, UnsupportedPair, "'fc', is a Scaled from 8 to 3$"),
        (SimKD, {"teacher": Flat(5)}, UnsupportedPair, "in the teacher Flat from 10 to 3; .* 'fc', is a Linear from 160 to 3$"),
        (
            SimKD,
            {"student_taps": {**TAPS, "pooled": "last"}},
            UnsupportedPair,
            "but the module of the role 'pooled', 'last', is a Sequential",
        ),
        (lambda: SimKD(11), {}, UnsupportedPair, "d_T / f = 10 / 11 channels; f must be from 1 to 10"),
        (lambda: SimKD(0), {}, UnsupportedPair, "f must be from 1 to 10"),
    ],
)
def test_a_pair_that_cannot_be_served_is_told_why_and_left_alone(method, options, error, sentence):
    options = dict(options)
    student = options.pop("student", None) or STUDENTS[options.pop("pair", "equal")]()
    before, children = copy.deepcopy(student.state_dict()), dict(student.named_modules())
    with pytest.raises(error, match=sentence) as caught:
        a_distiller(method(), student=student, **options)
    assert "\n" not in str(caught.value)
    assert same_state(student.state_dict(), before)
    assert dict(student.named_modules()) == children


def test_ab_takes_preact_roles_without_the_stages():
    taps = without("stage1", "stage2")
    assert list(a_distiller(AB(), student_taps=taps, teacher_taps=taps).methods[0].reads.student) == [
        "stage1.preact",
        "stage2.preact",
    ]
