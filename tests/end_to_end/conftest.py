"""A trained teacher for the runs of these tests."""

from pathlib import Path

import pytest

from letkd.recipes import resolve
from letkd.training.loop import train
from tests.support.runs import SMALL, made_once


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> Path:
    """The student file of a small run, made once for all test processes; not to be written to."""
    run = made_once(tmp_path_factory, "teacher", lambda folder: train(resolve("digits/tiny/teacher", settings=SMALL), folder))
    return run / "student.safetensors"
