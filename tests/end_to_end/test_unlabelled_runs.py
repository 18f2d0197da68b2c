"""Runs with images that have no labels: beside labelled ones, and alone; stopped, cached, fine-tuned, probed and reported."""

import json
from pathlib import Path

import pytest
import torch

import letkd.training.loop as loop
from letkd.distiller.student import load_student, read_header
from letkd.errors import DataError, RecipeError, Stopped, TapError, UnsupportedPair
from letkd.layer import KDLayer
from letkd.models.weights import read_state_dict
from letkd.recipes import Recipe, resolve
from letkd.training.build import build_distiller, fit, read_data
from tests.support.runs import ALONE, BOTH, images_alone, recipe_for, same_end, save_pictures, stop_after
from tests.support.trees import a_tree


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return save_pictures(tmp_path_factory.mktemp("pictures"))


# ------------------------------------------------------------------------------------------------ beside labelled images


@pytest.mark.parametrize("cached", [(), ("train.cache_views=2",)])
def test_a_stopped_run_with_both_kinds_of_images_ends_with_the_same_bits(cached, teacher, whole, tmp_path):
    recipe = recipe_for("letkd-2", teacher, *BOTH, *cached)
    with pytest.raises(Stopped):
        loop.train(recipe, tmp_path / "stopped", on_step=stop_after(4))
    loop.train(recipe, tmp_path / "stopped")
    same_end(whole(recipe), tmp_path / "stopped")


def test_a_cache_gives_the_labels_that_steps_without_it_give(teacher, tmp_path):
    from letkd.distiller.cache import TeacherCache
    from letkd.training.build import train_loader

    recipe = recipe_for("letkd-2", teacher, *BOTH, "train.cache_views=1")
    data = read_data(recipe)
    distiller = build_distiller(recipe, data).eval()
    fit(distiller, recipe, data, tmp_path)
    batches = train_loader(recipe, data)
    batch = next(iter(batches))
    plain = distiller(batch).terms
    distiller.cache = TeacherCache(distiller, batches, tmp_path / "views")
    cached = distiller(batch).terms
    assert int((batch.y < 0).sum()) == 11
    torch.testing.assert_close(cached, plain, rtol=1e-3, atol=1e-3)  # K-means labels in half precision


def test_training_accuracy_is_of_labelled_images(teacher, tmp_path):
    result = loop.train(recipe_for("kd", teacher, *BOTH, "train.epochs=1"), tmp_path)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert row["train_top1"] * 15 / 100 == pytest.approx(round(row["train_top1"] * 15 / 100))  # three steps of five images
    assert result.last_test is not None


# ------------------------------------------------------------------------------------------------ images alone


def test_from_images_alone_to_a_classifier(letkd, teacher, pictures, tmp_path):
    small = [part for text in [*ALONE, "methods.letkd.sites.penultimate.supervision.K=4"] for part in ("--set", text)]
    networks = ["--teacher", "resnet14_tiny", "--teacher-weights", teacher, "--student", "resnet8_tiny"]
    code, out, err = letkd(
        *("train", "--data", "images", "--root", pictures, *networks, "--method", "letkd-1"),
        *(*small, "--probe", "digits", "--out", "runs/pre"),
    )
    assert code == 0, err
    assert "kd/penultimate on held-out images: " in out
    result = json.loads(Path("runs/pre/result.json").read_text())
    assert result["last_test"] is None
    assert set(result["held_out"]) == {"kd/penultimate"}
    assert {name: value > 15 for name, value in result["probe"].items()} == {"knn": True, "linear": True}  # chance: 10
    row = json.loads(Path("runs/pre/metrics.jsonl").read_text().splitlines()[-1])
    assert (row["train_top1"], row["val_top1"]) == (None, None)
    assert row["val/kd/penultimate"] == pytest.approx(result["held_out"]["kd/penultimate"])
    assert "kd/penultimate = 0" not in Path("runs/pre/recipe.toml").read_text()
    assert resolve("runs/pre/recipe.toml").weights["ce"] == 0
    before = read_state_dict("runs/pre/student.safetensors")

    code, out, err = letkd("eval", "runs/pre")
    assert code == 2
    assert "images has no labels, so no accuracy can be computed; name labelled images with --data" in err
    code, out, err = letkd("report", "runs/pre")
    assert code == 0, err

    code, out, err = letkd(
        *("train", "digits/tiny/ce", "--student", "resnet8_tiny", "--student-weights", "runs/pre/student.safetensors"),
        *("--set", "data.fraction=0.05", "--set", "optim.lr=1e-6", "--epochs", "1", "--out", "runs/fine"),
    )
    assert code == 0, err
    fine = load_student("runs/fine/student.safetensors")
    assert any(isinstance(module, KDLayer) for module in fine.modules())
    torch.testing.assert_close(fine.state_dict()["conv1.weight"], before["conv1.weight"], rtol=1e-3, atol=1e-3)


