"""What a run writes down and shows: metrics.jsonl, TensorBoard, plain lines in a log, a bar on a terminal."""

import json
import os
import pty
import re
import select
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import letkd.progress as progress
import letkd.training.logbook as logbook
import letkd.training.loop as loop
import letkd.training.state as state
import letkd.training.trackers as trackers
from letkd.errors import Stopped
from letkd.recipes import resolve
from letkd.runs.folder import RunFolder
from letkd.training.trackers import scalars, tracked

SMALL = ["data.fraction=0.05", "train.steps=2", "train.epochs=4", "student.model=resnet8_tiny"]
RECIPE = resolve("digits/tiny/ce", settings=SMALL)
COMMAND = [sys.executable, "-m", "letkd", "train", "digits/tiny/ce", *(part for text in SMALL for part in ("--set", text))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run in one go, and one that was stopped in its third epoch, after the log had run ahead of the checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    loop.train(RECIPE, folder / "whole")
    save, count = state.save_checkpoint, [0]

    def killed_before_the_third_save(*values):
        count[0] += 1
        if count[0] == 3:
            raise Stopped("killed")
        save(*values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "save_checkpoint", killed_before_the_third_save)
        with pytest.raises(Stopped):
            loop.train(RECIPE, folder / "stopped")
    assert len(rows(folder / "stopped")) == 3
    loop.train(RECIPE, folder / "stopped")
    return folder


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["whole", "stopped"])
def test_one_line_an_epoch(runs, name):
    found = rows(runs / name)
    assert [row["epoch"] for row in found] == [1, 2, 3, 4]
    for row in found:
        assert {"epoch", "lr", "loss", "ce", "train_top1", "val_top1", "seconds"} <= row.keys()
        assert all(isinstance(value, int | float) for value in row.values())
    assert [row["seconds"] for row in found] == sorted(row["seconds"] for row in found)


@pytest.mark.parametrize("name", ["whole", "stopped"])
def test_tensorboard_has_the_same_numbers_once(runs, name):
    """Those of the epoch that had to be done again are purged."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(runs / name / "tensorboard"), purge_orphaned_data=True).Reload()
    metrics = rows(runs / name)
    assert set(found.Tags()["scalars"]) == {tag for tag, _ in scalars(metrics[0])}
    for tag in found.Tags()["scalars"]:
        shown = {event.step: event.value for event in found.Scalars(tag)}
        assert len(found.Scalars(tag)) == len(metrics)
        assert shown == pytest.approx({row["epoch"]: row[tag] for row in metrics})


def test_a_tracker_that_fails_is_told_once_and_stops_nothing(tmp_path, monkeypatch, said):
    """Without TensorBoard, though it was asked for, and with a tracker that breaks at its second row."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    seen = []

    class Breaks:
        def __init__(self, run, id, first):
            assert re.fullmatch("[0-9a-f]{32}", id)

        def row(self, row):
            seen.append(row["epoch"])
            if row["epoch"] == 2:
                raise OSError("the line is dead\nand long")

        def close(self):
            seen.append("closed")

    monkeypatch.setitem(trackers.TRACKERS, "breaks", Breaks)
    (tmp_path / "run").mkdir()
    with tracked(RunFolder(tmp_path / "run", RECIPE), ["tensorboard", "breaks"], 1) as track:
        for epoch in (1, 2, 3):
            track({"epoch": epoch, "loss": 2.0})
    assert seen == [1, 2]
    text = said()
    assert text.count("--log breaks failed (the line is dead); it gets no more rows, the run continues") == 1
    assert text.count("--log tensorboard failed") == 1
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_tracker_that_is_new_to_a_run_gets_its_earlier_rows(tmp_path, monkeypatch):
    seen = []

    class Keeps:
        def __init__(self, run, id, first):
            seen.append(id)

        def row(self, row):
            seen.append(row["epoch"])

        def close(self):
            pass

    monkeypatch.setitem(trackers.TRACKERS, "keeps", Keeps)
    run = RunFolder(tmp_path / "run", RECIPE)
    with run.begin():
        for epoch in (1, 2):
            run.log({"epoch": epoch, "loss": 2.0})
        for first in (3, 4):
            with tracked(run, ["keeps"], first) as track:
                track({"epoch": first, "loss": 2.0})
    assert seen == [seen[0], 1, 2, 3, seen[0], 4]


