"""What every test shares: one thread, no bars, shapes checked at every call, and `letkd …` in this process."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping

# Before letkd is first imported. `Self` means nothing to beartype outside a decorated class, so it counts as any object.
jaxtyping.install_import_hook(
    ["letkd.layer", "letkd.layer.fused", "letkd.functional", "letkd.supervision", "letkd.methods"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True, "
    "hint_overrides=beartype.FrozenDict({__import__('typing').Self: object})))",
)

import pytest

pytest.register_assert_rewrite("tests.support")

import torch

from letkd import progress
from letkd.batch import Batch
from letkd.cli.main import main
from tests.support.pair import a_stream

torch.set_num_threads(1)

HERE = Path(__file__).parent
WHOLE = {"end_to_end", "properties", "report", "examples", "extras"}  # folders of tests that train or open whole runs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Markers that follow from what a test is: its folder, its fixtures, its file. Others are marked where they are defined."""
    for item in items:
        kinds = {
            "slow": item.path.relative_to(HERE).parts[0] in WHOLE,
            "browser": {"browser", "page"} & set(getattr(item, "fixturenames", ())),
            "processes": "process" in item.path.stem,
        }
        for kind, applies in kinds.items():
            if applies:
                item.add_marker(kind)


@pytest.fixture(autouse=True)
def _quiet_and_seeded():
    progress.set_quiet(True)
    torch.manual_seed(0)
    yield
    progress.set_quiet(True)


@pytest.fixture
def said(capsys):
    """What was said to the person since the last look, as one text."""
    progress.set_quiet(False)
    return lambda: capsys.readouterr().err


@pytest.fixture
def stream() -> list[Batch]:
    return a_stream()


@pytest.fixture
def letkd(monkeypatch, capsys, tmp_path):
    """Run `letkd …` in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", list(sys.path))
    progress.set_quiet(False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["letkd", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
