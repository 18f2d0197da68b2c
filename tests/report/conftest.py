"""Finished runs to report on, made once for all test processes, and a browser."""

import io
import json
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from letkd.cli.main import app
from letkd.training.trials import compare
from tests.support.browser import Browser
from tests.support.runs import made_once

METHODS = ["ce", "kd", "quest", "letkd-2"]
SMALL = ["train.epochs=2", "data.fraction=0.05", "student.model=resnet8_tiny", "teacher.model=resnet8_tiny"]


def _make(folder: Path) -> None:
    compare("digits/tiny", METHODS, folder, trials=2, settings=SMALL)
    for path in folder.glob("*/seed-*/metrics.jsonl"):  # known values, whatever the runs themselves logged
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        seed = int(path.parent.name.removeprefix("seed-"))
        for row in rows:
            row.pop("health", None)
            if path.parts[-3] == "letkd-2":
                row["health"] = {"penultimate": {"used": 10.0 * row["epoch"] + seed, "discarded": 0.25, "added": 0.5}}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """A comparison of four methods over two seeds and two epochs; not to be written to."""
    return made_once(tmp_path_factory, "compared-runs", _make)


def _report(runs: Path, folder: Path) -> None:
    folder.mkdir()
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        app(["report", str(runs), "--out", str(folder)])
    (folder / "said.txt").write_text(said.getvalue())


@pytest.fixture(scope="session")
def report(runs, tmp_path_factory) -> Path:
    """What `letkd report` made of these runs, and what it said, in said.txt."""
    return made_once(tmp_path_factory, "written-report", lambda folder: _report(runs, folder))


@pytest.fixture(scope="module")
def browser():
    held = Browser()
    yield held
    held.close()
