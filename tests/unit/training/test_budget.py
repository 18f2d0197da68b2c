"""`letkd train --time`: what fits is decided once, kept in the recipe, and trained as if it had been asked for."""

from dataclasses import replace

import pytest
import torch

import letkd.training.budget as budget
from letkd.cli.options import duration
from letkd.errors import RecipeError
from letkd.models.weights import read_state_dict
from letkd.recipes import resolve
from letkd.runs.folder import RunFolder
from letkd.training.budget import Cost, epochs_within
from tests.support.pair import same_state

SMALL = ["data.fraction=0.1", "data.batch_size=16", "student.model=resnet8_tiny"]
SET = [part for text in SMALL for part in ("--set", text)]


def recipe_of(seconds: float, *settings: str):
    return resolve("digits/tiny/ce", settings=[f"train.time={seconds}", *settings])


@pytest.mark.parametrize(
    ("seconds", "planned"),
    [
        (100, (8, None)),  # 97 s less 12 s before and after, by 10 s per epoch
        (24, (1, None)),  # 11.28 s are left
        (20, (1, 128)),  # 7.4 s are left: less than an epoch of 9 s for 180 steps and 1 s for the evaluation
    ],
)
def test_as_many_epochs_as_fit(seconds, planned):
    epochs, steps = epochs_within(recipe_of(seconds), Cost(before=6.98, step=0.05, epoch=1.0, after=5.0), 180)
    assert (epochs, steps) == planned


def test_phases_come_out_of_the_time():
    cost = Cost(before=0.0, step=0.1, epoch=0.0, after=0.0)
    plain, phased = recipe_of(100), recipe_of(100, "phases=[{epochs = 3, weights = {ce = 1.0}}]")
    epochs = epochs_within(plain, cost, 100)[0]
    assert epochs - epochs_within(phased, replace(cost, phases=(0.1,)), 100)[0] == 3
    assert epochs - epochs_within(phased, replace(cost, phases=(0.2,)), 100)[0] == 6


def test_a_phase_has_its_own_time_per_step(tmp_path, monkeypatch):
    weights = []
    monkeypatch.setattr(budget, "_seconds", lambda run, *_, **__: (run(), float(len(weights)))[1])
    monkeypatch.setattr(budget.Steps, "take", lambda steps, *_, **__: weights.append(dict(steps.distiller.weights)))
    cost, _ = budget.measure(recipe_of(100, *SMALL, "phases=[{epochs = 3, weights = {ce = 2.0}}]"), tmp_path)
    assert [one["ce"] for one in weights] == [2.0, 1.0]
    assert (cost.phases, cost.step) == ((1.0,), 2.0)


def test_runs_at_the_same_time_are_planned_with_their_part_of_the_machine(tmp_path, monkeypatch):
    seen, threads = [], torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(budget, "measure", lambda *_: (Cost(0.0, 0.1, 0.0, 0.0), 100))
    plans = []
    for gpus, at_once in ((0, 3), (2, 2), (1, 2)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        plans.append(budget.plan(recipe_of(100), tmp_path, at_once=at_once)["train.epochs"])
    assert seen == [2, 8, 4, 8, 4, 8]
    assert plans == [9, 9, 4]  # two runs share one GPU
    assert threads > 0


def test_the_first_process_decides_how_many_steps_are_timed(monkeypatch):
    calls, decisions = [], iter([False, False, True])
    monkeypatch.setattr(budget, "from_first", lambda own: next(decisions))
    budget._seconds(lambda: calls.append(1), 0.0, torch.device("cpu"), max_calls=100, warmup=2)
    assert len(calls) == 2 + 3 * budget.MIN_STEPS  # although this process has no time left


def test_accumulated_batches_are_timed_with_their_updates(tmp_path, monkeypatch):
    updates, real = [], budget.Steps.take

    def take(steps, *args, **options):
        step = real(steps, *args, **options)
        updates.append(steps.updates)
        return step

    monkeypatch.setattr(budget.Steps, "take", take)
    budget.measure(recipe_of(100, *SMALL, "train.steps=4", "train.accumulate=2"), tmp_path)
    assert updates[:4] == [0, 1, 1, 2]


def test_too_little_time_is_one_sentence():
    with pytest.raises(
        RecipeError, match=r"--time 10s is too short for one step: the work before and after training takes 12 s"
    ):
        epochs_within(recipe_of(10), Cost(before=8.0, step=0.1, epoch=1.0, after=4.0), 100)
    with pytest.raises(RecipeError, match=r"takes 2 s, the phases 30 s, the evaluation per epoch"):
        epochs_within(recipe_of(10, "phases=[{epochs = 3, weights = {ce = 1.0}}]"), Cost(1.0, 0.1, 0.0, 1.0, (0.1,)), 100)


@pytest.mark.parametrize(("text", "seconds"), [("20min", 1200), ("90s", 90), ("1h", 3600), ("1h30min", 5400), ("1h 5s", 3605)])
def test_durations(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "20", "min", "-5s", "0s", "1d", "20 minutes", "9" * 30 + "h"])
def test_wrong_durations_are_one_sentence(text):
    with pytest.raises(RecipeError, match="write hours, minutes or seconds, as in 20min"):
        duration(text)


@pytest.mark.slow
def test_what_was_decided_is_kept_and_trained_like_any_number_of_epochs(letkd, tmp_path, monkeypatch):
    measured = []
    real = budget.measure

    def measure(recipe, shared):
        cost, steps = real(recipe, shared)
        measured.append(cost)
        return Cost(before=0.0, step=1.0, epoch=0.0, after=0.0), steps

    monkeypatch.setattr(budget, "measure", measure)
    command = ["train", "digits/tiny/ce", *SET]
    code, _, err = letkd(*command, "--time", "30s", "--out", tmp_path / "timed")
    assert code == 0, err
    recipe = RunFolder(tmp_path / "timed").recipe
    assert recipe.train.time == 30
    assert f"so {recipe.train.epochs} epochs of" in err
    assert (
        recipe.optim.milestones == resolve("digits/tiny/ce", settings=[f"train.epochs={recipe.train.epochs}"]).optim.milestones
    )
    (cost,) = measured
    assert min(cost.before, cost.step, cost.epoch, cost.after) > 0
    code, _, err = letkd(*command, "--time", "30s", "--out", tmp_path / "timed")
    assert code == 0, err
    assert "finished already" in err
    assert len(measured) == 1, "it is measured once"
    code, _, err = letkd(*command, "--epochs", recipe.train.epochs, "--out", tmp_path / "plain")
    assert code == 0, err
    students = [read_state_dict(tmp_path / name / "student.safetensors") for name in ("timed", "plain")]
    assert same_state(*students)
    code, _, err = letkd(*command, "--time", "30s", "--epochs", 2, "--out", tmp_path / "both")
    assert (code, "give only one of them" in err) == (2, True)
    assert not (tmp_path / "both").exists()
    code, _, err = letkd(*command, "--time", "30s", "--set", "epochs=9", "--out", tmp_path / "both")
    assert (code, "--set train.epochs=9 and --time 30s: give only one of them" in err) == (2, True)
