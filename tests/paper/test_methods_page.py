"""docs/methods.md is what the methods and recipes say, and every method says it."""

import re
from pathlib import Path

import pytest

from letkd.methods import METHODS
from letkd.report.method_cards import as_markdown

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_page_is_current():
    page = (ROOT / "docs" / "methods.md").read_text()
    assert page == as_markdown(), "run: python -m letkd.report.method_cards > docs/methods.md"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_says_what_it_is(name):
    method = METHODS[name]
    assert method.name == name
    assert method.paper
    assert method.loss


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_its_formula_on_the_page(name):
    page = (ROOT / "docs" / "methods.md").read_text()
    part = page.partition(f"### Loss of {METHODS[name].__name__}\n")[2].partition("\n#")[0]
    assert re.search(r"Σ|KL\(|mean over b", part)
    for function in METHODS[name].formulae:
        assert f"`{function.__name__}`: " in part


def test_every_method_file_is_short():
    paths = (ROOT / "src" / "letkd" / "methods").glob("*.py")
    lines = {path.stem: len(path.read_text().splitlines()) for path in paths if path.stem not in ("base", "__init__")}
    assert {method.__module__.rpartition(".")[2] for method in METHODS.values()} <= lines.keys()
    assert max(lines.values()) <= 120, lines
