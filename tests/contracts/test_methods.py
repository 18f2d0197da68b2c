"""What every method promises, for networks of equal and of unequal architecture."""

import copy
import io
import pickle

import pytest
import torch

from letkd.distiller import Distiller
from letkd.errors import NonFiniteError, UnsupportedPair
from letkd.layer import KDLayer
from letkd.methods import METHODS as REGISTRY
from letkd.methods.per_pixel import PerPixelMethod
from letkd.supervision import SUPERVISIONS as KINDS
from tests.support.methods import METHODS
from tests.support.pair import SIZE, TAPS, a_distiller, a_stream, a_teacher, images, same_state, steps

UNSUPPORTED = {("fsp", "unequal")}


def case(name: str, pair: str):
    """The fast tests take each method with networks that differ, if it allows that."""
    slow = pair == "equal" and (name, "unequal") not in UNSUPPORTED
    return pytest.param(name, pair, id=f"{name}, {pair}", marks=[pytest.mark.slow] if slow else [])


CASES = [case(name, pair) for name in METHODS for pair in ("equal", "unequal") if (name, pair) not in UNSUPPORTED]
every_case = pytest.mark.parametrize(("name", "pair"), CASES)


def fitted(name: str, pair: str, **options) -> Distiller:
    return a_distiller(METHODS[name](), pair, **options).fit(a_stream())


def sgd(distiller: Distiller) -> torch.optim.Optimizer:
    return torch.optim.SGD(distiller.parameters(), lr=0.02, momentum=0.9)


def test_every_method_and_every_supervision_is_in_these_cases():
    methods = [make() for make in METHODS.values()]
    assert {type(method) for method in methods} == set(REGISTRY.values())
    labels = [method for method in methods if isinstance(method, PerPixelMethod)]
    kinds = {part.kind for method in labels for part in method.supervision.values()}
    assert kinds == set(KINDS)


@pytest.mark.parametrize(("name", "pair"), sorted(UNSUPPORTED))
def test_a_pair_that_cannot_be_served_is_refused_and_left_as_it_was(name, pair):
    student = a_distiller([], pair).student
    before = list(student.state_dict())
    with pytest.raises(UnsupportedPair):
        Distiller(student, a_teacher(), METHODS[name](), student_taps=TAPS, teacher_taps=TAPS, example=torch.zeros(1, 3, *SIZE))
    assert list(student.state_dict()) == before


@every_case
def test_terms_are_finite_scalars_and_the_loss_is_their_sum(name, pair):
    distiller = fitted(name, pair)
    twin = copy.deepcopy(distiller)  # a method may have a memory that a step changes
    batch = a_stream()[0]
    step = distiller(batch)
    assert list(step.terms) == ["ce", *distiller.methods[0].term_names()]
    assert len(step.terms) > 1
    for term in step.terms.values():
        assert term.shape == ()
        assert torch.isfinite(term)
        assert term > 0
    torch.testing.assert_close(step.loss, sum(step.terms.values()))
    assert step.logits.shape == (8, 3)
    twin.set_weights({term: 0.5 + i for i, term in enumerate(step.terms)})
    weighted = sum((0.5 + i) * term for i, term in enumerate(step.terms.values()))
    torch.testing.assert_close(twin(batch).loss, weighted, rtol=1e-3, atol=1e-4)


@every_case
def test_where_all_its_terms_weigh_nothing_the_teacher_is_not_run(name, pair):
    distiller = fitted(name, pair)
    distiller.set_weights(dict.fromkeys(distiller.methods[0].term_names(), 0.0))
    distiller.teacher.forward = None
    assert set(distiller(a_stream()[0]).terms) == {"ce"}
    distiller.set_weights({})
    assert set(distiller.weights.values()) == {1.0}


@every_case
def test_every_trainable_parameter_gets_a_gradient_and_no_other_tensor_does(name, pair):
    distiller = fitted(name, pair)
    step = distiller(a_stream()[0])
    step.loss.backward()
    trainable = {key: parameter for key, parameter in distiller.named_parameters() if parameter.requires_grad}
    frozen = {key for key, _ in distiller.named_parameters()} - trainable.keys()
    assert frozen == ({"student.fc.weight", "student.fc.bias"} if name == "simkd" else set())
    for key, parameter in trainable.items():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().max() > 0, key
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in distiller.teacher.parameters())
    assert not any(buffer.requires_grad for buffer in distiller.buffers())


@every_case
def test_the_teacher_stays_as_it_was(name, pair):
    teacher = a_teacher().train()
    before = copy.deepcopy(teacher.state_dict())
    distiller = fitted(name, pair, teacher=teacher)
    steps(distiller.train(), a_stream(), sgd(distiller))
    teacher.train()  # by someone else
    distiller(a_stream()[0])
    assert distiller.training
    assert not any(module.training for module in distiller.teacher.modules())
    assert same_state(teacher.state_dict(), before)
    assert not any(module._forward_hooks for module in teacher.modules())
    own = {id(parameter) for parameter in distiller.parameters()}
    assert not own & {id(parameter) for parameter in teacher.parameters()}


@pytest.mark.slow
@every_case
def test_the_loss_falls_on_one_batch(name, pair):
    distiller = fitted(name, pair)
    losses = steps(distiller, a_stream()[:1] * 25, sgd(distiller))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
@every_case
def test_without_cross_entropy_the_methods_own_terms_fall(name, pair):
    distiller = fitted(name, pair, weights={"ce": 0.0})
    batch = a_stream()[0]
    first = distiller(batch).terms
    steps(distiller, [batch] * 25, sgd(distiller))
    last = distiller(batch).terms
    for term in first.keys() - {"ce"}:
        assert last[term] < first[term], term


