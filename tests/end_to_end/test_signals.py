"""SIGTERM at every stage of a command: exit code 75, no file half written, and the same command resumes."""

import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import letkd.training.loop as loop
from letkd.models import create_model
from letkd.models.weights import read_state_dict
from letkd.recipes import resolve
from tests.support.trees import a_tree

SMALL = [
    "data.fraction=0.05",
    "data.batch_size=16",
    "train.epochs=2",
    "train.steps=2",
    "train.cache_views=2",
    "optim.milestones=[1]",
    "teacher.model=resnet8_tiny",
    "methods.letkd.sites.penultimate.supervision.K=8",
]


def words(*settings: str) -> list[str]:
    return [word for text in settings for word in ("--set", text)]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Weights as others save them."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("teacher") / "teacher.pth"
    torch.save(create_model("resnet8_tiny", num_classes=10).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def whole(teacher, tmp_path_factory):
    """The run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    given = {"teacher.weights": str(teacher), "student.model": "resnet8_tiny"}
    loop.train(resolve("digits/tiny/letkd-1", overrides=given, settings=SMALL), folder)
    return folder


@pytest.fixture
def train(letkd, teacher):
    arguments = ["train", "digits/tiny/letkd-1", *words(*SMALL), "--student", "resnet8_tiny", "--teacher-weights", teacher]
    return lambda out: letkd(*arguments, "--out", out)


def term_at(patch: pytest.MonkeyPatch, place: str, call: int = 1) -> list[int]:
    """SIGTERM when the function at `place` is called for the n-th time; the list grows by an entry with each call."""
    real, calls = pkgutil.resolve_name(place), []

    def hooked(*args, **options):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return real(*args, **options)

    patch.setattr(place, hooked)
    return calls


STAGES = {
    "reading data": ("letkd.training.loop.read_data", 1),
    "loading weights": ("torch.load", 1),
    "fitting": ("letkd.supervision.kmeans.kmeans", 1),
    "writing what was fitted": ("letkd.supervision.artefacts.write_whole", 1),
    "caching": ("letkd.distiller.cache.checksum", 1),
    "caching the second view": ("letkd.distiller.cache.checksum", 5),
    "training": ("torch.optim.SGD.step", 2),
    "evaluating on the validation split": ("letkd.runs.evaluation.as_logits", 1),
    "evaluating on the test split": ("letkd.runs.evaluation.as_logits", 4),
    "writing a checkpoint": ("letkd.runs.checkpoint.write_whole", 1),
}


@pytest.mark.parametrize("stage", STAGES)
def test_term_at_any_stage_of_a_run_exits_with_75_and_the_run_resumes(stage, train, whole, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        calls = term_at(patch, *STAGES[stage])
        code, _, err = train("run")
    assert len(calls) >= STAGES[stage][1], "the stage was not reached"
    assert code == 75, err
    assert err.splitlines()[-1].startswith("letkd: stopped")
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("*.tmp"))
    code, _, err = train("run")
    assert code == 0, err
    one, two = (read_state_dict(path / "student.safetensors") for path in (whole, tmp_path / "run"))
    assert [key for key in one if not torch.equal(one[key], two[key])] == []


def test_term_while_images_are_checked_drops_none(letkd, monkeypatch, tmp_path):
    root = a_tree(tmp_path / "tree" / "train", {"cat": 6, "dog": 6}).parent
    a_tree(root / "test", {"cat": 2, "dog": 2})
    given = ["--data", "folder", "--root", root, *words("data.corrupt=skip", "data.workers=0", "data.size=16", "data.val=0.2")]
    command = ["train", "--student", "resnet8_tiny", "--method", "ce", *given, *words("train.epochs=1", "data.batch_size=4")]
    with monkeypatch.context() as patch:
        term_at(patch, "PIL.Image.open", 3)
        code, _, err = letkd(*command, "--out", "run")
    assert code == 75, err
    assert "cannot be decoded" not in err
    code, _, err = letkd(*command, "--out", "run")
    assert code == 0, err


@pytest.fixture
def finished(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["eval", "run"], "letkd.runs.evaluation.as_logits"),
        (["report", "run"], "matplotlib.figure.Figure.savefig"),
        (["export", "run", "--to", "safetensors"], "letkd.deploy.ship.fold_student"),
        (["predict", "run/student.safetensors", "cat.png"], "PIL.Image.open"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_term_at_other_verbs(arguments, place, finished, letkd, monkeypatch, tmp_path):
    a_tree(tmp_path, {"images": 1})
    os.replace(tmp_path / "images" / "000.png", tmp_path / "cat.png")
    with monkeypatch.context() as patch:
        calls = term_at(patch, place)
        code, _, err = letkd(*arguments)
    assert calls, "the stage was not reached"
    assert (code, err.splitlines()[-1]) == (75, "letkd: stopped; run the same command again to resume")
    assert not list(tmp_path.rglob("*.tmp"))
    code, _, err = letkd(*arguments) if arguments[0] != "report" else (0, "", "")  # it takes long; other tests write reports
    assert code == 0, err


class Finaliser:
    """An exception raised in here is printed and lost."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("place", ["letkd.training.loop.read_data", "letkd.training.build.load_data"])
def test_a_stop_that_another_library_lost_still_stops_the_command(place, train, monkeypatch, tmp_path):
    real = pkgutil.resolve_name(place)

    def lose(*args, **options):
        Finaliser()
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(place, lose)
        code, _, err = train("run")
    assert code == 75, err
    assert "letkd: stopped in epoch 1 of 2" in err


def test_a_stop_that_another_library_turned_into_an_error_is_a_stop(train, monkeypatch):
    def turn(*args, **options):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError("import failed") from error

    monkeypatch.setattr("letkd.training.loop.read_data", turn)
    code, _, err = train("run")
    assert (code, err) == (75, "letkd: stopped; run the same command again to resume\n")


def test_a_comparison_stops_if_the_row_that_was_asked_to_stop_fails(letkd, teacher, monkeypatch, tmp_path):
    real, calls = loop.Steps.take, []

    def asked_then_fails(learner, *args, **options):
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("this row fails")
        return real(learner, *args, **options)

    monkeypatch.setattr(loop.Steps, "take", asked_then_fails)
    settings = words(*(text for text in SMALL if not text.startswith("methods")))
    arguments = ["compare", "digits/tiny", "--methods", "ce,kd", "--trials", 1, *settings, "--teacher-weights", teacher]
    assert letkd(*arguments, "--out", tmp_path / "rows")[0] == 75
    assert len(calls) <= 2  # the second row stops after one step at most
    assert letkd(*arguments, "--out", tmp_path / "rows")[0] == 0


def start(*arguments, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "letkd", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options)


def wait_for(condition, process: subprocess.Popen) -> None:
    for _ in range(1800):
        if condition() or process.poll() is not None:
            break
        time.sleep(0.1)
    assert condition()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for orphans in /proc")
def test_seeds_end_with_a_parent_that_is_killed(tmp_path):
    small = words("data.fraction=0.05", "data.batch_size=16", "train.epochs=100000", "train.steps=2", "optim.milestones=[1]")
    run = start("train", "digits/tiny/ce", *small, "--trials", 2, "--jobs", 2, "--out", tmp_path / "runs")
    metrics = [tmp_path / "runs" / f"seed-{seed}" / "metrics.jsonl" for seed in range(2)]
    wait_for(lambda: all(path.exists() for path in metrics), run)
    tasks = Path(f"/proc/{run.pid}/task").glob("*")
    seeds = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    seeds = [pid for pid in seeds if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(seeds) == 2
    run.kill()
    run.wait()  # not communicate(): the seeds have its standard error
    for _ in range(300):
        if not any(Path(f"/proc/{pid}/task").exists() and Path(f"/proc/{pid}/cmdline").read_text() for pid in seeds):
            break
        time.sleep(0.1)
    else:
        for pid in seeds:
            os.kill(pid, signal.SIGKILL)
        pytest.fail("the seeds went on training")
    for path in metrics:
        assert (path.parent / "last" / "checkpoint.safetensors").exists()
