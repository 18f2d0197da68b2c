"""The examples in docstrings are true, and public names have one. `python tests/docs/test_examples_in_docstrings.py` counts them."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import letkd

ROOT = Path(__file__).parents[2]
MODULES = [
    name
    for _, name, is_package in pkgutil.walk_packages(letkd.__path__, "letkd.")
    if not is_package and not name.endswith("__main__") and not name.startswith("letkd.cli")
]
FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples(module) -> list[doctest.DocTest]:
    return [test for test in FINDER.find(module) if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name):
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for test in examples(importlib.import_module(name)):
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


LIKE_KD = (
    "FitNet",
    "AT",
    "AB",
    "FSP",
    "SP",
    "VID",
    "DKD",
    "SimKD",
    "TDD",
    "DIST",
    "ReviewKD",
    "SRD",
)  # used as in the example of KD


def public_names() -> dict[str, Any]:
    """Every name on the page docs/api.md, with its object."""
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    methods = re.findall(r"members: \[(.+)\]", page)[0].split(", ")
    names = {name: getattr(letkd, name) for name in re.findall(r"^::: letkd\.(\w+)$", page, re.MULTILINE) if name != "methods"}
    return names | {f"methods.{name}": getattr(letkd.methods, name) for name in methods}


def without_example() -> list[str]:
    parser = doctest.DocTestParser()
    return [name for name, thing in public_names().items() if not parser.get_examples(thing.__doc__ or "")]


def test_the_page_of_the_api_lists_every_exported_name():
    assert {name for name in public_names() if "." not in name} == set(letkd.__all__) - {"__version__", "methods"}


def test_public_names_have_an_example_unless_they_are_errors_or_used_like_another():
    errors = [name for name, thing in public_names().items() if isinstance(thing, type) and issubclass(thing, letkd.LetkdError)]
    assert all(thing.__doc__ for thing in public_names().values())
    assert set(without_example()) == {*errors, *(f"methods.{name}" for name in LIKE_KD)}


if __name__ == "__main__":
    names, without = public_names(), without_example()
    print(
        f"{len(names)} public names, {len(names) - len(without)} with an example, {len(without)} without: {', '.join(without)}"
    )
