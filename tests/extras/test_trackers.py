"""MLflow on a server of this test's own, and wandb offline: what they hold is what metrics.jsonl holds."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import letkd.training.loop as loop
from letkd.errors import Stopped
from letkd.recipes import resolve
from letkd.runs.folder import RunFolder
from letkd.training.trackers import scalars

SMALL = ["data.fraction=0.05", "train.steps=2", "train.epochs=4", "student.model=resnet8_tiny"]
RECIPE = resolve("digits/tiny/ce", settings=SMALL)


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """metrics.jsonl: by name and epoch."""
    found: dict[str, dict[int, float]] = {}
    for row in RunFolder(folder).rows():
        for name, value in scalars(row):
            found.setdefault(name, {})[row["epoch"]] = value
    return found


def stopped_and_resumed(folder: Path, name: str) -> None:
    """A run that is stopped after its second epoch and then resumes, with a tracker both times."""

    def stop(row):
        if row["epoch"] == 2:
            raise Stopped("stopped")

    with pytest.raises(Stopped):
        loop.train(RECIPE, folder, log=(name,), watch=stop)
    loop.train(RECIPE, folder, log=(name,))


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of an MLflow server."""
    pytest.importorskip("mlflow.server", reason="make test-extras installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}", "--artifacts-destination", tmp_path / "artifacts"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *where],
        stdout=(tmp_path / "server.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).read()
            break
        except OSError:
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            time.sleep(0.2)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    yield address
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(60)


def test_mlflow_has_the_numbers_of_the_log(server, tmp_path, said):
    import mlflow  # pyright: ignore[reportMissingImports]

    stopped_and_resumed(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient(server)
    experiment = client.get_experiment_by_name("letkd")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == str(RECIPE.optim.lr)
    expected = logged(tmp_path / "run")
    assert set(run.data.metrics) == set(expected)
    for name, values in expected.items():
        assert {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)} == values
    assert "failed" not in said()


def test_a_server_that_is_not_there_stops_nothing(tmp_path, monkeypatch, said):
    pytest.importorskip("mlflow", reason="make test-extras installs it")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    result = loop.train(RECIPE, tmp_path / "run", log=("mlflow",))
    assert result.last_test > 0
    assert said().count("--log mlflow failed (") == 1
    assert len(RunFolder(tmp_path / "run").rows()) == 4


def records(path: Path):
    """The records of a .wandb file: LevelDB's log format behind a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    data, at, part = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind == 0:
            break
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def test_wandb_offline_has_the_numbers_of_the_log(tmp_path, monkeypatch, said):
    pytest.importorskip("wandb", reason="make test-extras installs it")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    stopped_and_resumed(tmp_path / "run", "wandb")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2, "one for each start"
    found: dict[str, dict[int, float]] = {}
    ids = set()
    for path in files:
        for record in records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    if not name.startswith("_"):
                        found.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
    assert len(ids) == 1, "the same run for wandb"
    assert found == logged(tmp_path / "run")
    assert "failed" not in said()
