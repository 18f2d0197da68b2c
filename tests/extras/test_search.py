"""`letkd search`: shared by processes, resumed after a kill, blind to the test split until the end."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import letkd.training.loop as loop
from letkd.distiller.cache import TeacherCache
from letkd.errors import RunError
from letkd.models import create_model, save_weights
from letkd.runs.folder import RunFolder
from letkd.runs.study_file import Record, read_study, rows_of
from letkd.supervision.kmeans import KMeansSupervision
from letkd.training.finish import Evaluation
from tests.support.runs import save_pictures

optuna = pytest.importorskip("optuna")

SMALL = ["data.fraction=0.05", "train.steps=2", "train.epochs=3", "student.model=resnet8_tiny", "data.workers=0"]
TRIALS = 20 if importlib.util.find_spec("ray") else 8  # twenty by make test-extras; eight, for time, by make test
OVER = ["--over", "optim.lr=log:0.001..0.5", "--over", "optim.momentum=0.0..0.95"]
GIVEN = ["search", "digits/tiny/ce", *(part for text in SMALL for part in ("--set", text)), *OVER, "--final-trials", "1"]


def started(*arguments: object, cwd: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "letkd", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def trials_of(folder: Path, name: str | None = None, storage=None):
    storage = storage or optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    )
    return optuna.load_study(study_name=name or folder.name, storage=storage).get_trials()


def test_a_search_from_the_first_trial_to_the_report(letkd, tmp_path, monkeypatch):
    tested, loader = [], Evaluation._loader
    monkeypatch.setattr(
        Evaluation,
        "_loader",
        lambda self, split: (tested.append(self.run.path.name) if split == "test" else None, loader(self, split))[1],
    )
    given = [*GIVEN, "--set", "train.validate_every=2"]
    code, out, err = letkd(*given, "--trials", 6, "--out", "study", "--pruner", "none")
    assert code == 0, err
    assert set(tested) == {"seed-0"}, "the test split is read for the winner alone"
    tested.clear()
    found = sorted((tmp_path / "study" / "trials").glob("trial-*"))
    assert [path.name for path in found] == [f"trial-{k:04}" for k in range(6)]
    assert not list((tmp_path / "study" / "trials").rglob("result.json"))
    study = read_study(tmp_path / "study")
    for record in study.trials:
        run = RunFolder(tmp_path / "study" / "trials" / f"trial-{record.number:04}")
        assert run.rows()[-1]["val_top1"] == record.value
        assert run.recipe.optim.lr == record.params["optim.lr"]
    best = max(study.trials, key=lambda record: record.value)
    assert study.trials[study.best].value == best.value
    recipe = tomllib.loads((tmp_path / "study" / "best.toml").read_text())
    assert recipe["optim"]["lr"] == study.trials[study.best].params["optim.lr"]
    assert "best of 6 trials: optim.lr = " in " ".join(out.split())
    result = RunFolder(tmp_path / "study" / "final" / f"trial-{study.best:04}" / "seed-0").result
    table = (tmp_path / "study" / "table.md").read_text()
    assert f"Trial {study.best} on the test split, last epoch: {result.last_test:.2f} % (n = 1 seeds)." in table

    code, _, err = letkd("train", "study/best.toml", "--out", "again")
    assert code == 0, err
    assert RunFolder(tmp_path / "again").result.last_test == result.last_test, "best.toml is a recipe"

    code, _, err = letkd(*given, "--trials", 6, "--out", "study", "--pruner", "none")
    assert (code, set(tested)) == (0, {"again"}), err
    code, _, err = letkd(*given, "--trials", 6, "--out", "study", "--pruner", "none", "--search-seed", 1)
    assert (code, "belongs to another search: its seed differs" in err) == (2, True)

    code, _, err = letkd("report", "study")
    assert code == 0, err
    page = (tmp_path / "study" / "report.html").read_text()
    assert "Trials of study" in page
    assert "Importance for the validation accuracy" in page
    assert {"study-slices.png", "study-slices.svg"} <= {path.name for path in (tmp_path / "study" / "report").iterdir()}
    assert "trials/trial-0000" not in page, "trials are no rows of the tables"


def stopped_in_a_trial(process: subprocess.Popen, folder: Path, epochs: int) -> int:
    """Halt a process after the first epoch of a trial and before the last; gives the trial's number."""
    until = time.monotonic() + 600
    while time.monotonic() < until and process.poll() is None:
        for lock in folder.glob("trials/.trial-*.lock"):
            run = RunFolder(lock.with_name(lock.stem.lstrip(".")))
            if lock.read_text().startswith(f"process {process.pid} on ") and (run.last / "checkpoint.safetensors").exists():
                process.send_signal(signal.SIGSTOP)
                time.sleep(0.05)  # the signal takes a moment
                if len(run.rows()) < epochs:
                    return int(lock.stem.rpartition("-")[2])
                process.send_signal(signal.SIGCONT)
        time.sleep(0.02)
    raise AssertionError(f"no trial to stop in: {process.poll()}")


