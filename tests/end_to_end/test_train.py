"""Runs from start to end on the embedded data: results, stopping and going on, sharing fitted supervision."""

import dataclasses
import json
import logging
from logging.handlers import QueueHandler
from queue import SimpleQueue

import pytest
import torch

import letkd.training.finish as finish
import letkd.training.loop as loop
import letkd.training.state as state
from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.distiller.student import load_student
from letkd.errors import DataError, NonFiniteError, RecipeError, RunError
from letkd.models.weights import read_state_dict
from letkd.recipes import list_methods, resolve
from letkd.runs.checkpoint import NAME
from letkd.runs.evaluation import evaluate
from letkd.runs.folder import RunFolder
from letkd.training.trials import run_trials
from tests.support.pair import a_net

NONE = torch.zeros(0, dtype=torch.int64)
SMALL = ["train.epochs=2", "data.fraction=0.05", "student.model=resnet8_tiny", "data.batch_size=16"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    loop.train(resolve("digits/tiny/teacher", settings=[*SMALL, "teacher.model=resnet14_tiny"]), folder / "run")
    return folder / "run" / "student.safetensors"


def recipe_for(method, teacher, *settings):
    overrides = {"teacher.weights": str(teacher), "teacher.model": "resnet14_tiny"}
    if method in ("ab", "fsp"):
        overrides["phases"] = [{"epochs": 1, "weights": {"ce": 0.0, method: 1.0}}]
    return resolve("digits/tiny", method=method, overrides=overrides, settings=[*SMALL, *settings])


METHODS = [name for name in list_methods() if name != "teacher"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_leaves_a_whole_folder(method, teacher, tmp_path):
    result = loop.train(recipe_for(method, teacher), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"recipe.toml", "env.json", "metrics.jsonl", "last", "student.safetensors", "result.json"} <= names
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == ([1, 2, 3] if method in ("ab", "fsp") else [1, 2])
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in rows)
    assert 0 < result.last_test < 100
    assert result.best_val_test is not None
    assert not any("teacher" in key for key in read_state_dict(tmp_path / "run" / "last" / NAME))


def test_evaluating_less_often_changes_only_what_is_logged(teacher, tmp_path):
    recipes = {every: recipe_for("kd", teacher, "train.epochs=5", f"train.validate_every={every}") for every in (1, 2)}
    results = {every: loop.train(recipe, tmp_path / str(every)) for every, recipe in recipes.items()}
    rows = {every: RunFolder(tmp_path / str(every)).rows() for every in results}
    assert [row["val_top1"] is None for row in rows[2]] == [True, False, True, False, False], "the last epoch is evaluated, too"
    assert [row["loss"] for row in rows[1]] == [row["loss"] for row in rows[2]]
    assert [row["val_top1"] for row in rows[2] if row["val_top1"] is not None] == [rows[1][k]["val_top1"] for k in (1, 3, 4)]
    assert (results[1].last_test, results[1].last_val) == (results[2].last_test, results[2].last_val)
    assert results[2].best_val_epoch in (2, 4, 5)


def test_the_ways_to_save_time_change_no_number_beyond_rounding(teacher, tmp_path):
    """Loss by loss; channels-last sums in another order, so a ReLU here and there falls on the other side.

    A folded teacher's features differ by rounding, and K-means may settle on slightly other centres.
    """
    ways = {"fused": 1e-4, "fold_teacher": 1e-3, "channels_last": 1e-2}
    losses = {}
    for way in ("none", *ways):
        settings = [f"train.{name}={str(name == way).lower()}" for name in ways]
        loop.train(recipe_for("letkd-2", teacher, *settings), tmp_path / way)
        rows = (tmp_path / way / "metrics.jsonl").read_text().splitlines()
        losses[way] = [json.loads(row)["loss"] for row in rows]
    for way, within in ways.items():
        assert losses[way] == pytest.approx(losses["none"], rel=within), way
    one, two = (read_state_dict(tmp_path / way / "student.safetensors") for way in ("none", "channels_last"))
    assert {key: value.shape for key, value in one.items()} == {key: value.shape for key, value in two.items()}


def test_a_student_with_another_number_of_logits_is_refused_before_training(tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\ndef fixed():\n    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 12))\n"
    )
    recipe = resolve("digits/tiny/ce", settings=[f"student.model={tmp_path / 'nets.py'}:fixed"])
    with pytest.raises(
        RecipeError, match=r"nets\.py:fixed returns 12 logits, and digits has 10 classes; let the callable take `num_classes`"
    ):
        loop.train(recipe, tmp_path / "run")


