"""The Distiller: one loss of named terms, a teacher that is there and not there, and a student that leaves alone."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from letkd import Batch, KDLayer, create_model
from letkd.distiller import Distiller, Step
from letkd.errors import DataError, LetkdError, NotFittedError, TapError
from letkd.functional import pixel_kl
from letkd.inspect.health import health
from letkd.layer.folded import fold_student
from letkd.methods import AT, KD, QUEST, SRD, VID, FitNet, LetKD, ReviewKD, Site, letkd1, letkd2, quest
from letkd.methods.kd import kd_loss
from letkd.supervision import ConvSupervision, KMeansSupervision, SubclassSupervision
from letkd.taps import Tap, Taps
from tests.support.methods import METHODS
from tests.support.pair import SIZE, TAPS, a_distiller, a_stream, a_student, a_teacher, images, same_state, steps

ANY = {"example": torch.zeros(1, 3, *SIZE)}


def test_without_a_teacher_it_is_plain_cross_entropy():
    student, batch = a_student(), a_stream()[0]
    twin = copy.deepcopy(student)
    step = Distiller(student)(batch)
    assert isinstance(step, Step)
    assert set(step.terms) == {"ce"}
    assert torch.equal(step.logits, twin(batch.x))
    torch.testing.assert_close(step.loss, F.cross_entropy(step.logits, batch.y))
    assert Distiller(student).teacher is None
    assert Distiller(student).fit([]).export()(batch.x).shape == (8, 3)


def test_a_teacher_without_methods_is_not_even_run():
    distiller = a_distiller([])
    distiller.teacher.forward = None
    assert set(distiller(a_stream()[0]).terms) == {"ce"}


class WarmKD(KD):
    """KD under another name, next to KD."""

    name = "warm-kd"


def test_a_method_made_from_another_has_its_own_term_and_weight():
    distiller = a_distiller([KD(T=4.0), WarmKD(T=1.0)], weights={"ce": 1.0, "kd": 0.5, "warm-kd": 3.0})
    step = distiller(a_stream()[0])
    assert list(step.terms) == ["ce", "kd", "warm-kd"]
    assert step.terms["kd"] != step.terms["warm-kd"]
    torch.testing.assert_close(step.loss, step.terms["ce"] + 0.5 * step.terms["kd"] + 3 * step.terms["warm-kd"])


@pytest.mark.parametrize(
    ("terms", "match"),
    [
        ({"kd": torch.tensor(1.0)}, "returned 'kd', but term_names.. names 'warm-kd', so the weight of 'warm-kd' is unclear"),
        ({"warm-kd": torch.tensor(1.0), "more": torch.tensor(1.0)}, "so the weight of 'more' is unclear; use the same names"),
        ({}, "returned no term, but"),
        (torch.tensor(1.0), "must return loss terms by name, {name: scalar}, not a Tensor"),
        ({"warm-kd": torch.ones(8)}, r"the method warm-kd must return a scalar tensor, but it returned shape \[8\]"),
    ],
)
def test_terms_without_a_weight_or_a_sum_are_refused(terms, match, monkeypatch):
    monkeypatch.setattr(WarmKD, "terms", lambda self, view: terms)
    with pytest.raises(LetkdError, match=match):
        a_distiller(WarmKD(), weights={"ce": 0.0})(a_stream()[0])


@pytest.mark.parametrize("way", ["frozen", "checkpointed"])
def test_a_term_that_trains_nothing_is_refused(way):
    student = a_student()
    if way == "frozen":
        student.first.requires_grad_(False)
        student.last.requires_grad_(False)
    else:
        last = student.last.forward
        student.last.forward = lambda x: checkpoint(last, x, use_reentrant=True)
        student.first.requires_grad_(False)
    distiller = Distiller(
        student, a_teacher(), AT(), student_taps={"stage1": "last.1"}, teacher_taps={"stage1": "last.1"}, **ANY
    )
    with pytest.raises(LetkdError, match="the term 'at' has no gradient: the student's features that it reads are frozen or"):
        distiller(a_stream()[0])
    with torch.no_grad():
        distiller(a_stream()[0])
    distiller.eval()(a_stream()[0])


@pytest.mark.parametrize("wrap", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_student_whose_weights_are_computed_in_hooks_is_exported(wrap):
    student = a_student()
    wrap(student.first[0])
    distiller = Distiller(student, a_teacher(), letkd1(K=4), student_taps=TAPS, teacher_taps=TAPS, **ANY).fit(a_stream())
    distiller(a_stream()[0]).loss.backward()
    x = images(4)[0]
    shipped = fold_student(distiller.export())
    torch.testing.assert_close(shipped(x), distiller.student.eval()(x))


def test_a_layer_under_two_names_is_folded():
    student = a_student()
    student.alias = nn.Sequential(student.first, student.last)
    distiller = Distiller(student, a_teacher(), letkd1(K=4), student_taps=TAPS, teacher_taps=TAPS, **ANY).fit(a_stream())
    x = images(4)[0]
    shipped = fold_student(distiller.export())
    assert not any(isinstance(module, KDLayer) for module in shipped.modules())
    torch.testing.assert_close(shipped(x), distiller.student.eval()(x))


def test_a_student_or_teacher_may_answer_with_an_object():
    class Answers(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return SimpleNamespace(logits=self.net(x), other=1)

    batch = a_stream()[0]
    distiller = Distiller(Answers(a_student()).eval(), Answers(a_teacher()), KD(), example=torch.zeros(1, 3, *SIZE))
    plain = Distiller(a_student().eval(), a_teacher(), KD(), example=torch.zeros(1, 3, *SIZE))
    assert torch.equal(distiller(batch).loss, plain(batch).loss)


@pytest.mark.parametrize("form", [tuple, list, lambda parts: tuple(parts)[:2], lambda parts: Batch(*parts, epoch=3)])
def test_a_batch_comes_as_loaders_give_it(form):
    distiller = a_distiller(KD())
    distiller.eval()
    batch = a_stream()[0]
    assert torch.equal(distiller(form([batch.x, batch.y, batch.index])).loss, distiller(batch).loss)


def test_weights_multiply_terms_and_one_is_the_default():
    batch = a_stream()[0]
    plain, weighted = (a_distiller(letkd1(6), weights=w).fit(a_stream()) for w in (None, {"ce": 0.1, "kd/penultimate": 3.0}))
    step, other = plain(batch), weighted(batch)
    torch.testing.assert_close(step.loss, step.terms["ce"] + step.terms["kd/penultimate"])
    for name, term in step.terms.items():
        assert torch.equal(other.terms[name], term)
    torch.testing.assert_close(other.loss, 0.1 * step.terms["ce"] + 3 * step.terms["kd/penultimate"])


@pytest.mark.parametrize("fused", [True, False])
def test_a_term_of_weight_0_is_left_out_and_needs_no_fit(fused):
    weights = {"kd/intermediate": 0.0}
    distiller = a_distiller(letkd2(6, 2, alpha_inter=0.0), weights=weights, fused=fused).fit(
        a_stream(), terms=["kd/penultimate"]
    )
    step = distiller(a_stream()[0])
    step.loss.backward()
    assert list(step.terms) == ["ce", "kd/penultimate"]
    torch.testing.assert_close(step.loss, step.terms["ce"] + step.terms["kd/penultimate"])
    assert distiller.student.last[0].kd_intermediate.omega.weight.grad is None
    assert distiller.student.last.kd_penultimate.omega.weight.grad.any()
    distiller.set_weights({"kd/intermediate": 1.0})
    with pytest.raises(NotFittedError):
        distiller(a_stream()[0])


def test_methods_combine_as_a_list():
    batch = a_stream()[0]
    both = a_distiller([KD(2.0), letkd1(6)]).fit(a_stream())
    alone = a_distiller(letkd1(6)).fit(a_stream())
    step = both(batch)
    assert list(step.terms) == ["ce", "kd", "kd/penultimate"]
    assert torch.equal(step.terms["kd/penultimate"], alone(batch).terms["kd/penultimate"])
    with torch.no_grad():
        torch.testing.assert_close(step.terms["kd"], kd_loss(step.logits, both.teacher(batch.x), 2.0))


def test_teacher_and_student_see_the_same_batch():
    seen = {}
    distiller, batch = a_distiller(KD()), a_stream()[0]
    distiller(batch)  # with copies, to see whether they are overwritten
    for who, model in (("student", distiller.student), ("teacher", distiller.teacher)):
        model.register_forward_pre_hook(lambda _, args, who=who: seen.setdefault(who, args[0]))
    distiller(batch)
    assert seen["student"] is seen["teacher"] is batch.x


def test_the_teacher_moves_along_but_is_no_part_of_the_module():
    distiller = a_distiller(letkd2(6, 2))
    teacher = distiller.teacher
    assert not any(module is teacher for module in distiller.modules())
    distiller.double()
    assert {parameter.dtype for parameter in teacher.parameters()} == {torch.float64}
    distiller.to("meta")
    assert {parameter.device.type for parameter in teacher.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in teacher.buffers()} == {"meta"}


def test_building_does_not_train_or_run_bn_of_the_student():
    student = a_student().train()
    before = copy.deepcopy(student.state_dict())
    distiller = Distiller(student, a_teacher(), letkd2(6, 2), student_taps=TAPS, teacher_taps=TAPS, example=images(1)[0])
    after = {key: value for key, value in distiller.student.state_dict().items() if ".kd_" not in key}
    assert same_state(after, before)
    assert all(module.training for module in student.modules())
    assert all(parameter.grad is None for parameter in student.parameters())


def test_layers_stand_behind_their_taps_with_the_sites_settings():
    settings = {"alpha": 0.2, "scale_omega": 2.0, "scale_nu": 0.5, "beta": -2.0, "normalize_value_input": False}
    sites = [Site("intermediate", SubclassSupervision(2), **settings), Site("penultimate", KMeansSupervision(6))]
    student = a_distiller(LetKD(sites)).student
    inter, penult = student.last[0].kd_intermediate, student.last.kd_penultimate
    for layer, K in ((inter, 6), (penult, 6)):
        assert isinstance(layer, KDLayer)
        assert tuple(layer.omega.weight.shape) == (K, 10, 1, 1)
        assert tuple(layer.nu.weight.shape) == (10, K, 1, 1)
    assert (inter.alpha, inter.omega.scale.item(), inter.nu.scale.item(), inter.nu.normalize_input) == (0.2, 2.0, 0.5, False)
    assert (penult.alpha, penult.omega.scale.item(), penult.nu.scale.item(), penult.nu.normalize_input) == (1.0, 3.0, 1.0, True)
    assert (inter.bn.bias.tolist(), penult.bn.bias.tolist()) == ([-2.0] * 6, [0.0] * 6)


def test_quest_adds_a_predictor_beside_the_student_and_nothing_inside():
    distiller = a_distiller(QUEST([Site("penultimate", KMeansSupervision(6), scale_omega=2.0)]))
    assert distiller.methods[0].predictor["penultimate"].scale.item() == 2.0
    assert list(distiller.student.state_dict()) == list(a_student().state_dict())
    trained = {key for key, _ in distiller.named_parameters() if not key.startswith("student.")}
    assert trained == {"methods.0.predictor.penultimate.weight", "methods.0.predictor.penultimate.scale"}


def test_zoo_models_need_neither_taps_nor_an_example():
    student, teacher = create_model("resnet8_tiny", num_classes=3), create_model("resnet14_tiny", num_classes=3)
    x, y = images(6, size=(32, 32))
    distiller = Distiller(student, teacher, letkd2(8, 2)).fit([(x, y)])
    step = distiller((x, y))
    assert set(step.terms) == {"ce", "kd/intermediate", "kd/penultimate"}
    # resnet8 has one block a stage: the two layers stand behind each other.
    assert [key for key in student.state_dict() if key.endswith("omega.weight")] == [
        "layer3.0.kd_intermediate.omega.weight",
        "layer3.kd_penultimate.omega.weight",
    ]
    assert distiller.export()(x).shape == (6, 3)


def test_a_role_of_ones_own_anywhere_in_the_networks():
    taps = {"early.half": Tap("first"), "late": "last.1.bn"}
    method = LetKD([Site("early.half", KMeansSupervision(4)), Site("late", KMeansSupervision(5))])
    distiller = a_distiller(method, student_taps=taps, teacher_taps=taps).fit(a_stream())
    optimizer = torch.optim.SGD(distiller.parameters(), lr=0.02)
    losses = steps(distiller, a_stream()[:1] * 10, optimizer)
    assert losses[-1] < losses[0]
    assert set(distiller(a_stream()[0]).terms) == {"ce", "kd/early.half", "kd/late"}
    assert "last.1.bn.kd_late.omega.weight" in distiller.student.state_dict()


def test_the_teachers_3x3_convolution_may_have_other_channels_and_size_than_its_map():
    taps = {**TAPS, "penultimate.conv3x3": "first.0"}  # 5 channels of 8x8, where the map has 10 of 4x4
    distiller = a_distiller(LetKD([Site("penultimate", ConvSupervision())]), teacher_taps=taps)
    batch = a_stream()[0]
    step = distiller(batch)
    with torch.no_grad():
        p_T = torch.softmax(F.avg_pool2d(distiller.teacher.first[0](batch.x), 2), dim=1)
        layer = distiller.student.last.kd_penultimate
        layer.fused = False  # so that there is an a to read
        _, f = Taps(distiller.student, {"a": Tap("last.kd_penultimate.omega")})(batch.x)
    assert layer.omega.weight.shape[0] == 5
    torch.testing.assert_close(step.terms["kd/penultimate"].detach(), pixel_kl(p_T, f["a"]))


def test_fit_pools_the_teachers_maps_to_the_students_size():
    distiller = a_distiller(quest(6), "unequal").fit(a_stream())
    teacher, supervision = distiller.teacher, distiller.fittings()["penultimate"].part
    with torch.no_grad():
        stream = [(F.avg_pool2d(teacher.last(teacher.first(b.x)), 2), b.y, b.index) for b in a_stream()]
    alone = KMeansSupervision(6).fit(stream)
    assert same_state(supervision.state_dict(), alone.state_dict())


def test_fit_makes_one_pass_and_asks_no_gradient_of_anyone():
    passes = []

    class Loader:
        def __iter__(self):
            passes.append(1)
            return iter(a_stream())

    distiller = a_distiller(letkd2(6, 2)).fit(Loader())
    assert passes == [1]
    assert all(parameter.grad is None for parameter in distiller.parameters())
    assert not any(buffer.requires_grad for buffer in distiller.buffers())


def test_fit_of_a_method_without_offline_part_does_not_touch_the_loader():
    def never():
        raise AssertionError("the loader was read")
        yield

    a_distiller(KD()).fit(never())


def test_fit_takes_the_loaders_index_so_that_its_order_does_not_matter():
    one, two = (a_distiller(letkd2(6, 2)).fit(stream) for stream in (a_stream(), list(reversed(a_stream()))))
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, rtol=1e-4, atol=1e-4)


def test_the_teachers_buffers_never_enter_even_when_taps_are_read_in_train_mode():
    distiller = a_distiller(QUEST([Site("penultimate", KMeansSupervision(6))])).fit(a_stream()).train()
    before = copy.deepcopy(distiller.teacher.state_dict())
    for batch in a_stream():
        distiller(batch)
    assert same_state(distiller.teacher.state_dict(), before)


def test_export_leaves_the_distiller_as_it_was():
    distiller = a_distiller(letkd2(6, 2)).fit(a_stream()).train()
    distiller(a_stream()[0]).loss.backward()
    before = copy.deepcopy(distiller.state_dict())
    student = distiller.export()
    nn.init.zeros_(student.fc.weight)
    assert distiller.training
    assert distiller.student.training
    assert same_state(distiller.state_dict(), before)
    assert all(parameter.grad is not None for parameter in distiller.student.parameters())


def test_an_exported_student_trains_on():
    student = a_distiller(letkd2(6, 2)).fit(a_stream()).export().train()
    x, y = images(6)
    F.cross_entropy(student(x), y).backward()
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_what_is_fitted_is_told(said):
    a_distiller(quest(6)).fit(a_stream())
    facts = r"\(pixels seen 384, pixels clustered 384, mean of largest label at tau 1 0\.\d+, mean perplexity \d[\d.]*, "
    facts += r"labels per pixel above 1e-07 of it \d[\d.]*, mass of the other labels [\d.e-]+\)"
    told = rf"fitted KMeansSupervision\(K=6, tau=1\) at penultimate {facts}\n"
    assert re.fullmatch(told, said())


def test_the_teacher_runs_in_full_precision_under_autocast():
    distiller, batch = a_distiller(letkd2(6, 2)), a_stream()[0]
    before = distiller.run_teacher(batch.x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = distiller.run_teacher(batch.x)
    assert before.keys() == within.keys()
    assert all(torch.equal(f, within[role]) for role, f in before.items())


def test_a_teacher_in_bf16_gives_rounded_features_in_the_type_of_the_images_and_is_fitted_without_rounding():
    single, low = a_distiller(letkd2(6, 2)).fit(a_stream()), a_distiller(letkd2(6, 2), bf16_teacher=True).fit(a_stream())
    fitted = [[buffer for part in made.fittings().values() for buffer in part.part.buffers()] for made in (single, low)]
    assert all(torch.equal(one, two) for one, two in zip(*fitted, strict=True))
    x = a_stream()[0].x
    for role, f in single.run_teacher(x).items():
        rounded = low.run_teacher(x)[role]
        assert rounded.dtype == f.dtype == torch.float32
        assert 0 < (rounded - f).norm() / f.norm() < 0.02, role
    assert torch.isfinite(low(a_stream()[0]).loss)


class Branches(nn.Module):
    """A classifier with a side branch beside its head, or a head that its features reach without a gradient."""

    def __init__(self, *, detached: bool = False, zero_head: bool = False):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=4), nn.ReLU())
        self.side = nn.Conv2d(6, 6, 1)
        self.last = nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU())
        self.fc = nn.Linear(6, 3)
        self.detached = detached
        if zero_head:
            nn.init.zeros_(self.fc.weight)

    def forward(self, x):
        f = self.body(x)
        self.side(f)
        f = self.last(f)
        return self.fc((f.detach() if self.detached else f).mean(dim=(2, 3)))


def with_layer_at(path: str, student: nn.Module, *, fused: bool, weights=None, **options) -> Distiller:
    example = torch.zeros(1, 3, *SIZE)
    taps = {"student_taps": {"penultimate": path}, "teacher_taps": {"penultimate": "last"}}
    distiller = Distiller(student, Branches(), letkd1(4, **options), example=example, fused=fused, weights=weights, **taps)
    return distiller.fit(a_stream())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("path", "detached"), [("side", False), ("last", True)])
def test_a_kd_layer_that_does_nothing_is_an_error_at_the_first_step(path, detached, fused):
    distiller = with_layer_at(path, Branches(detached=detached), fused=fused)
    with pytest.raises(TapError, match=rf"the KD layer at '{path}\.kd_penultimate' of the student Branches has no effect"):
        distiller(a_stream()[0])


@pytest.mark.parametrize("fused", [True, False])
def test_a_kd_layer_that_does_nothing_by_choice_is_fine(fused):
    for options in ({"alpha": 0.0}, {"weights": {"kd/penultimate": 0.0}}, {"weights": {"ce": 0.0}}):
        with_layer_at("side", Branches(), fused=fused, **options)(a_stream()[0])


@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_that_is_zero_at_first_is_one(fused):
    step = with_layer_at("last", Branches(zero_head=True), fused=fused)(a_stream()[0])
    step.loss.backward()


def test_the_way_to_the_loss_is_looked_for_once():
    distiller = a_distiller(letkd2(6, 2)).fit(a_stream())
    with torch.no_grad():
        distiller(a_stream()[0])  # no graph, no verdict
    assert not distiller._reach.proven
    distiller(a_stream()[0])
    assert distiller._reach.proven == {"last.0.kd_intermediate", "last.kd_penultimate"}
    with distiller._reach.watch(distiller.student, distiller._trained_layers()) as seen:
        distiller.student(a_stream()[0].x)
    assert not seen


def test_a_method_serves_one_distiller():
    method = letkd1(K=6)
    a_distiller(method)
    with pytest.raises(LetkdError, match=r"this LetKD already belongs to another Distiller, .*; create a new one for each"):
        a_distiller(method)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_whose_pair_was_refused_can_be_used_again(name):
    method = METHODS[name]()
    with pytest.raises(LetkdError):
        a_distiller(method, weights={"elsewhere": 1.0})
    again, once = a_distiller(method), a_distiller(METHODS[name]())
    assert {key: value.shape for key, value in again.state_dict().items()} == {k: v.shape for k, v in once.state_dict().items()}
    assert again.student_reads == once.student_reads
    if not again.fittings():
        assert again(a_stream()[0]).loss.isfinite()


def test_what_a_refused_pair_had_more_of_is_forgotten():
    method = VID()
    more = {**TAPS, "stage4": "last", "stage4.preact": TAPS["stage3.preact"]}
    with pytest.raises(LetkdError):
        a_distiller(method, student_taps=more, teacher_taps=more, weights={"elsewhere": 1.0})
    assert set(a_distiller(method).student_reads) == {"stage1", "stage2", "stage3"}
    assert set(method.predictor) == {"stage1", "stage2", "stage3"}


def test_parameters_that_both_networks_have_are_one_sentence():
    student, teacher = a_student(), a_teacher()
    student.last = teacher.last
    with pytest.raises(
        LetkdError, match=r"share 8 parameters \(last\.0\.conv\.weight, .*copy these modules with copy\.deepcopy"
    ):
        a_distiller(KD(), student=student, teacher=teacher)
    teacher.last.requires_grad_(False)
    a_distiller(KD(), student=student, teacher=teacher)(a_stream()[0]).loss.backward()


class Checkpointed(nn.Module):
    """A student that recomputes its last stage in the backward pass."""

    def __init__(self, *, reentrant: bool):
        super().__init__()
        self.net, self.reentrant = a_student(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = checkpoint(self.net.last, self.net.first(x), use_reentrant=self.reentrant)
        return self.net.fc(f.mean(dim=(2, 3)))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("fused", [True, False])
def test_a_kd_layer_without_gradients_is_an_error(fused):
    options = {"student_taps": {"penultimate": "net.last"}, "fused": fused}
    right = a_distiller(letkd1(6), student=Checkpointed(reentrant=False), **options).fit(a_stream())
    right(a_stream()[0]).loss.backward()
    wrong = a_distiller(letkd1(6), student=Checkpointed(reentrant=True), **options).fit(a_stream())
    with pytest.raises(TapError, match="'penultimate' ran without gradients; for checkpointing, pass use_reentrant=False"):
        wrong(a_stream()[0])


@pytest.mark.parametrize("make", [FitNet, VID, ReviewKD, SRD, lambda: quest(6)])
def test_what_a_method_adds_is_on_the_device_of_the_student(make):
    method, device = make(), torch.device("meta")
    student, teacher = a_student().to(device), a_teacher().to(device)
    a_distiller(method, student=student, teacher=teacher, example=torch.zeros(2, 3, 16, 16, device=device))
    assert {parameter.device for parameter in method.parameters()} == {device}


@pytest.mark.parametrize("weight", [-1.0, torch.nan, None, 1e7, "much"])
def test_a_weight_is_a_number_from_zero_on(weight):
    with pytest.raises(LetkdError, match=r"weights \{'kd': .*\}: a weight is a number from 0 to 1,000,000"):
        a_distiller(KD(), weights={"kd": weight})


def test_a_batch_without_images_is_refused():
    x, y = a_stream()[0].x, a_stream()[0].y
    with pytest.raises(DataError, match="the batch has no images; leave out empty batches"):
        a_distiller(KD())((x[:0], y[:0]))


def test_health_without_a_labelled_image_is_empty():
    distiller = a_distiller(letkd2(6, 2)).fit(a_stream())
    batch = a_stream()[0]
    assert health(distiller, batch).keys() == {"intermediate", "penultimate"}
    assert health(distiller, Batch(batch.x, torch.full_like(batch.y, -1))) == {}
