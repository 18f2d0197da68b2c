"""The same seed gives the same numbers: in another process, beside other seeds, with or without `--deterministic`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import letkd.training.loop as loop
from letkd.errors import RunError
from letkd.models.weights import read_state_dict
from letkd.recipes import resolve
from letkd.training.trials import run_trials

SMALL = ["data.fraction=0.05", "train.steps=2", "train.epochs=2", "student.model=resnet8_tiny", "teacher.model=resnet8_tiny"]


def words(*settings: str) -> list[str]:
    return [part for text in settings for part in ("--set", text)]


def in_a_process(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "letkd", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    loop.train(resolve("digits/tiny/teacher", settings=SMALL), folder / "run")
    return folder / "run" / "student.safetensors"


def numbers(run: Path) -> tuple[list[dict], dict]:
    """The metrics and the result of a run, but for the time it took."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((run / "result.json").read_text())
    for table in (*rows, result):
        del table["seconds"]
        table.pop("cpu_seconds", None)
    return rows, result


def same(one: Path, two: Path) -> None:
    assert numbers(one) == numbers(two)
    for name in ("student.safetensors", "last/checkpoint.safetensors"):
        a, b = (read_state_dict(run / name) for run in (one, two))
        assert [key for key in a if not torch.equal(a[key], b[key])] == []
    assert (one / "student.safetensors").read_bytes() == (two / "student.safetensors").read_bytes()
    a, b = ({path.name: read_state_dict(path) for path in (run / "supervision").glob("*.safetensors")} for run in (one, two))
    assert a.keys() == b.keys()
    for name in a:
        assert all(torch.equal(a[name][key], b[name][key]) for key in a[name]), name


def test_two_fresh_processes_give_the_same_bits_and_another_seed_does_not(teacher, tmp_path):
    for out in ("one", "two"):
        given = ["--teacher-weights", teacher, "--seed", 3, "--deterministic", "--out", tmp_path / out]
        done = in_a_process("train", "digits/tiny/letkd-2", *words(*SMALL), *given)
        assert done.returncode == 0, done.stderr
    same(tmp_path / "one", tmp_path / "two")
    given = {"teacher.weights": str(teacher), "train.seed": 4}
    loop.train(resolve("digits/tiny/letkd-2", overrides=given, settings=SMALL), tmp_path / "other")
    assert numbers(tmp_path / "one") != numbers(tmp_path / "other")
    environment = json.loads((tmp_path / "one" / "env.json").read_text())
    assert environment["deterministic"] is True
    assert environment["threads"] == 1
    assert environment["libraries"]["torch"] == torch.__version__


def test_deterministic_reaches_torch_and_is_taken_back(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []

    def look(state) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())

    for name, settings in (("yes", ["train.deterministic=true"]), ("no", [])):
        loop.train(resolve("digits/tiny/ce", settings=[*SMALL, "train.epochs=1", *settings]), tmp_path / name, on_step=look)
        assert json.loads((tmp_path / name / "env.json").read_text())["deterministic"] is (name == "yes")
    assert seen == [True, True, False, False]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_seeds_spread_over_processes_are_those_in_turn(letkd, teacher, tmp_path):
    arguments = ["train", "digits/tiny/letkd-1", *words(*SMALL), "--teacher-weights", teacher, "--trials", 3, "--jobs", 2]
    code, out, err = letkd(*arguments, "--out", tmp_path / "spread")
    assert code == 0, err
    assert out.count("letKD-1") == 1
    recipe = resolve("digits/tiny/letkd-1", overrides={"teacher.weights": str(teacher)}, settings=SMALL)
    assert [result.last_test for result in run_trials(recipe, tmp_path / "turn", 3)] == [
        numbers(tmp_path / "spread" / f"seed-{seed}")[1]["last_test"] for seed in range(3)
    ]
    for seed in range(3):
        runs = [tmp_path / out / f"seed-{seed}" for out in ("turn", "spread")]
        assert numbers(runs[0]) == numbers(runs[1])
        a, b = (read_state_dict(run / "student.safetensors") for run in runs)
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert len({json.dumps(numbers(tmp_path / "spread" / f"seed-{seed}")) for seed in range(3)}) == 3


def test_a_seed_that_fails_is_told_and_the_others_end(tmp_path):
    recipe = resolve("digits/tiny/ce", settings=[*SMALL, "train.epochs=1"])
    other = resolve("digits/tiny/ce", settings=[*SMALL, "train.epochs=1", "train.seed=1"])
    loop.train(other, tmp_path / "runs" / "seed-1")
    (tmp_path / "runs" / "seed-1" / "result.json").unlink()
    for path in (tmp_path / "runs" / "seed-1" / "last").iterdir():
        path.write_bytes(b"damaged")
    with pytest.raises(RunError, match=r"seed-1 failed, the other runs finished: .*seed-1.*holds no intact checkpoint"):
        run_trials(recipe, tmp_path / "runs", 3, jobs=2)
    assert [(tmp_path / "runs" / f"seed-{seed}" / "result.json").exists() for seed in range(3)] == [True, False, True]


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*") for child in (task / "children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for orphans in /proc")
def test_a_stop_reaches_every_seed_and_leaves_no_orphans(tmp_path):
    arguments = ["train", "digits/tiny/ce", *words(*SMALL, "train.epochs=5000"), "--trials", "3", "--jobs", "2"]
    run = subprocess.Popen(
        [sys.executable, "-m", "letkd", *arguments, "--out", str(tmp_path / "runs")],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    metrics = [tmp_path / "runs" / f"seed-{seed}" / "metrics.jsonl" for seed in range(2)]
    for _ in range(1800):
        if all(path.exists() for path in metrics) or run.poll() is not None:
            break
        time.sleep(0.1)
    assert all(path.exists() for path in metrics)
    family = children(run.pid)
    assert len(family) >= 2
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 75, err
    assert err.splitlines()[-1] == "letkd: stopped; run the same command again to resume"
    assert "Traceback" not in err
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in family):
            break
        time.sleep(0.1)
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()], "orphans"
    for path in metrics:
        assert (path.parent / "last" / "checkpoint.safetensors").exists()
        assert not list(path.parent.rglob("*.tmp"))
    assert not (tmp_path / "runs" / "seed-2").exists()
