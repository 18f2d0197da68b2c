"""Twelve runs through submitit's local executor and through Ray, a worker killed in each: the numbers are those of one process."""

import os
import shutil
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
from letkd.train.launchers import Ray, Slurm, TrainTask, launcher_from

SMALL = ["data.fraction=0.05", "train.steps=2", "student.model=resnet8_tiny", "data.workers=0"]
RUNS = 12


def tasks(folder: Path, epochs: int = 40) -> list[TrainTask]:
    recipes = [resolve("digits/tiny/ce", settings=[*SMALL, f"train.epochs={epochs}", f"train.seed={k}"]) for k in range(RUNS)]
    return [TrainTask(recipe, folder / f"seed-{k}") for k, recipe in enumerate(recipes)]


def kill_one(folder: Path, killed: list[int]) -> None:
    """Kill the process that holds the first run that has written a checkpoint."""
    for _ in range(6000):
        for lock in folder.glob("seed-*/.lock"):
            text = lock.read_text()
            if text and (lock.parent / "last").is_dir() and not (lock.parent / "result.json").exists():
                pid = int(text.split()[1])
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return
        time.sleep(0.02)


def same_bits(one: Path, two: Path) -> bool:
    for k in range(RUNS):
        a, b = (read_state_dict(folder / f"seed-{k}" / "student.safetensors") for folder in (one, two))
        if any(not torch.equal(a[key], b[key]) for key in a):
            return False
    return True


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("turn")
    for task in tasks(folder):
        task()
    return folder


def run_and_kill(launcher, folder: Path) -> list[int]:
    killed: list[int] = []
    killer = threading.Thread(target=kill_one, args=(folder, killed))
    killer.start()
    outcomes = dict(launcher.run(tasks(folder)))
    killer.join()
    assert [outcomes[k].state for k in range(RUNS)] == ["done"] * RUNS, outcomes
    return killed


def test_twelve_runs_through_submitit_with_a_worker_killed(in_turn, tmp_path, monkeypatch, said):
    pytest.importorskip("submitit")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = launcher_from("slurm:cluster=local,jobs=2,minutes=60", tmp_path)
    assert len(run_and_kill(launcher, tmp_path)) == 1
    assert "gave no result" in said()
    assert same_bits(in_turn, tmp_path)


def test_a_job_at_its_time_limit_writes_a_checkpoint_and_is_requeued(in_turn, tmp_path, monkeypatch):
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
    outcomes = dict(Slurm(tmp_path / "slurm", cluster="local", minutes=60).run(tasks(tmp_path)[:1]))
    watcher.join()
    assert outcomes[0].state == "done", outcomes
    assert len(submitted) == 1, "requeued by submitit, not submitted again"
    log = submitted[0].stdout() + submitted[0].stderr()
    assert "Requeued job" in log
    assert "goes on" in log, "it resumed"
    a, b = (read_state_dict(folder / "seed-0" / "student.safetensors") for folder in (in_turn, tmp_path))
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def ray_head(tmp_path):
    """A Ray head of this test's own, with two CPUs."""
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", str(port), "--num-cpus", "2"]
    command += ["--node-ip-address", "127.0.0.1", "--include-dashboard", "false", "--disable-usage-stats"]
    head = subprocess.Popen(command, stdout=(tmp_path / "ray.log").open("w"), stderr=subprocess.STDOUT)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert head.poll() is None, (tmp_path / "ray.log").read_text()
        time.sleep(0.2)
    time.sleep(5)
    yield f"127.0.0.1:{port}"
    import ray

    ray.shutdown()
    head.terminate()
    head.wait(60)


def test_twelve_runs_through_ray_with_a_worker_killed(in_turn, ray_head, tmp_path):
    (tmp_path / "runs").mkdir()
    launcher = launcher_from(f"ray:address={ray_head},cpus=1", tmp_path)
    assert len(run_and_kill(launcher, tmp_path / "runs")) == 1
    assert same_bits(in_turn, tmp_path / "runs")


def test_compare_by_a_launcher(letkd, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = [part for text in ["train.epochs=1", *SMALL, "teacher.model=resnet8_tiny"] for part in ("--set", text)]
    given = ["compare", "digits/tiny", "--methods", "ce,kd", "--trials", 1, *small]
    code, _, err = letkd(*given, "--out", "jobs", "--launcher", "slurm:cluster=local,minutes=60")
    assert code == 0, err
    code, _, err = letkd(*given, "--out", "turn")
    assert code == 0, err
    for row in ("teacher", "ce/seed-0", "kd/seed-0"):
        a, b = (read_state_dict(tmp_path / way / row / "student.safetensors") for way in ("jobs", "turn"))
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_what_is_not_there_gets_a_sentence(monkeypatch, tmp_path):
    pytest.importorskip("submitit")
    if shutil.which("srun") is None:
        with pytest.raises(LetkdError, match=r"SLURM is not installed here \(there is no srun\)"):
            launcher_from("slurm", tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    pytest.importorskip("ray")
    with pytest.raises(
        LetkdError, match=r"no Ray cluster can be reached at 127\.0\.0\.1:9 .*start one with `ray start --head`"
    ):
        dict(Ray().run(tasks(tmp_path)[:1]))
    for package, spec, extra in (("submitit", "slurm", "slurm"), ("ray", "ray", "ray")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(LetkdError, match=rf"--launcher {spec} needs {package}, which is not installed: .*letkd\[{extra}\]"):
            launcher_from(spec, tmp_path)
