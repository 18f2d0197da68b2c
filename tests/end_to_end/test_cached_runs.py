"""Runs that read the teacher from a cache: killed or stopped anywhere, with it filled or empty, they end with the same bits."""

import shutil
import signal

import pytest
import torch

import letkd.training.loop as loop
from letkd.distiller.cache import TeacherCache
from letkd.errors import Stopped
from letkd.recipes import resolve
from letkd.runs.folder import RunFolder
from tests.support.runs import SMALL, recipe_for, same_end, stop_after, weather

CACHED = "train.cache_views=2"


@pytest.mark.storm
def test_a_cached_run_killed_anywhere_ends_with_the_same_bits(teacher, tmp_path):
    weather(recipe_for("letkd-2", teacher, CACHED), tmp_path, seed=5)


@pytest.mark.parametrize(
    ("view", "steps"), [(1, 0), (0, 2), (2, 0)]
)  # while view 1 is made; within epoch 1; while view 2 is made
def test_a_cached_run_stopped_goes_on_whatever_became_of_its_shards(view, steps, teacher, whole, tmp_path, monkeypatch):
    recipe = recipe_for("letkd-2", teacher, CACHED)
    made = iter((1, 2, 3))

    def prepare(self, *values):
        if next(made) == view:
            signal.raise_signal(signal.SIGTERM)
        TeacherCache.prepare(self, *values)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "TeacherCache", type("Stopping", (TeacherCache,), {"prepare": prepare}))
        with pytest.raises(Stopped, match=rf"stopped in epoch {view or 1} of 3"):
            loop.train(recipe, tmp_path / "stopped", on_step=stop_after(steps))
    torch.manual_seed(123)  # whatever happened in between
    shutil.rmtree(tmp_path / "stopped" / "supervision" / "views")
    loop.train(recipe, tmp_path / "stopped")
    same_end(whole(recipe), tmp_path / "stopped")


def test_another_seed_and_another_method_of_the_same_needs_make_nothing_anew(teacher, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    loop.train(recipe_for("letkd-1", teacher, CACHED), tmp_path / "first", supervision=shared)
    made = []
    make = TeacherCache._make
    monkeypatch.setattr(TeacherCache, "_make", lambda self, *args: made.append(args) or make(self, *args))
    for method, seed in (("letkd-1", 1), ("quest", 0)):
        loop.train(recipe_for(method, teacher, CACHED, f"train.seed={seed}"), tmp_path / f"{method}-{seed}", supervision=shared)
        assert made == []
    loop.train(recipe_for("kd", teacher, CACHED), tmp_path / "kd", supervision=shared)
    assert len(made) == 2


@pytest.mark.parametrize("settings", [(), (CACHED,)])
def test_a_site_of_weight_0_is_neither_fitted_nor_cached(settings, teacher, tmp_path):
    recipe = recipe_for("letkd-2", teacher, *settings, 'weights."kd/intermediate"=0', "train.epochs=1")
    loop.train(recipe, tmp_path / "run")
    names = [path.name for path in (tmp_path / "run" / "supervision").rglob("*") if "intermediate" in path.name]
    assert names == []
    (row,) = RunFolder(tmp_path / "run").rows()
    assert "kd/penultimate" in row
    assert "kd/intermediate" not in row
    assert "entropy_T" not in row["health"]["intermediate"]


@pytest.mark.parametrize("method", ["letkd-2", "letkd-1-3x3", "crd-kd"])
def test_a_mixed_precision_run_reads_what_a_run_in_single_precision_made(method, teacher, tmp_path):
    files = {}
    for shared in ("single first", "mixed first"):
        for precision in ("32-true", "bf16-mixed") if shared == "single first" else ("bf16-mixed", "32-true"):
            settings = (CACHED, f"train.precision={precision}", "train.epochs=1")
            loop.train(recipe_for(method, teacher, *settings), tmp_path / shared / precision, supervision=tmp_path / shared)
        views = (tmp_path / shared / "views").rglob("*.safetensors")
        files[shared] = {path.relative_to(tmp_path / shared): path.read_bytes() for path in views}
    assert files["single first"] == files["mixed first"] != {}
    students = [(tmp_path / shared / "32-true/student.safetensors").read_bytes() for shared in files]
    assert students[0] == students[1]


def test_the_flag_and_the_methods_it_does_not_serve(letkd, teacher, tmp_path):
    small = [part for text in [*SMALL, "train.epochs=1"] for part in ("--set", text)]
    options = ["--teacher-weights", teacher, "--cache", *small, "--out"]
    code, _, err = letkd("train", "digits/tiny/kd", *options, tmp_path / "kd")
    assert code == 0, err
    assert resolve(tmp_path / "kd" / "recipe.toml").train.cache_views == 1
    assert len(list((tmp_path / "kd").rglob("view-*/*.safetensors"))) == 1
    code, _, err = letkd("train", "digits/tiny/at", *options, tmp_path / "at")
    assert code == 2
    assert "but 'at' needs whole maps; train without the cache" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not (tmp_path / "at").exists()


def test_a_comparison_pays_the_teacher_once_where_the_method_allows(letkd, teacher, tmp_path, monkeypatch):
    made, make = [], TeacherCache._make
    monkeypatch.setattr(TeacherCache, "_make", lambda self, *args: made.append(args[2]) or make(self, *args))
    small = [part for text in [*SMALL, "train.epochs=4"] for part in ("--set", text)]
    given = ["--teacher-weights", teacher, "--methods", "kd,dkd,at,mlkd", "--trials", 2, *small]
    code, _, err = letkd("compare", "digits/tiny", *given, "--cache", "--out", "runs")
    assert code == 0, err
    assert sorted(made) == [0, 1], "four epochs show two views; KD's and DKD's seeds read the same logits"
    assert "at: cannot use the cache; the teacher runs at every step, on the same views" in err
    assert "mlkd: needs two views of every image" in err
    train = {row: resolve(tmp_path / "runs" / row / "seed-1" / "recipe.toml").train for row in ("kd", "dkd", "at", "mlkd")}
    assert {row: (held.cache_views, held.cache_teacher) for row, held in train.items()} == {
        "kd": (2, True),
        "dkd": (2, True),
        "at": (2, False),
        "mlkd": (None, True),
    }
    assert (tmp_path / "runs" / "at" / "seed-1" / "result.json").exists()