def test_a_stopped_run_of_images_alone_ends_with_the_same_bits(teacher, pictures, tmp_path):
    recipe = images_alone("letkd-1", teacher, pictures)
    whole = loop.train(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        loop.train(recipe, tmp_path / "stopped", on_step=stop_after(3))
    assert loop.train(recipe, tmp_path / "stopped").held_out == whole.held_out
    assert (tmp_path / "whole/student.safetensors").read_bytes() == (tmp_path / "stopped/student.safetensors").read_bytes()
    assert loop.train(recipe, tmp_path / "stopped").held_out == whole.held_out  # finished already


def test_a_run_that_is_stopped_after_its_last_epoch_reports_the_terms_of_its_main_training(
    teacher, pictures, tmp_path, monkeypatch
):
    recipe = images_alone("fitnet", teacher, pictures, "train.epochs=1", "methods.kd.T=4")
    phases = [{"epochs": 1, "weights": {"ce": 0.0, "kd": 0.0, "fitnet": 1.0}}]
    recipe = Recipe.model_validate({**recipe.model_dump(), "phases": phases, "weights": {"ce": 0.0, "kd": 1.0, "fitnet": 0.0}})
    whole = loop.train(recipe, tmp_path / "whole")
    assert set(whole.held_out) == {"kd"}

    def stop(*args):
        raise Stopped("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish", stop)
        with pytest.raises(Stopped):
            loop.train(recipe, tmp_path / "stopped")
    assert loop.train(recipe, tmp_path / "stopped").held_out == whole.held_out


@pytest.mark.parametrize("method", ["kd", "crd", "fitnet", "quest", "mlkd"])
def test_methods_that_need_no_label_learn_from_images_alone(method, teacher, pictures, tmp_path):
    settings = {"crd": ["methods.crd.K=8"], "quest": ["methods.quest.sites.penultimate.supervision.K=4"]}.get(method, [])
    result = loop.train(images_alone(method, teacher, pictures, "train.epochs=1", *settings), tmp_path)
    assert set(result.held_out) == {"kd": {"kd"}, "fitnet": {"fitnet"}, "quest": {"kd/penultimate"}}.get(method, set())
    assert read_header(tmp_path / "student.safetensors")["num_classes"] == 10  # the teacher's


# ------------------------------------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(
    ("method", "why"), [("letkd-2", "are sub-classes of the classes"), ("dkd", "its target is the class"), ("tdd", "its trees")]
)
def test_methods_that_need_labels_say_so(method, why, teacher, pictures):
    recipe = images_alone(method, teacher, pictures)
    with pytest.raises(UnsupportedPair, match=rf"cannot learn from images, which has no labels: .*{why}.*; use a method that"):
        build_distiller(recipe, read_data(recipe))


@pytest.mark.parametrize(
    ("method", "settings", "sentence"),
    [
        (
            "ce",
            ["data.unlabelled_share=1"],
            "data.unlabelled_share is 1 and the loss is cross-entropy only, which needs labels",
        ),
        ("ce", ["data.name=images"], "images have no labels, but cross-entropy needs them: choose a method"),
        (
            "kd",
            ["data.name=images", "weights.ce=0.5"],
            "weights.ce is set, but no image in a batch has a label for a cross-entropy",
        ),
    ],
)
def test_cross_entropy_without_labels_is_a_sentence(method, settings, sentence):
    with pytest.raises(RecipeError, match=sentence):
        resolve("digits/tiny", method=method, settings=settings)


def test_batches_without_labels_have_no_cross_entropy():
    assert resolve("digits/tiny", method="kd", settings=["data.unlabelled_share=1"]).weights["ce"] == 0


def test_a_probe_of_a_student_without_features_is_told_before_training(tmp_path):
    recipe = resolve("digits/tiny/ce", quick=True, settings=["probe.name=digits", 'student.taps={pooled="nowhere"}'])
    with pytest.raises(TapError, match="nowhere"):
        loop.train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_probe_without_labels_is_told_before_training(teacher, pictures, tmp_path):
    recipe = images_alone("kd", teacher, pictures, "probe.name=images", f"probe.root={str(pictures)!r}")
    with pytest.raises(DataError, match="a probe needs labelled training and test images, and images lacks them"):
        loop.train(recipe, tmp_path / "run")
    for part in ("train", "test"):
        a_tree(tmp_path / "one" / part, {"ant": 3})
    recipe = images_alone("kd", teacher, pictures, "probe.name=folder", f"probe.root={str(tmp_path / 'one')!r}")
    with pytest.raises(DataError, match="a probe needs two classes or more, and the training images of folder have one"):
        loop.train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