def one_of_two_killed(given: Sequence[object], out: str, trials: int, cwd: Path, epochs: int) -> tuple[int, str]:
    """Two processes run a search, one is killed in a trial while the other runs on; gives that trial and what the other said."""
    first, second = (started(*given, "--trials", trials, "--out", out, cwd=cwd) for _ in range(2))
    number = stopped_in_a_trial(first, cwd / out, epochs)
    seen = len(list((cwd / out / "trials").glob("trial-*/metrics.jsonl")))
    # The halted process may hold a lock that the other waits for, so it is not awaited forever.
    until = time.monotonic() + 20
    while len(list((cwd / out / "trials").glob("trial-*/metrics.jsonl"))) == seen and time.monotonic() < until:
        time.sleep(0.05)
    first.kill()
    first.communicate(timeout=60)
    _, err = second.communicate(timeout=900)
    assert second.returncode == 0, err
    assert f"trial {number}: its process ended; resumed" in err
    assert f"trial-{number:04}: resumes after epoch" in err, "from its checkpoint"
    return number, err


def test_two_processes_one_killed_end_with_all_trials_and_the_best_of_one_process(tmp_path):
    """With random proposals and no pruning a trial depends on seed and number alone, so the best is the same."""
    given = [*GIVEN, "--sampler", "random", "--pruner", "none"]
    alone = started(*given, "--trials", TRIALS, "--out", "alone", cwd=tmp_path)
    _, err = alone.communicate(timeout=900)
    assert alone.returncode == 0, err
    number, err = one_of_two_killed(given, "two", TRIALS, tmp_path, epochs=3)
    one, two = ({t.number: (t.params, t.value, t.state.name) for t in trials_of(tmp_path / name)} for name in ("alone", "two"))
    assert len(two) == TRIALS
    assert two == one, f"trial {number} was killed"
    assert read_study(tmp_path / "two").best == read_study(tmp_path / "alone").best
    assert "may find another best" not in err


def test_trials_in_jobs_and_with_halving(letkd, tmp_path):
    code, _, err = letkd(*GIVEN, "--trials", 3, "--out", "study", "--jobs", 2, "--set", "train.epochs=4")
    assert code == 0, err
    study = read_study(tmp_path / "study")
    assert {record.state for record in study.trials} <= {"COMPLETE", "PRUNED"}
    assert len(study.trials) == 3
    for record in study.trials:
        rows = RunFolder(tmp_path / "study" / "trials" / f"trial-{record.number:04}").rows()
        assert (len(rows), rows[-1]["val_top1"]) == (record.epochs, record.last)
        assert (record.epochs == 4) == (record.state == "COMPLETE")


def test_wrong_searches_get_a_sentence(letkd, tmp_path):
    lr = ["--over", "optim.lr=log:0.01..0.1"]
    pictures = save_pictures(tmp_path / "pictures")
    alone = [
        "--set",
        "data.name=images",
        "--set",
        f"data.root={pictures}",
        "--set",
        "data.size=32",
        "--teacher-weights",
        pictures / "none.safetensors",
    ]
    for given, says in {
        ("digits/tiny/ce", "--over", "optim.lrr=log:0.01..0.1"): "unknown key 'optim.lrr' (nearest: lr",
        ("digits/tiny/ce", "--over", "optim.lr=0.3..0.01"): "the range is empty",
        ("digits/tiny/ce", "--over", "optim.momentum=0.5..2.0"): "'optim.momentum' is 2.0",
        ("digits/tiny/ce", "--over", "weights.kdd=0.5..2.0"): "there is a weight for 'kdd'",
        ("digits/tiny/ce", "--over", "optim.schedule=cosine|sideways"): "'optim.schedule' is 'sideways'",
        ("digits/tiny/kd", *lr): "needs a trained teacher",
        ("digits/tiny/kd", *lr, *alone): "a search selects by accuracy on the validation split, but images has no labels",
        ("digits/tiny/ce", *lr, "--set", "data.val=0"): "a search selects on the validation split, but digits has none here",
        (
            "digits/tiny/ce",
            *lr,
            "--storage",
            "postgresql://me:secret@127.0.0.1:1/x",
        ): "the storage postgresql://me:…@127.0.0.1:1/x",
        ("digits/tiny/ce", *lr, "--storage", "nonsense://x"): "the storage nonsense://x cannot be used",
        ("digits/tiny/ce", *lr, "--storage", "/proc/nowhere/study.journal"): "cannot be used",
        ("digits/tiny/ce", *lr, "--launcher", "local:0"): "write the number of parallel runs, 1 to 256",
        ("digits/tiny/ce", *lr, "--launcher", "cloud"): "unknown launcher",
        ("digits/tiny/ce", *lr, "--launcher", "slurm:partion=x"): "unknown setting 'partion'; nearest: partition",
        ("digits/tiny/ce", *lr, "--launcher", "local:2", "--jobs", 2): "give only one of them",
    }.items():
        code, _, err = letkd("search", *given, "--out", tmp_path / "study")
        assert (code, err.count("\n")) == (2, 1), (given, err)
        assert says in err, err
        assert "secret" not in err
        assert not (tmp_path / "study" / "trials").exists()


