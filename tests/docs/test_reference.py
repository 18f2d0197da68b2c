"""The reference pages are what the schema, the command line and the import contract say."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from letkd.cli import reference as commands
from letkd.recipes import reference as recipe
from tests.support.source import layers

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_recipes_is_current():
    page = (DOCS / "recipe.md").read_text(encoding="utf-8")
    assert page == recipe.as_markdown(), "run: python -m letkd.recipes.reference > docs/recipe.md"


def test_the_page_of_commands_is_current():
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert page == commands.as_markdown(), "run: python -m letkd.cli.reference > docs/commands.md"


@pytest.mark.parametrize(("path", "model"), recipe.tables().items())
def test_every_key_says_what_it_is(path: str, model: type[BaseModel]):
    assert not [name for name, field in model.model_fields.items() if not field.description], path


def test_the_architecture_page_names_every_package_once():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Packages")[2].partition("## ")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in row] == [name for layer in layers() for name in layer.split("|")]


def test_the_picture_shows_every_package():
    picture = (DOCS / "packages.svg").read_text(encoding="utf-8")
    assert re.findall(r'font-weight="bold">(\w+)<', picture) == [name for layer in layers() for name in layer.split("|")]


def test_a_row_of_the_page_of_commands_has_two_cells():
    rows = [line for line in commands.as_markdown().splitlines() if line.startswith("| `")]
    assert rows
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 3, row
        assert "<" not in re.sub("`[^`]*`", "", row), row
