"""`letkd search`: shared by processes, resumed after a kill, blind to the test split until the end."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import letkd.train.loop as loop
from letkd.runs.folder import RunFolder
from letkd.runs.study import read_study

optuna = pytest.importorskip("optuna")

SMALL = ["data.fraction=0.05", "train.steps=2", "train.epochs=3", "student.model=resnet8_tiny", "data.workers=0"]
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
    tested, loader = [], loop._Run._loader
    monkeypatch.setattr(
        loop._Run,
        "_loader",
        lambda self, split: (tested.append(self.run.path.name) if split == "test" else None, loader(self, split))[1],
    )
    code, out, err = letkd(*GIVEN, "--trials", 6, "--out", "study", "--pruner", "none")
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
    result = RunFolder(tmp_path / "study" / "final" / "seed-0").result
    table = (tmp_path / "study" / "table.md").read_text()
    assert f"Trial {study.best} on the test split, last epoch: {result.last_test:.2f} % (n = 1 seeds)." in table

    code, _, err = letkd("train", "study/best.toml", "--out", "again")
    assert code == 0, err
    assert RunFolder(tmp_path / "again").result.last_test == result.last_test, "best.toml is a recipe"

    code, _, err = letkd(*GIVEN, "--trials", 6, "--out", "study", "--pruner", "none")
    assert (code, set(tested)) == (0, {"again"}), err
    code, _, err = letkd(*GIVEN, "--trials", 6, "--out", "study", "--pruner", "none", "--search-seed", 1)
    assert (code, "is another search: its seed differs" in err) == (2, True)

    code, _, err = letkd("report", "study")
    assert code == 0, err
    page = (tmp_path / "study" / "report.html").read_text()
    assert "Trials of study" in page
    assert "Importance for the accuracy on validation" in page
    assert {"study-slices.png", "study-slices.svg"} <= {path.name for path in (tmp_path / "study" / "report").iterdir()}
    assert page.count("trial-0000") == 0, "trials are no rows of the tables"


def test_two_processes_one_killed_end_with_all_trials_and_the_best_of_one_process(tmp_path):
    """With random proposals and no pruning a trial depends on seed and number alone, so the best is the same."""
    given = [*GIVEN, "--trials", 20, "--sampler", "random", "--pruner", "none", "--set", "train.epochs=2"]
    alone = started(*given, "--out", "alone", cwd=tmp_path)
    assert alone.wait(900) == 0, alone.communicate()[1]
    first, second = (started(*given, "--out", "two", cwd=tmp_path) for _ in range(2))
    trials = tmp_path / "two" / "trials"
    for _ in range(3000):
        if len(list(trials.glob("trial-*/metrics.jsonl"))) >= 6 or first.poll() is not None:
            break
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    _, err = second.communicate(timeout=900)
    assert second.returncode == 0, err
    assert "its process ended; taken up again" in err
    one, two = ({t.number: (t.params, t.value, t.state.name) for t in trials_of(tmp_path / name)} for name in ("alone", "two"))
    assert len(two) == 20
    assert two == one
    assert read_study(tmp_path / "two").best == read_study(tmp_path / "alone").best
    assert len({t.user_attrs["process"] for t in trials_of(tmp_path / "two")}) == 2


def test_tpe_in_two_processes_says_why_its_best_may_differ(tmp_path):
    given = [*GIVEN, "--trials", 6, "--set", "train.epochs=1"]
    both = [started(*given, "--out", "two", cwd=tmp_path) for _ in range(2)]
    told = [process.communicate(timeout=900)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    trials = trials_of(tmp_path / "two")
    assert len(trials) == 6
    if len({t.user_attrs["process"] for t in trials}) == 2:
        assert all("another run of this search may find another best" in text for text in told)


def test_trials_in_jobs_and_with_halving(letkd, tmp_path):
    code, _, err = letkd(*GIVEN, "--trials", 5, "--out", "study", "--jobs", 2, "--set", "train.epochs=4")
    assert code == 0, err
    study = read_study(tmp_path / "study")
    assert {record.state for record in study.trials} <= {"COMPLETE", "PRUNED"}
    assert len(study.trials) == 5
    for record in study.trials:
        rows = RunFolder(tmp_path / "study" / "trials" / f"trial-{record.number:04}").rows()
        assert (len(rows), rows[-1]["val_top1"]) == (record.epochs, record.last)
        assert (record.epochs == 4) == (record.state == "COMPLETE")


def test_wrong_searches_get_a_sentence(letkd, tmp_path):
    lr = ["--over", "optim.lr=log:0.01..0.1"]
    for given, says in {
        ("digits/tiny/ce", "--over", "optim.lrr=log:0.01..0.1"): "unknown key 'optim.lrr' (nearest: lr",
        ("digits/tiny/ce", "--over", "optim.lr=0.3..0.01"): "the range is empty",
        ("digits/tiny/ce", "--over", "optim.momentum=0.5..2.0"): "'optim.momentum' is 2.0",
        ("digits/tiny/ce", "--over", "weights.kdd=0.5..2.0"): "there is a weight for 'kdd'",
        ("digits/tiny/ce", "--over", "optim.schedule=cosine|sideways"): "'optim.schedule' is 'sideways'",
        ("digits/tiny/kd", *lr): "needs a trained teacher",
        ("digits/tiny/ce", *lr, "--set", "data.val=0"): "a search chooses on the validation split, and digits has none here",
        (
            "digits/tiny/ce",
            *lr,
            "--storage",
            "postgresql://me:secret@127.0.0.1:1/x",
        ): "the storage postgresql://me:…@127.0.0.1:1/x",
        ("digits/tiny/ce", *lr, "--storage", "nonsense://x"): "the storage nonsense://x cannot be used",
        ("digits/tiny/ce", *lr, "--storage", "/proc/nowhere/study.journal"): "cannot be used",
        ("digits/tiny/ce", *lr, "--launcher", "local:0"): "write how many runs at once, from 1 to 256",
        ("digits/tiny/ce", *lr, "--launcher", "cloud"): "there is no such launcher",
        ("digits/tiny/ce", *lr, "--launcher", "slurm:partion=x"): "unknown setting 'partion'; nearest: partition",
        ("digits/tiny/ce", *lr, "--launcher", "local:2", "--jobs", 2): "give one of them",
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
    server.terminate()
    server.wait(60)


def test_a_database_shared_by_two_processes(database, tmp_path):
    given = [*GIVEN, "--trials", 6, "--set", "train.epochs=1", "--storage", database, "--study", "shared", "--out", "two"]
    both = [started(*given, cwd=tmp_path) for _ in range(2)]
    told = [process.communicate(timeout=900) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    trials = trials_of(tmp_path / "two", "shared", storage=database)
    assert [t.state.name for t in trials].count("COMPLETE") + [t.state.name for t in trials].count("PRUNED") == 6
    assert json.loads((tmp_path / "two" / "study.json").read_text())["name"] == "shared"
