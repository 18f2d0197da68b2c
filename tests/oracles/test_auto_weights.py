"""Automatic weights against gradients taken one by one, in double precision."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.distiller import Distiller, weights
from letkd.errors import LetkdError
from letkd.methods import AT, DKD, KD, TDD, LetKD, Method, Site, letkd1, letkd2, quest
from letkd.supervision import SubclassSupervision
from tests.support.pair import TAPS, Net, a_distiller, a_stream, a_student
from tests.support.tokens import ViT

CASES: dict[str, tuple[Callable[[], Method], dict[str, str | None]]] = {  # where each term is measured; None: the logits
    "kd": (KD, {"kd": None}),
    "quest": (lambda: quest(6), {"kd/penultimate": "last"}),
    "letkd-1": (lambda: letkd1(6), {"kd/penultimate": "kd_penultimate"}),
    "letkd-2": (lambda: letkd2(6, 2), {"kd/intermediate": "kd_intermediate", "kd/penultimate": "kd_penultimate"}),
}
cases = pytest.mark.parametrize("case", CASES)


def stream() -> list[Batch]:
    return [Batch(batch.x.double(), batch.y) for batch in a_stream()]


def distiller_of(make: Callable[[], Method], *, ce: float = 1.0, auto: float | str = 1.0, fused: bool = True) -> Distiller:
    names = next(iter(names for built, names in CASES.values() if built is make), {"at": None})
    distiller = a_distiller(make(), weights={"ce": ce, **dict.fromkeys(names, auto)}, fused=fused).double()
    return distiller.fit(stream()).train()


def norms(distiller: Distiller, batch: Batch, places: dict[str, str | None]) -> dict[str, tuple[float, float]]:
    """Norms of the gradients of the cross-entropy and of each term, by hooks on the student, of one step at a time."""
    found = {}
    for term, place in places.items():
        for name in ("ce", term):
            one, seen = copy.deepcopy(distiller), {}
            path = "fc" if place is None else next(p for p, _ in one.student.named_modules() if p.endswith(place))
            module = one.student.get_submodule(path)
            if "kd_" in path:
                module.register_forward_pre_hook(partial(_keep_input, seen))
            else:
                module.register_forward_hook(partial(_keep_output, seen))
            (gradient,) = torch.autograd.grad(one(batch).terms[name], seen["f"])
            found[term, name] = sum(float(g) ** 2 for g in gradient.flatten().tolist()) ** 0.5
    return {term: (found[term, "ce"], found[term, term]) for term in places}


def _keep_input(seen: dict[str, Tensor], module: nn.Module, args: tuple[Tensor]) -> None:
    seen["f"] = args[0]


def _keep_output(seen: dict[str, Tensor], module: nn.Module, args: tuple, output: Tensor) -> None:
    seen["f"] = output


@cases
@pytest.mark.parametrize("fused", [True, False])
def test_the_gradient_of_a_term_is_the_share_of_the_cross_entropys(case, fused):
    make, places = CASES[case]
    batch = stream()[0]
    expected = norms(distiller_of(make, fused=fused), batch, places)
    distiller = distiller_of(make, ce=0.5, auto="auto:0.25", fused=fused)
    step = distiller(batch)
    found = distiller.auto_weights()
    assert found.keys() == places.keys()
    for term, (ce, kd) in expected.items():
        assert found[term] == pytest.approx(0.25 * 0.5 * ce / kd, rel=1e-9)
    loss = 0.5 * step.terms["ce"] + sum(found[term] * step.terms[term] for term in places)
    torch.testing.assert_close(step.loss, loss)
    step.loss.backward()  # the graph is whole after measuring


def test_a_term_that_reads_several_places_is_measured_at_all_of_them():
    torch.manual_seed(0)
    distiller = distiller_of(AT, auto=1.0)
    assert len(distiller.methods[0].measured_at("at")) > 1
    batch, auto = stream()[0], distiller_of(AT, auto="auto")
    one, features = copy.deepcopy(distiller), {}
    for role in one.methods[0].measured_at("at"):
        path = one.student_reads[role].path
        one.student.get_submodule(path).register_forward_hook(lambda m, a, out, role=role: features.setdefault(role, out))
    terms = one(batch).terms
    ce, at = (torch.autograd.grad(terms[name], [*features.values()], retain_graph=True) for name in ("ce", "at"))
    auto(batch)
    norm = lambda gradients: torch.cat([g.flatten() for g in gradients]).norm()  # noqa: E731
    assert auto.auto_weights()["at"] == pytest.approx(float(norm(ce) / norm(at)), rel=1e-9)


def test_squares_are_averaged_over_the_first_steps_and_constant_afterwards():
    distiller = distiller_of(KD, auto="auto")
    assert distiller.auto is not None
    distiller.auto.steps = 15
    batches, squares = stream(), None
    for k in range(18):
        batch = batches[k % len(batches)]
        now = torch.tensor(norms(distiller, batch, {"kd": None})["kd"], dtype=torch.float64) ** 2 if k < 15 else None
        if now is not None:
            squares = now if squares is None else squares + max(0.1, 1 / (k + 1)) * (now - squares)
        loss = distiller(batch).loss
        assert distiller.auto_weights()["kd"] == pytest.approx(float((squares[0] / squares[1]).sqrt()), rel=1e-9)
        loss.backward()
        with torch.no_grad():
            for parameter in distiller.parameters():
                parameter -= 0.1 * (0 if parameter.grad is None else parameter.grad)
                parameter.grad = None
    assert distiller.auto.done


def test_training_resumes_with_the_same_weight():
    def work(distiller: Distiller, first: int, last: int) -> Distiller:
        optimizer = torch.optim.SGD(distiller.parameters(), 0.1)
        distiller.auto.steps = 4
        for k in range(first, last):
            distiller(stream()[k % 3]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return distiller

    whole, half, resumed = (distiller_of(CASES["letkd-1"][0], auto="auto") for _ in range(3))
    work(whole, 0, 6)
    resumed.load_state_dict(work(half, 0, 2).state_dict())
    work(resumed, 2, 6)
    assert {name for name in whole.state_dict() if name.startswith("auto.")} == {"auto.squares", "auto.measured"}
    assert [n for n, value in whole.state_dict().items() if not torch.equal(value, resumed.state_dict()[n])] == []


def test_all_processes_have_the_weight_of_their_sum(monkeypatch):
    halves, seen = [Batch(b.x[:4], b.y[:4]) for b in stream()[:2]], []
    for batch in halves:
        monkeypatch.setattr(weights, "sum_of_all", lambda now: seen.append(now) or now)
        distiller_of(KD, auto="auto")(batch)
    total = torch.stack(seen).sum(dim=0)
    monkeypatch.setattr(weights, "sum_of_all", lambda now: total)
    both = []
    for batch in halves:
        distiller = distiller_of(KD, auto="auto")
        distiller(batch)
        both.append(distiller.auto_weights()["kd"])
    assert both[0] == both[1] == pytest.approx(float((total[0] / total[1]).sqrt()), rel=1e-12)


def test_nothing_is_measured_outside_of_training():
    distiller = distiller_of(KD, auto="auto:3").eval()
    distiller(stream()[0])
    with torch.no_grad():
        distiller.train()(stream()[0])
    assert distiller.auto_weights() == {"kd": 3.0}
    assert int(distiller.auto.measured) == 0


@pytest.mark.parametrize(
    "make", [KD, partial(DKD, warmup=0), TDD, lambda: LetKD([Site("penultimate", SubclassSupervision(2, unlabelled="skip"))])]
)
def test_a_batch_without_labels_is_skipped(make):
    distiller = a_distiller(method := make(), weights=dict.fromkeys(method.term_names(), "auto")).double().fit(stream())
    first, second = stream()[:2]
    distiller(first)
    before = distiller.auto_weights()
    distiller(Batch(second.x, torch.full_like(second.y, -1)))
    assert distiller.auto_weights() == before


def test_at_tokens_the_gradients_are_those_of_the_patches():
    taps = {"penultimate": "blocks.2:tokens"}
    torch.manual_seed(0)
    distiller = (
        a_distiller(quest(6), student=ViT(), student_taps=taps, weights={"kd/penultimate": "auto"}).double().fit(stream())
    )
    one, batch, seen = copy.deepcopy(distiller), stream()[0], {}
    one.student.blocks[2].register_forward_hook(partial(_keep_output, seen))
    terms = one(batch).terms
    ce, kd = (torch.autograd.grad(terms[name], seen["f"], retain_graph=True)[0][:, 3:] for name in ("ce", "kd/penultimate"))
    distiller(batch)
    assert distiller.auto_weights()["kd/penultimate"] == pytest.approx(float(ce.norm() / kd.norm()), rel=1e-9)


def test_features_that_the_network_overwrites_are_measured_before():
    torch.manual_seed(0)
    plain = a_student()
    overwrites = copy.deepcopy(plain)
    overwrites.first[2].inplace = True
    found = []
    for student in (plain, overwrites):
        taps = {**TAPS, "stage1": "first.1"}
        distiller = a_distiller(AT(), student=student, student_taps=taps, weights={"at": "auto"}).double()
        distiller(stream()[0])
        found.append(distiller.auto_weights()["at"])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


class Constant(Method):
    """A term that does not depend on the student."""

    name, paper, loss, formulae = "constant", "", "", ()

    def terms(self, view) -> dict[str, Tensor]:
        return {"constant": view.teacher["logits"].square().mean()}


class Zero(Constant):
    """A term without a gradient at this batch."""

    def terms(self, view) -> dict[str, Tensor]:
        return {"constant": 0.0 * view.student["logits"].sum()}


@pytest.mark.parametrize("kind", [Constant, Zero])
def test_a_term_without_a_gradient_is_one_sentence(kind):
    distiller = a_distiller(kind(), weights={"constant": "auto"})
    with pytest.raises(
        LetkdError, match=r"the weight of 'constant' is \"auto\", but at logits of the student .* no gradient; give a number"
    ):
        distiller(a_stream()[0])


def test_frozen_features_are_one_sentence():
    torch.manual_seed(0)
    student = Net(4)
    nn.ModuleList([student.first, student.last]).requires_grad_(False)
    distiller = a_distiller(quest(6), student=student, weights={"kd/penultimate": "auto"}).fit(a_stream())
    with pytest.raises(LetkdError, match="but at penultimate of the student"):
        distiller(a_stream()[0])


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            {"ce": 0.0, "kd": "auto"},
            "the weight of 'kd' is 'auto', a share of the gradient of 'ce', whose weight is 0; give a number",
        ),
        ({"ce": "auto"}, "the weight of 'ce' is 'auto', but others are shares of it; give a number"),
        ({"kd": "auto:0"}, 'a weight is a number from 0 to 1,000,000, or "auto"'),
        ({"kd": "often"}, 'a weight is a number from 0 to 1,000,000, or "auto"'),
    ],
)
def test_wrong_weights_are_one_sentence(table, says):
    with pytest.raises(LetkdError, match=says):
        a_distiller(KD(), weights=table)


def test_a_weight_cannot_become_automatic_later():
    distiller = distiller_of(CASES["letkd-2"][0], auto="auto")
    distiller.set_weights({"ce": 0.0, "kd/penultimate": 1.0, "kd/intermediate": 0.0})  # a phase
    distiller.set_weights({"kd/penultimate": "auto"})
    other = distiller_of(CASES["letkd-2"][0], auto=1.0)
    other.set_weights({"kd/penultimate": "auto"})  # the first automatic one
    with pytest.raises(LetkdError, match="'kd/intermediate' became automatic after the Distiller was made"):
        other.set_weights({"kd/intermediate": "auto"})


class Dark(nn.Module):
    """Sets some pixels of a map to zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.arange(x.shape[-1]) > 0)


@pytest.mark.parametrize("case", ["quest", "letkd-1"])
def test_zero_pixels_do_not_spoil_the_weight(case):
    make, found = CASES[case][0], []
    for dark in (False, True):
        distiller = distiller_of(make, auto="auto")
        if dark:
            distiller.student.last[1].relu = nn.Sequential(nn.ReLU(), Dark())
        distiller(stream()[0])
        found.append(distiller.auto_weights()["kd/penultimate"])
    assert 0.3 < found[1] / found[0] < 3


def test_a_term_that_is_switched_off_keeps_its_measurement():
    distiller = a_distiller([KD(), letkd1(6)], weights={"kd": "auto", "kd/penultimate": "auto"}).fit(a_stream()).train()
    distiller(a_stream()[0])
    before = distiller.auto_weights()["kd"]
    distiller.set_weights({"kd": 0, "kd/penultimate": "auto"})
    distiller(a_stream()[1])
    distiller.set_weights({"kd": "auto", "kd/penultimate": "auto"})
    assert distiller.auto_weights()["kd"] == before
