"""Runs that the tests of these runs compare with or start from, each trained once for all test processes."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from letkd.recipes import Recipe, resolve
from letkd.training.loop import train
from tests.support.runs import SMALL, made_once


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> Path:
    """The student file of a small run; not to be written to."""
    run = made_once(tmp_path_factory, "teacher", lambda folder: train(resolve("digits/tiny/teacher", settings=SMALL), folder))
    return run / "student.safetensors"


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Callable[[Recipe], Path]:
    """The folder of a recipe's run that nothing interrupted; not to be written to."""

    def run(recipe: Recipe) -> Path:
        name = f"whole-{hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()[:16]}"
        return made_once(tmp_path_factory, name, lambda folder: train(recipe, folder))

    return run
