"""Runs through submitit's local executor and through Ray, a worker killed in each: the bits are those of one process."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from letkd.errors import LetkdError
from letkd.models.weights import read_state_dict
from letkd.recipes import resolve
from letkd.runs.study_file import read_study
from letkd.training.launchers import Ray, Slurm, TrainTask, launcher_from

HEAVY = "make test-extras installs it"
SMALL = [*("data.fraction=0.05", "train.steps=2", "train.epochs=8", "data.workers=0"), "student.model=resnet8_tiny"]
TEACHER = "teacher.model=resnet8_tiny"
ROWS = ("ce", "kd")
SEEDS = 6 if importlib.util.find_spec("ray") else 1  # twelve runs by make test-extras; two, for time, by make test
RUNS = [f"{row}/seed-{seed}" for row in ROWS for seed in range(SEEDS)]
COMPARE = [*("compare", "digits/tiny", "--methods", ",".join(ROWS), "--trials", str(SEEDS))]
COMPARE += [part for text in (*SMALL, TEACHER) for part in ("--set", text)]


def started(*arguments: object, cwd: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "letkd", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_one(folder: Path) -> str:
    """Kill the process that holds a run that has written a checkpoint; gives the run."""
    until = time.monotonic() + 600
    while time.monotonic() < until:
        for lock in folder.glob("*/seed-*/.lock"):
            run, text = lock.parent, lock.read_text()
            if text and (run / "last").is_dir() and not (run / "result.json").exists():
                pid = int(text.split()[1])
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.05)  # the signal takes a moment
                unfinished = not (run / "result.json").exists()
                os.kill(pid, signal.SIGKILL if unfinished else signal.SIGCONT)
                if unfinished:
                    return str(run)
        time.sleep(0.02)
    raise AssertionError(f"no run to kill in {folder}")


def same_bits(one: Path, two: Path) -> bool:
    a, b = (read_state_dict(run / "student.safetensors") for run in (one, two))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory) -> Path:
    """The runs one after the other, in one process."""
    folder = tmp_path_factory.mktemp("turn")
    process = started(*COMPARE, "--out", "runs", cwd=folder)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return folder / "runs"


def compared_with_one_killed(in_turn: Path, launcher: str, folder: Path) -> tuple[str, str]:
    """The same comparison by a launcher, a worker killed in the middle: same bits. Gives the killed run and what was said."""
    given = [*COMPARE, "--teacher-weights", in_turn / "teacher" / "student.safetensors", "--out", "runs"]
    process = started(*given, "--launcher", launcher, cwd=folder)
    killed = kill_one(folder / "runs")
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    for run in RUNS:
        assert same_bits(in_turn / run, folder / "runs" / run), f"{run}, killed was {killed}"
        assert f"runs/{run}: finished; " in err, "told as it comes"
    one, two = ((runs / "table.md").read_text().splitlines() for runs in (in_turn, folder / "runs"))
    for title in ("Student", "KD"):
        (a,), (b,) = ([line.split(" | ")[:-1] for line in table if line.startswith(f"| {title} |")] for table in (one, two))
        assert a == b, "the same row, but for its time"
    return killed, err


def test_runs_through_submitit_with_a_worker_killed(in_turn, tmp_path):
    pytest.importorskip("submitit")
    killed, err = compared_with_one_killed(in_turn, "slurm:cluster=local,jobs=2,minutes=60", tmp_path)
    run = str(Path(killed).relative_to(tmp_path))
    assert f"{run}: job " in err
    assert "returned no result" in err
    assert "started again" in err


def task(folder: Path) -> TrainTask:
    return TrainTask(resolve("digits/tiny/ce", settings=SMALL), folder)


def test_a_job_at_its_time_limit_writes_a_checkpoint_and_is_requeued(tmp_path, monkeypatch):
    """The signal that submitit sends ahead of the limit, sent by hand."""
    submitit = pytest.importorskip("submitit")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    submitted = []
    submit = submitit.AutoExecutor.submit
    monkeypatch.setattr(
        submitit.AutoExecutor, "submit", lambda self, *args: submitted.append(submit(self, *args)) or submitted[-1]
    )

    def limit() -> None:
        for _ in range(6000):
            if (tmp_path / "seed-0" / "last").is_dir():
                holder = (tmp_path / "seed-0" / ".lock").read_text().split()[1]
                os.kill(int(holder), signal.SIGUSR2)
                return
            time.sleep(0.02)

    watcher = threading.Thread(target=limit)
    watcher.start()
    outcomes = dict(Slurm(tmp_path / "slurm", cluster="local", minutes=60).run([task(tmp_path / "seed-0")]))
    watcher.join()
    assert outcomes[0].state == "done", outcomes
    assert len(submitted) == 1, "requeued by submitit, not submitted again"
    log = submitted[0].stdout() + submitted[0].stderr()
    assert "Requeued job" in log
    assert "resumes" in log, "it resumed"
    task(tmp_path / "whole")()
    assert same_bits(tmp_path / "whole", tmp_path / "seed-0")


@pytest.fixture(scope="module")
def ray_head(tmp_path_factory):
    """A Ray head of these tests' own, with two CPUs."""
    pytest.importorskip("ray", reason=HEAVY)
    log = tmp_path_factory.mktemp("ray") / "ray.log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", str(port), "--num-cpus", "2"]
    command += ["--node-ip-address", "127.0.0.1", "--include-dashboard", "false", "--disable-usage-stats"]
    head = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert head.poll() is None, log.read_text()
        time.sleep(0.2)
    time.sleep(5)
    yield f"127.0.0.1:{port}"
    head.terminate()
    head.wait(60)


def test_runs_through_ray_with_a_worker_killed(in_turn, ray_head, tmp_path):
    compared_with_one_killed(in_turn, f"ray:address={ray_head},cpus=1", tmp_path)


def test_a_search_through_ray(ray_head, tmp_path):
    pytest.importorskip("optuna", reason=HEAVY)
    small = [part for text in (*SMALL, "train.epochs=2") for part in ("--set", text)]
    given = ["search", "digits/tiny/ce", *small, "--over", "optim.lr=log:0.001..0.5", "--trials", 4, "--final-trials", 2]
    process = started(*given, "--launcher", f"ray:address={ray_head}", "--out", "study", cwd=tmp_path)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    study = read_study(tmp_path / "study")
    assert [record.number for record in study.trials] == [0, 1, 2, 3]
    assert study.trials[study.best].state == "COMPLETE"
    assert len(list((tmp_path / "study" / "final").glob("trial-*/seed-*/result.json"))) == 2


def test_slurm_that_is_not_there_gets_a_sentence(monkeypatch, tmp_path):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LetkdError, match=r"SLURM is not installed here \(no srun found\)"):
        launcher_from("slurm", tmp_path)


def test_a_ray_cluster_that_is_not_there_gets_a_sentence(monkeypatch, tmp_path):
    pytest.importorskip("ray", reason=HEAVY)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    where = r"no Ray cluster can be reached at 127\.0\.0\.1:9 .*start one with `ray start --head`"
    with pytest.raises(LetkdError, match=where):
        dict(Ray().run([task(tmp_path / "run")]))


@pytest.mark.parametrize(("package", "spec"), [("submitit", "slurm"), ("ray", "ray")])
def test_a_library_that_is_not_there_gets_a_sentence(monkeypatch, tmp_path, package, spec):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(LetkdError, match=rf"--launcher {spec} needs {package}, which is not installed: .*letkd\[{spec}\]"):
        launcher_from(spec, tmp_path)