def test_tensorboard_that_is_new_to_a_run_gets_its_earlier_rows(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = RunFolder(tmp_path / "run", RECIPE)
    with run.begin():
        for epoch in (1, 2):
            run.log({"epoch": epoch, "loss": 2.0})
        for first in (3, 4):
            with tracked(run, ["tensorboard"], first) as track:
                track({"epoch": first, "loss": 2.0})
    found = events.EventAccumulator(str(run.tensorboard)).Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4]


def test_wrong_trackers_get_a_sentence(letkd, monkeypatch):
    code, _, err = letkd("train", "digits/tiny/ce", "--quick", "--log", "wandbb")
    assert (code, err) == (2, "letkd: --log 'wandbb': unknown tracker; nearest: wandb\n")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    code, _, err = letkd("train", "digits/tiny/ce", "--quick", "--log", "mlflow")
    assert (code, err) == (2, "letkd: --log mlflow needs mlflow, which is not installed: pip install 'letkd[mlflow]'\n")


def test_tables_within_a_row_have_names_of_their_own():
    row = {"epoch": 3, "loss": 1.5, "kd": {"a": 1, "b": {"c": 2}}, "val_top1": None, "note": "text"}
    assert dict(scalars(row)) == {"loss": 1.5, "kd/a": 1, "kd/b/c": 2}


def test_a_log_file_gets_plain_lines(tmp_path, monkeypatch, said):
    monkeypatch.setattr(loop, "logbook", partial(logbook.logbook, every=0.0))
    loop.train(RECIPE, tmp_path / "run")
    lines = [line for line in said().splitlines() if line.startswith("epoch")]
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert all(re.fullmatch(r"epoch \d/4  loss \d+\.\d{3}  train \d+\.\d\d %  val \d+\.\d\d %", line) for line in lines)


def test_a_log_file_gets_no_more_than_a_line_in_ten_seconds(monkeypatch, said):
    clock = [0.0]
    monkeypatch.setattr(logbook.time, "monotonic", lambda: clock[0])
    book = logbook.Logbook(lambda note: None, lambda row: None, epochs=25, every=10.0)
    for epoch in range(1, 26):
        clock[0] += 1.0
        book.epoch({"epoch": epoch, "loss": 1.0, "train_top1": 50.0, "val_top1": None})
    assert said() == "epoch 10/25  loss 1.000  train 50.00 %\nepoch 20/25  loss 1.000  train 50.00 %\n"


def test_a_log_file_gets_a_line_a_minute_for_what_takes_long(monkeypatch, said):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    for _ in progress.track(range(2000), "looking"):
        clock[0] += 0.125
    assert said().splitlines() == [
        "looking: 480 of 2,000",
        "looking: 960 of 2,000",
        "looking: 1,440 of 2,000",
        "looking: 1,920 of 2,000",
    ]


def test_no_terminal_no_control_characters(tmp_path):
    done = subprocess.run([*COMMAND, "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    assert "\r" not in done.stderr


def test_a_terminal_gets_a_bar(tmp_path):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    run = subprocess.Popen([*COMMAND, "--out", str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 300)[0]:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    run.communicate(timeout=60)
    assert run.returncode == 0, shown[-2000:]
    text = shown.decode("utf-8", "replace")
    assert "\x1b[" in text
    assert "Student, seed 0" in text
    assert "/8" in text, "eight steps in all"
    assert not re.search(r"^epoch \d/4", text, re.M), "plain lines beside the bar"
