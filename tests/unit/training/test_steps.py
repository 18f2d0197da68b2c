"""Steps: what is read from the device and when, averages of the weights, accumulation."""

from collections.abc import Callable

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

import letkd
import letkd.training.loop as loop
from letkd.batch import Batch
from letkd.distiller import Distiller, Step
from letkd.errors import NonFiniteError
from letkd.models.weights import read_state_dict
from letkd.recipes import resolve
from letkd.runs.folder import RunFolder
from letkd.training.average import Average
from letkd.training.steps import Steps
from letkd.training.tally import Tally
from tests.support.pair import a_net, a_stream
from tests.support.runs import stop_after

TINY = ["data.fraction=0.2", "data.batch_size=16", "data.augment=none", "data.val=0.0", "student.model=resnet8_tiny"]
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero")


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: values read by Python or by torch itself."""

    def __init__(self, patch: pytest.MonkeyPatch):
        super().__init__()
        self.count = 0
        for name in READS:
            patch.setattr(Tensor, name, self._counting(getattr(Tensor, name)))

    def _counting(self, real: Callable) -> Callable:
        def read(tensor, *values, **options):
            self.count += 1
            return real(tensor, *values, **options)

        return read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def waits_of(recipe, folder, monkeypatch) -> list[int]:
    """The count after every step of a run."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(loop, "READ_SECONDS", float("inf"))
        with Waits(patch) as waits:
            loop.train(recipe, folder, save_minutes=1e9, on_step=lambda state: seen.append(waits.count))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[], ["optim.clip=1.0", "train.ema=0.9", "schedule=cosine", "train.accumulate=2"]])
def test_a_step_does_not_wait_for_the_device(settings, tmp_path, monkeypatch):
    recipe = resolve("digits/tiny/ce", settings=[*TINY, "train.epochs=1", "train.steps=5", *settings])
    seen = waits_of(recipe, tmp_path / "run", monkeypatch)
    assert len(seen) == 5
    assert seen[0] > 0
    assert seen[1:] == [seen[0]] * 4, "the first step of an epoch is checked at once, the others are not"


def a_step(*terms: float, finite: bool = True) -> Step:
    values = {f"t{k}": torch.tensor(value) for k, value in enumerate(terms)}
    return Step(sum(values.values(), torch.tensor(0.0)), values, torch.eye(3), torch.tensor(finite))


def test_sums_are_those_of_pythons_floats_whether_or_not_the_epoch_was_interrupted():
    terms = torch.rand(50, 2).tolist()
    by_python = {"#steps": 0.0, "#images": 0.0, "#correct": 0.0, "loss": 0.0, "t0": 0.0, "t1": 0.0}
    tally = Tally()
    for k, (a, b) in enumerate(terms):
        step = a_step(a, b)
        for name, value in (("#steps", 1), ("#images", 3), ("#correct", 2), ("loss", step.loss), ("t0", a), ("t1", b)):
            by_python[name] += float(torch.tensor(float(value), dtype=torch.float32)) if name[0] != "#" else value
        tally.add(step, torch.tensor([0, 1, 0]))
        if k == 20:
            tally = Tally(tally.read()[0])
    sums, fault = tally.read()
    assert sums == by_python
    assert not fault


@pytest.mark.parametrize(
    ("step", "norms", "told"),
    [
        (
            a_step(1.0, float("nan"), finite=False),
            [1.0, 1.0],
            "the loss term 't1' became NaN or infinite in step 2 (terms: t0=1, t1=nan)",
        ),
        (
            a_step(1.0, 2.0, finite=False),
            [1.0, 1.0],
            "the teacher's features became NaN or infinite in step 2 (terms: t0=1, t1=2)",
        ),
        (a_step(1.0, 2.0), [1.0, float("inf")], "the gradient of 'b' became NaN or infinite in step 2 (terms: t0=1, t1=2)"),
    ],
)
def test_the_first_step_that_is_not_finite_is_told_later(step, norms, told):
    tally, y = Tally(), torch.tensor([0, 1, 2])
    tally.add(a_step(0.5, 0.5), y, torch.ones(2), ["a", "b"])
    tally.add(step, y, torch.tensor(norms), ["a", "b"])
    tally.add(a_step(float("nan"), 0.5, finite=False), y, torch.ones(2), ["a", "b"])
    assert tally.read()[1] == told