@pytest.mark.slow
@every_case
def test_the_same_seed_gives_the_same_numbers(name, pair):
    one, two = (fitted(name, pair, seed=3) for _ in range(2))
    assert steps(one, a_stream(), sgd(one)) == steps(two, a_stream(), sgd(two))
    assert same_state(one.state_dict(), two.state_dict())


@every_case
def test_saved_and_loaded_into_a_fresh_distiller_it_continues_exactly(name, pair):
    distiller = fitted(name, pair)
    optimizer = sgd(distiller)
    steps(distiller, a_stream(), optimizer)
    torch.save({"distiller": distiller.state_dict(), "optimizer": optimizer.state_dict()}, stored := io.BytesIO())
    stored.seek(0)

    fresh = a_distiller(METHODS[name](), pair, seed=77)  # unfitted
    again = sgd(fresh)
    state = torch.load(stored, weights_only=True)
    fresh.load_state_dict(state["distiller"])
    again.load_state_dict(state["optimizer"])
    assert steps(fresh, a_stream(), again) == steps(distiller, a_stream(), optimizer)
    assert same_state(fresh.state_dict(), distiller.state_dict())


@every_case
def test_the_state_holds_student_and_method_and_nothing_of_the_teacher(name, pair):
    distiller = fitted(name, pair)
    assert {key.split(".")[0] for key in distiller.state_dict()} <= {"student", "methods"}
    held = {value.data_ptr() for value in distiller.state_dict().values()}
    assert not held & {value.data_ptr() for value in distiller.teacher.state_dict().values()}
    bare = {key for key in distiller.student.state_dict() if ".kd_" not in key}
    assert bare == set(a_distiller([], pair).student.state_dict())


@every_case
def test_bf16_is_finite_and_close(name, pair):
    distiller = fitted(name, pair)
    batch = a_stream()[0]
    exact = copy.deepcopy(distiller)(batch).terms
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = distiller(batch)
    step.loss.backward()
    for parameter in distiller.parameters():
        assert not parameter.requires_grad or torch.isfinite(parameter.grad).all()
    for term, value in step.terms.items():
        torch.testing.assert_close(value.float(), exact[term], rtol=0.1, atol=0.05)


@every_case
def test_float64_works_throughout(name, pair):
    distiller = fitted(name, pair)
    batch = a_stream()[0]
    exact = copy.deepcopy(distiller)(batch).terms
    distiller.double()
    batch.x, batch.second = batch.x.double(), batch.second.double()
    step = distiller(batch)
    assert step.loss.dtype == torch.float64
    for term, value in step.terms.items():
        torch.testing.assert_close(value.float(), exact[term], rtol=1e-3, atol=1e-4)


@every_case
def test_the_exported_student_stands_alone(name, pair):
    distiller = fitted(name, pair)
    steps(distiller, a_stream(), sgd(distiller))
    student, x = distiller.export(), images(2, seed=9)[0]
    assert not any(module.training for module in student.modules())
    assert all(parameter.grad is None for parameter in student.parameters())
    with torch.no_grad():
        logits = student(x)
        torch.testing.assert_close(logits, distiller.eval().student(x))  # of a fused layer within rounding
        for twin in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
            assert torch.equal(twin(x), logits)
        torch.nn.init.zeros_(distiller.student.fc.weight)
        assert torch.equal(student(x), logits)

    layers = [module for module in student.modules() if isinstance(module, KDLayer)]
    assert len(layers) == (len(distiller.methods[0].sites) if "letkd" in name or "sub-classes" in name else 0)
    hooked = [module for module in student.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert all(any(isinstance(child, KDLayer) for child in module.children()) for module in hooked)
    assert all(".kd_" in key for key in student.state_dict().keys() - a_distiller([], pair).student.state_dict().keys())


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_exported_student_goes_through_torch_export(name):
    pair = "equal" if (name, "unequal") in UNSUPPORTED else "unequal"
    student, x = fitted(name, pair).export(), images(2, seed=9)[0]
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(student, (x,), dynamic_shapes=({0: batch},))
    for n in (2, 5):
        x = images(n, seed=n)[0]
        torch.testing.assert_close(program.module()(x), student(x))


@pytest.mark.slow
@every_case
def test_maps_need_not_be_square(name, pair):
    size = (SIZE[0], SIZE[1] + 8)
    distiller = a_distiller(METHODS[name](), pair, example=torch.zeros(1, 3, *size)).fit(a_stream(size=size))
    first, *_, last = steps(distiller, a_stream(size=size) * 4, sgd(distiller))
    assert last < first
    assert distiller.export()(images(2, size=size)[0]).shape == (2, 3)


@every_case
def test_a_teacher_that_turned_to_nan_is_named(name, pair):
    distiller = fitted(name, pair)
    distiller.teacher.last[0].conv.weight.data[0, 0, 0, 0] = torch.nan
    with pytest.raises(
        NonFiniteError, match=r"NaN or infinity in the teacher's tap '(intermediate|penultimate|stage\d|pooled|logits)"
    ):
        distiller(a_stream()[0])


@pytest.mark.slow
@every_case
def test_a_copied_distiller_trains_on_its_own(name, pair):
    distiller = fitted(name, pair)
    twin = copy.deepcopy(distiller)
    before = copy.deepcopy(distiller.state_dict())
    losses = steps(twin, a_stream(), sgd(twin))
    assert same_state(distiller.state_dict(), before)
    assert steps(distiller, a_stream(), sgd(distiller)) == losses
