"""CONTRIBUTING's method is a method: its file, its recipe and its test do what the page says they do."""

import re
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch

from letkd.methods import Method
from letkd.recipes import resolve
from letkd.report.method_cards import formula
from tests.support.pair import a_distiller, a_stream, same_state, steps

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = {
    title: textwrap.dedent(text) for title, text in re.findall(r'^ *```\w+ title="([^"]+)"\n(.*?)^ *```$', PAGE, re.M | re.S)
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The page's file as `letkd.methods.regress`, for as long as the test runs."""
    import importlib.util

    path = tmp_path / "regress.py"
    path.write_text(FILES["src/letkd/methods/regress.py"], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("letkd.methods.regress", path)
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "letkd.methods.regress", found)
    spec.loader.exec_module(found)
    return found


def test_it_trains_a_student(module):
    method = module.Regress()
    assert isinstance(method, Method)
    distiller = a_distiller(method, weights={"ce": 0.0})
    teacher = {name: value.clone() for name, value in distiller.teacher.state_dict().items()}
    losses = steps(distiller, [a_stream()[0]] * 10, torch.optim.SGD(distiller.parameters(), lr=0.05))
    assert losses[-1] < losses[0] / 2
    assert same_state(teacher, distiller.teacher.state_dict())
    assert distiller.export().state_dict().keys() == distiller.student.state_dict().keys()


def test_its_formula_is_shown(module):
    assert formula(module.regress_loss).startswith("`regress_loss`: 1/(b·C) Σ (logits_S − logits_T)²")
    assert {"name", "paper", "loss", "formulae"} <= vars(module.Regress).keys()


def test_its_recipe_has_the_methods_terms(module, tmp_path):
    table = tomllib.loads(FILES["src/letkd/recipes/methods/regress.toml"])
    assert set(table["weights"]) == {"ce", *module.Regress().term_names()}
    own = tmp_path / "own.toml"
    own.write_text(FILES["src/letkd/recipes/methods/regress.toml"] + "\n[methods.regress]\n", encoding="utf-8")
    recipe = resolve(own, overrides={"data.name": "digits", "student.model": "resnet8_tiny"})
    assert recipe.title == "Regress"
    assert module.Regress.from_recipe(recipe.methods["regress"]).name == "regress"


def test_its_test_passes(module):
    names: dict = {}
    exec(FILES["tests/oracles/test_regress.py"], names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    test()


def test_the_files_it_names_exist():
    paths = {ROOT / path for path in re.findall(r"`((?:src/letkd|tests|docs)/[\w/.-]+\.\w+)`", PAGE) if path not in FILES}
    paths |= {ROOT / "src" / "letkd" / "methods" / name for name in re.findall(r"\(`(\w+\.py)`", PAGE)}
    assert {path.name for path in paths} >= {"methods.py", "tdd.py"}
    assert not [path for path in paths if not path.exists()]
