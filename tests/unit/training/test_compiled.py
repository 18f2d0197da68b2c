"""Compiled parts: the same numbers, nothing read is missed, and outside of a step the plain model."""

import copy

import jaxtyping
import pytest
import torch
from torch import nn

import letkd.training.loop as loop
from letkd.distiller import Distiller
from letkd.errors import RecipeError
from letkd.methods import letkd1
from letkd.models.weights import read_state_dict
from letkd.recipes import resolve
from letkd.training.compiled import CompiledParts
from letkd.training.loop import train
from tests.support.pair import a_distiller, a_stream

pytestmark = pytest.mark.slow  # torch's compiler takes seconds to load


def compiled(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if module._compiled_call_impl is not None]


def one_with_letkd1() -> Distiller:
    return a_distiller(letkd1(6)).fit(a_stream()).train()


def parts_of(distiller: Distiller, backend: str) -> CompiledParts:
    return CompiledParts(distiller.student, read={tap.path for tap in distiller.student_reads.values()}, backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_gives_the_same_loss_gradients_and_statistics(backend):
    plain, other = one_with_letkd1(), one_with_letkd1()
    parts = parts_of(other, backend)
    assert parts.parts
    for batch in a_stream()[:2]:
        one = plain(batch)
        with parts:
            two = other(batch)
        one.loss.backward()
        two.loss.backward()
        torch.testing.assert_close(two.loss, one.loss)
    for (name, p), q in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)
    for (name, p), q in zip(plain.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-6, msg=name)


def test_what_is_read_inside_stays_as_it_is_and_the_rest_is_compiled():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), nn.ReLU())
    assert CompiledParts(model, backend="eager").parts == [model]
    assert CompiledParts(model, read=["1.0"], backend="eager").parts == [model[0]]
    model[0][1].register_forward_hook(lambda module, args, output: None)
    assert CompiledParts(model, backend="eager").parts == [model[1]]


def test_a_list_never_runs_so_its_modules_are_compiled():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.ReLU(), nn.ReLU()) for _ in range(2)])
            self.last = nn.ReLU()

    model = Twice()
    assert CompiledParts(model, read=["last"], backend="eager").parts == list(model.blocks)


def test_outside_of_a_step_there_is_the_plain_model():
    distiller = one_with_letkd1()
    keys = list(distiller.state_dict())
    parts = parts_of(distiller, "eager")
    with parts:
        assert compiled(distiller.student)
        assert not compiled(copy.deepcopy(distiller.student))
        assert list(distiller.state_dict()) == keys
        assert not compiled(distiller.export())
    assert not compiled(distiller)
    with pytest.raises(ZeroDivisionError), parts:
        raise ZeroDivisionError
    assert not compiled(distiller)


def test_on_a_cpu_one_sentence_refuses_it_before_anything_is_written(tmp_path):
    with pytest.raises(RecipeError, match=r"train\.compile is for GPUs and this run is on a CPU"):
        train(resolve("digits/tiny/ce", settings=["train.compile=true"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_takes_its_steps_in_compiled_parts(tmp_path, monkeypatch):
    """With a backend that any device has."""
    settings = ["data.fraction=0.05", "train.steps=2", "train.epochs=1", "student.model=resnet8_tiny"]
    monkeypatch.setattr(loop, "check_device", lambda device: None)
    made = []

    def parts(model, *, read):
        made.append(CompiledParts(model, read=read, backend="eager"))
        return made[0]

    monkeypatch.setattr("letkd.training.steps.CompiledParts", parts)
    train(resolve("digits/tiny/ce", settings=[*settings, "train.compile=true"]), tmp_path / "one")
    assert made[0].parts
    train(resolve("digits/tiny/ce", settings=settings), tmp_path / "two")
    one, two = (read_state_dict(tmp_path / name / "student.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_a_distiller_can_be_compiled_as_a_whole(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks of shapes cannot be traced
    plain = one_with_letkd1()
    other = copy.deepcopy(plain)
    batch = a_stream()[0]
    one, two = plain(batch), torch.compile(other, backend="eager")(batch)
    one.loss.backward()
    two.loss.backward()
    assert two.terms.keys() == one.terms.keys()
    for name, term in one.terms.items():
        torch.testing.assert_close(two.terms[name], term, msg=name)
    for (name, p), q in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)