@pytest.mark.parametrize(("method", "after"), [("ce", 2), ("letkd-2", 2), ("crd", 3), ("ab", 1), ("ab", 2)])
def test_a_stopped_run_goes_on_to_the_same_weights(method, after, teacher, tmp_path, monkeypatch):
    recipe = recipe_for(method, teacher, "train.epochs=4")
    loop.train(recipe, tmp_path / "whole")

    class Killed(Exception):
        pass

    save, calls = state.save_checkpoint, []

    def save_then_die(*args, **kwargs):
        save(*args, **kwargs)
        calls.append(1)
        if len(calls) == after:
            raise Killed

    monkeypatch.setattr(state, "save_checkpoint", save_then_die)
    with pytest.raises(Killed):
        loop.train(recipe, tmp_path / "stopped")
    monkeypatch.setattr(state, "save_checkpoint", save)
    torch.manual_seed(123)  # whatever happened in between
    loop.train(recipe, tmp_path / "stopped")
    whole, stopped = (read_state_dict(tmp_path / name / "student.safetensors") for name in ("whole", "stopped"))
    assert whole.keys() == stopped.keys()
    for key in whole:
        assert torch.equal(whole[key], stopped[key]), key
    rows = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "stopped")]
    strip = lambda lines: [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]  # noqa: E731
    assert strip(rows[0]) == strip(rows[1])


def test_a_finished_run_is_not_run_again(teacher, tmp_path, monkeypatch):
    first = loop.train(recipe_for("kd", teacher), tmp_path / "run")
    monkeypatch.setattr(loop, "build_distiller", lambda *_: pytest.fail("built again"))
    assert loop.train(recipe_for("kd", teacher), tmp_path / "run") == first


def test_another_recipe_in_the_same_folder_is_refused(teacher, tmp_path):
    loop.train(recipe_for("kd", teacher), tmp_path / "run")
    with pytest.raises(RunError, match=r"differs in methods.kd.T"):
        loop.train(recipe_for("kd", teacher, "methods.kd.T=2.0"), tmp_path / "run")


def test_the_student_file_opens_without_teacher_and_gives_the_reported_accuracy(teacher, tmp_path):
    recipe = recipe_for("letkd-2", teacher)
    result = loop.train(recipe, tmp_path / "run")
    student = load_student(tmp_path / "run" / "student.safetensors")
    data = loop.read_data(recipe)
    assert evaluate(student, loop.eval_loader(recipe, data, data.test)).top1 == result.last_test
    assert sum(parameter.numel() for parameter in student.parameters()) == result.parameters


def test_trials_differ_by_seed_and_share_the_fitted_supervision(teacher, tmp_path, monkeypatch):
    fits = []
    fit = Distiller._fit
    monkeypatch.setattr(Distiller, "_fit", lambda self, *args, **options: (fits.append(1), fit(self, *args, **options)))
    results = run_trials(recipe_for("letkd-1", teacher), tmp_path / "trials", 2)
    assert len(fits) == 1
    assert len(results) == 2
    a, b = (read_state_dict(tmp_path / "trials" / f"seed-{k}" / "student.safetensors") for k in (0, 1))
    assert not torch.equal(a["fc.weight"], b["fc.weight"])