POSTGRES = shutil.which("pg_ctl") or next(map(str, Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")), None)


@pytest.fixture
def database(tmp_path):
    """The address of a PostgreSQL server of this test's own; of an SQLite file if PostgreSQL is not installed."""
    if POSTGRES is None:
        yield f"sqlite:///{tmp_path / 'study.db'}"
        return
    pytest.importorskip("psycopg")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path / "postgres"
    folder.mkdir()
    user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.getuid() == 0 else []
    if user:
        for path in (folder, *list(tmp_path.parents)[:3], tmp_path):
            os.chmod(path, 0o755)
        shutil.chown(folder, "nobody", "nogroup")
    tools = Path(POSTGRES).resolve().parent
    subprocess.run(
        [*user, tools / "initdb", "-D", folder / "data", "-U", "letkd", "-A", "trust"], check=True, capture_output=True
    )
    server = subprocess.Popen(
        [*user, tools / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder, "-h", "127.0.0.1"],
        stderr=subprocess.DEVNULL,
    )
    import psycopg

    for _ in range(200):
        try:
            psycopg.connect(host="127.0.0.1", port=port, user="letkd", dbname="postgres").close()
            break
        except psycopg.OperationalError:
            time.sleep(0.1)
    yield f"postgresql://letkd@127.0.0.1:{port}/postgres"
    server.send_signal(signal.SIGINT)  # without waiting for connections to be closed
    server.wait(60)


def test_a_database_shared_by_two_processes_one_of_them_killed(database, tmp_path):
    given = [*GIVEN, "--pruner", "none", "--storage", database, "--study", "shared"]
    _, err = one_of_two_killed(given, "two", 5, tmp_path, epochs=3)
    assert [t.state.name for t in trials_of(tmp_path / "two", "shared", storage=database)] == ["COMPLETE"] * 5
    assert json.loads((tmp_path / "two" / "study.json").read_text())["name"] == "shared"
    assert "trials ran in parallel: " in err, "TPE's best depends on timing then"
    assert "search may find another best trial" in err


def test_a_search_extended_is_that_of_one_go(letkd, tmp_path):
    """TPE, too, proposes the same if trials follow each other; with more trials the winner may be another one."""
    for out, trials in (("whole", 5), ("parts", 2), ("parts", 5)):
        code, _, err = letkd(*GIVEN, "--trials", trials, "--out", out, "--set", "train.epochs=1")
        assert code == 0, err
        assert "may find another best" not in err
    one, two = ([(t.params, t.value) for t in trials_of(tmp_path / name)] for name in ("whole", "parts"))
    assert one == two
    assert read_study(tmp_path / "whole") == replace(read_study(tmp_path / "parts"), name="whole")


def test_trials_share_fits_and_what_the_teacher_said(letkd, tmp_path, monkeypatch):
    code, _, err = letkd("train", "digits/tiny/teacher", "--quick", "--out", "teacher")
    assert code == 0, err
    made, make = [], TeacherCache._make
    monkeypatch.setattr(TeacherCache, "_make", lambda self, *args: made.append(args) or make(self, *args))
    fitted, finish = [], KMeansSupervision.finish
    monkeypatch.setattr(KMeansSupervision, "finish", lambda self: fitted.append(self.K) or finish(self))
    site = "methods.letkd.sites.penultimate"
    small = ["--quick", "--cache", "--teacher-weights", "teacher/student.safetensors", "--set", f"{site}.supervision.K=4"]
    code, _, err = letkd(
        *("search", "digits/tiny/letkd-1", *small, "--trials", 3, "--final-trials", 2, "--out", "study"),
        *("--over", 'weights."kd/penultimate"=0.5..2.0', "--over", "optim.lr=log:0.01..0.3"),
    )
    assert code == 0, err
    assert fitted == [4], "one fit for three trials and two seeds of the winner"
    assert len(made) == 1, "one epoch shows one view, on which the teacher runs once"


def test_a_lock_that_is_a_link_is_an_error_and_no_wait(letkd, tmp_path):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / ".study.lock").symlink_to(tmp_path / "elsewhere")
    code, _, err = letkd(*GIVEN, "--trials", 1, "--out", "study")
    assert (code, "cannot be used as a lock: it is a link; remove it" in err) == (2, True), err
    assert not (tmp_path / "elsewhere").exists()


def test_a_storage_that_breaks_down_leaves_the_trial_open(letkd, tmp_path, monkeypatch):
    given = [*GIVEN, "--trials", 2, "--out", "study", "--storage", f"sqlite:///{tmp_path / 'study.db'}", "--pruner", "none"]

    def broken(*args, **kwargs):
        raise optuna.exceptions.StorageInternalError("the line is dead")

    with monkeypatch.context() as patch:
        patch.setattr(optuna.storages.RDBStorage, "set_trial_intermediate_value", broken)
        code, _, err = letkd(*given)
    assert (code, "the line is dead; check that it exists and can be reached" in err) == (2, True), err
    code, _, err = letkd(*given)
    assert code == 0, err
    assert "trial 0: its process ended; resumed" in err
    assert [record.state for record in read_study(tmp_path / "study").trials] == ["COMPLETE"] * 2


def test_another_teacher_needs_another_study(letkd, tmp_path):
    for seed in range(2):
        torch.manual_seed(seed)
        save_weights(create_model("resnet14", num_classes=10), tmp_path / f"{seed}.safetensors")
    given = ["search", "digits/tiny/kd", *GIVEN[2:], "--set", "train.epochs=1", "--pruner", "none", "--out", "study"]
    code, _, err = letkd(*given, "--trials", 1, "--teacher-weights", "0.safetensors")
    assert code == 0, err
    code, _, err = letkd(*given, "--trials", 2, "--teacher-weights", "1.safetensors")
    assert (code, len(trials_of(tmp_path / "study"))) == (2, 1), err
    assert "trial-0000 had other inputs (teacher), so its accuracy cannot be compared; restore them, or choose" in err


def test_other_initial_weights_need_another_study(letkd, tmp_path):
    for seed in range(2):
        torch.manual_seed(seed)
        save_weights(create_model("resnet8", num_classes=10), tmp_path / f"{seed}.safetensors")
    given = [
        "search",
        "digits/tiny/ce",
        *GIVEN[2:],
        "--set",
        "train.epochs=1",
        "--set",
        "student.model=resnet8",
        "--out",
        "study",
    ]
    code, _, err = letkd(*given, "--trials", 1, "--pruner", "none", "--student-weights", "0.safetensors")
    assert code == 0, err
    code, _, err = letkd(*given, "--trials", 2, "--pruner", "none", "--student-weights", "1.safetensors")
    assert (code, "belongs to another search: its recipe differs" in err) == (2, True), err


def test_values_stand_under_their_keys_in_any_order():
    record = Record(0, "COMPLETE", {"a": 1, "b": 2.5}, 50.0, 1, 50.0)
    assert rows_of(["b", "a"], [record], best=0)[1][0][1:3] == ["2.5", "1"]


def test_a_fault_of_the_machine_leaves_the_trial_open_and_one_of_its_values_ends_it(letkd, tmp_path, monkeypatch):
    given = [*GIVEN, "--trials", 3, "--out", "study", "--pruner", "none", "--set", "train.epochs=1"]
    train, errors = (
        loop.train,
        [None, RunError("there is no space left; run the same command again"), AssertionError("too large")],
    )

    def failing(*args, **options):
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        return train(*args, **options)

    monkeypatch.setattr(loop, "train", failing)
    code, _, err = letkd(*given)
    assert (code, "there is no space left" in err) == (2, True), err
    assert [trial.state.name for trial in trials_of(tmp_path / "study")] == ["COMPLETE", "RUNNING"]
    code, _, err = letkd(*given)
    assert code == 0, err
    assert "trial 1 AssertionError: too large" in err
    assert [trial.state.name for trial in trials_of(tmp_path / "study")] == ["COMPLETE", "FAIL", "COMPLETE"]
    code, _, err = letkd(*given[: len(GIVEN)], "--trials", 2, *given[len(GIVEN) + 2 :])  # fewer than there are
    assert code == 0, err