def test_a_fault_is_told_before_anything_is_written(tmp_path, monkeypatch):
    recipe = resolve("digits/tiny/ce", settings=[*TINY, "train.epochs=2", "train.steps=3"])
    forward, count = Distiller.forward, iter(range(100))

    def poisoned(self, batch):
        step = forward(self, batch)
        if next(count) == 4:  # the second step of the second epoch
            step.loss = step.loss * float("nan")
        return step

    monkeypatch.setattr(Distiller, "forward", poisoned)
    with pytest.raises(
        NonFiniteError, match=r"epoch 2: the gradient of .* in step 2 .* the last good checkpoint is kept in .*last"
    ):
        loop.train(recipe, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert [row["epoch"] for row in run.rows()] == [1]
    assert run.result is None


def test_the_average_is_torchs_and_its_decay_rises():
    distiller = Distiller(a_net(4, seed=0))
    average = Average(distiller, 0.9)
    oracle = AveragedModel(distiller.student, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
    slow = {name: value.double().clone() for name, value in average.values.items()}
    for t in range(120):
        with torch.no_grad():
            for p in distiller.student.parameters():
                p.add_(torch.randn_like(p))
        d = min(0.9, (1 + t) / (10 + t))
        live = distiller.state_dict()
        slow = {name: d * value + (1 - d) * live[name].double() for name, value in slow.items()}
        average.update(t)
        if t == 80:  # from here on the decay is 0.9
            with average.in_place():
                oracle.module.load_state_dict(distiller.student.state_dict())
            oracle.n_averaged.fill_(1)
        elif t > 80:
            oracle.update_parameters(distiller.student)
    for name, value in slow.items():
        torch.testing.assert_close(average.values[name].double(), value, rtol=1e-4, atol=1e-5)
    for name, p in oracle.module.named_parameters():
        torch.testing.assert_close(average.values[f"student.{name}"], p, rtol=1e-4, atol=1e-5)


def test_weights_come_back_after_the_average_was_in_their_place():
    distiller = Distiller(a_net(4, seed=0))
    average = Average(distiller, 0.5)
    with torch.no_grad():
        distiller.student.fc.weight.fill_(7.0)
    before = average.values["student.fc.weight"].clone()
    with average.in_place():
        assert torch.equal(distiller.student.fc.weight, before)
        with average.in_place(False):
            assert (distiller.student.fc.weight == 7).all()
        assert torch.equal(distiller.student.fc.weight, before)
    assert (distiller.student.fc.weight == 7).all()


@pytest.mark.slow
def test_a_run_keeps_the_average_beside_the_student(tmp_path):
    recipe = resolve("digits/tiny/ce", settings=[*TINY, "data.val=0.2", "train.epochs=2", "train.steps=4", "train.ema=0.8"])
    result = loop.train(recipe, tmp_path / "whole")
    with pytest.raises(letkd.errors.Stopped):
        loop.train(recipe, tmp_path / "stopped", on_step=stop_after(6))
    assert loop.train(recipe, tmp_path / "stopped").ema_test == result.ema_test
    run = RunFolder(tmp_path / "whole")
    states = [
        read_state_dict(path) for path in (run.averaged_student, RunFolder(tmp_path / "stopped").averaged_student, run.student)
    ]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0]["fc.weight"], states[2]["fc.weight"])
    assert all("ema_val_top1" in row for row in run.rows())
    data = loop.read_data(recipe)
    student = letkd.load_student(run.averaged_student)
    assert letkd.runs.evaluation.evaluate(student, loop.eval_loader(recipe, data, data.test)).top1 == result.ema_test


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean(dim=(2, 3)))


def test_accumulated_batches_are_one_large_batch():
    weights = []
    for accumulate in (1, 2):
        torch.manual_seed(0)
        settings = ["train.precision=64-true", "optim.momentum=0.5", f"train.accumulate={accumulate}"]
        steps = Steps(
            Fabric(accelerator="cpu", devices=1, precision="64-true"),
            Distiller(Flat()),
            resolve("digits/tiny/ce", settings=settings),
        )
        batches = [Batch(b.x.double(), b.y) for b in a_stream(24, batch=8 // accumulate)]
        for k, batch in enumerate(batches):
            steps.take(batch, 1.0 - k / len(batches), done=k, of=len(batches))
        weights.append(steps.distiller.student.fc.weight.detach())
    torch.testing.assert_close(*weights)
    assert steps.updates == 3