def test_the_same_seed_gives_the_same_weights(teacher, tmp_path):
    for name in ("a", "b"):
        loop.train(recipe_for("quest", teacher), tmp_path / name)
    a, b = (read_state_dict(tmp_path / name / "student.safetensors") for name in ("a", "b"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_nan_stops_before_the_checkpoint_is_overwritten(teacher, tmp_path):
    recipe = recipe_for("letkd-1", teacher, "train.epochs=3")
    save, held = state.save_checkpoint, {}

    def poison(folder, module, optimizer, state, *more):
        save(folder, module, optimizer, state, *more)
        held["bytes"] = (folder / NAME).read_bytes()
        if state["epoch"] == 2:  # the epoch that comes next
            with torch.no_grad():
                module.student.conv1.weight.fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "save_checkpoint", poison)
        with pytest.raises(NonFiniteError, match=r"NaN or infinity in the student's tap 'penultimate\.x'"):
            loop.train(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "last" / NAME).read_bytes() == held["bytes"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state.save_checkpoint(tmp_path, module, optimizer, {"epoch": 1})
    before = (tmp_path / NAME).read_bytes()
    with torch.no_grad():
        module.bias.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match="'bias' became NaN or infinite in epoch 2"):
        state.save_checkpoint(tmp_path, module, optimizer, {"epoch": 2})
    assert (tmp_path / NAME).read_bytes() == before


@pytest.mark.parametrize("val", [0.0, 0.2])
def test_statistics_that_diverge_end_the_run_with_an_error(val, tmp_path):
    """Steps see the statistics of their batch, so that nothing but the running ones shows it."""
    recipe = resolve("digits/tiny/ce", settings=[*SMALL, f"data.val={val}"])
    step = torch.optim.SGD.step

    def spoil(self, *args):
        module.student.bn1.running_var.fill_(float("inf"))
        return step(self, *args)

    build = loop.build_distiller
    with pytest.MonkeyPatch.context() as patch:
        module = build(recipe, loop.read_data(recipe))
        patch.setattr(loop, "build_distiller", lambda *_: module)
        patch.setattr(torch.optim.SGD, "step", spoil)
        with pytest.raises(
            NonFiniteError,
            match=r"'student\.bn1\.running_var' became NaN or infinite in epoch 1\. Lower the learning rate, or clip with",
        ):
            loop.train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("where", ["weights", "statistics", "logits"])
def test_a_network_that_diverged_is_not_evaluated(where):
    net, x = a_net(4, seed=0), torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        if where == "weights":
            net.fc.bias[0] = float("nan")
        elif where == "statistics":
            net.first[1].running_var[0] = float("inf")  # pyright: ignore[reportIndexIssue]
        else:
            x[3] = 3e38
    says = {
        "weights": "Net cannot be evaluated: 'fc.bias' holds NaN or infinity",
        "statistics": "Net cannot be evaluated: 'first.1.running_var' holds NaN or infinity",
        "logits": "Net has NaN or infinite logits for 1 of 5 images",
    }
    with pytest.raises(NonFiniteError, match=says[where]):
        evaluate(net, [Batch(x, torch.zeros(5, dtype=torch.int64))])


def test_a_mask_of_infinities_is_no_divergence():
    net = a_net(4, seed=0)
    net.register_buffer("mask", torch.full((2, 2), -torch.inf))
    evaluate(net, [Batch(torch.randn(5, 3, 16, 16), torch.zeros(5, dtype=torch.int64))])


def test_no_test_images_are_told_before_anything_is_written(tmp_path, monkeypatch):
    read = loop.read_data
    monkeypatch.setattr(loop, "read_data", lambda recipe: dataclasses.replace(d := read(recipe), test=d.test.subset(NONE)))
    with pytest.raises(DataError, match="digits has no test images, but a run reports the accuracy on them"):
        loop.train(resolve("digits/tiny/ce", settings=SMALL), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_student_is_kept_where_its_evaluation_fails(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise DataError("a test image is damaged")

    recipe = resolve("digits/tiny/ce", settings=[*SMALL, "data.val=0.0"])
    with monkeypatch.context() as patch:
        patch.setattr(finish, "score", fail)
        with pytest.raises(DataError, match="damaged"):
            loop.train(recipe, tmp_path / "run")
    load_student(tmp_path / "run" / "student.safetensors")
    loop.train(recipe, tmp_path / "run")


def test_a_crop_that_the_images_do_not_allow_is_told_before_anything_is_written(tmp_path):
    recipe = resolve("digits/tiny/ce", settings=["data.augment=crop", "data.padding=reflect", "data.crop=99"])
    with pytest.raises(DataError, match="reflect padding of 99 pixels on images of 32x32: it must be smaller than both sides"):
        loop.train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_method_without_a_teacher(tmp_path):
    with pytest.raises(RecipeError, match="letkd needs a trained teacher: name its weights with --teacher-weights"):
        loop.train(resolve("digits/tiny/letkd-1", settings=SMALL), tmp_path / "run")


def test_bf16_runs_without_a_word_of_fabric(teacher, tmp_path):
    heard = QueueHandler(SimpleQueue())
    logging.getLogger("lightning_fabric").addHandler(heard)
    try:
        result = loop.train(recipe_for("letkd-2", teacher, "train.precision=bf16-mixed", "train.epochs=1"), tmp_path / "run")
    finally:
        logging.getLogger("lightning_fabric").removeHandler(heard)
    assert result.epochs == 1
    assert heard.queue.empty()
