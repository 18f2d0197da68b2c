"""The rows of the evidence study (docs/evidence.md) resolve and build, without data."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from letkd.distiller import Distiller
from letkd.methods import METHODS
from letkd.models import create_model
from letkd.recipes import Recipe, list_rows, resolve
from letkd.taps.fold_bn import fold_teacher

ROOT = Path(__file__).parents[2]
PAIRS = {"cifar10-rn56-rn8": 10, "cifar10-rn56-rn20": 10, "cifar100-rn32-rn8": 100}  # classes
ROWS = [
    *("ce", "ce-longer", "ce-longer-2", "ce-larger", "layer-alone", "kd", "dkd", "kd-ls", "crd", "quest"),
    *("letkd-1", "letkd-1-sharp", "sharp-alone", "letkd-2", "letkd-2-sharp", "sharp-2-alone", "letkd-1-kd", "letkd-2-kd"),
]
ADDED = {"cifar10-rn56-rn8": {"kd": ["kd-equal", "kd-16"]}}  # rows added to a pair, by the row that they follow
CE = {("cifar10-rn56-rn8", "kd"): 0.1, ("cifar10-rn56-rn20", "kd"): 0.1}  # weight of the cross-entropy; 1 in the other rows
pairs = pytest.mark.parametrize("pair", PAIRS)


@cache
def recipe_of(pair: str, row: str) -> Recipe:
    return resolve(ROOT / "evidence" / f"{pair}.toml", method=row)


@cache
def teacher_of(pair: str) -> nn.Module:
    model = recipe_of(pair, "kd").model_dump()["teacher"]["model"]
    return fold_teacher(create_model(model, num_classes=PAIRS[pair]).eval(), {}, torch.zeros(1, 3, 32, 32))


def distiller_of(pair: str, row: str) -> Distiller:
    recipe, C = recipe_of(pair, row), PAIRS[pair]
    student = create_model(recipe.student.model, num_classes=C)
    methods = [METHODS[name].from_recipe(table) for name, table in recipe.methods.items()]
    return Distiller(student, teacher_of(pair) if methods else None, methods, weights=recipe.weights, images=45_000)


def parameters(distiller: Distiller) -> int:
    return sum(parameter.numel() for parameter in distiller.export().parameters())


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # the recipes name evidence/networks.py


@pairs
def test_the_rows_are_those_of_the_protocol(pair):
    added = ADDED.get(pair, {})
    rows = [name for row in ROWS for name in (row, *added.get(row, []))]
    assert list_rows(f"evidence/{pair}.toml") == rows
    titles = [recipe_of(pair, row).title for row in rows]
    page = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    protocol = page.partition("**Rows.**")[2].partition("No row is dropped")[0]
    assert len(set(titles)) == len(rows)
    assert [title for title in titles if title not in protocol] == []


@pairs
@pytest.mark.parametrize("row", ROWS)
def test_a_row_builds_and_shares_everything_but_the_method(pair, row):
    distiller = distiller_of(pair, row)
    recipe, ce = recipe_of(pair, row), recipe_of(pair, "ce")
    assert distiller.weights["ce"] == CE.get((pair, row), 1.0)
    assert recipe.data == ce.data
    assert recipe.optim == ce.optim
    own = {"epochs", "cache_views"} if row.startswith("ce-longer") else set()
    assert recipe.train.model_dump(exclude=own) == ce.train.model_dump(exclude=own)
    assert recipe.train.cache_views == recipe.train.epochs
    assert recipe.student.model == ce.student.model or row == "ce-larger"


@pairs
def test_the_larger_student_has_the_parameters_of_student_and_layer(pair):
    larger, layer = (parameters(distiller_of(pair, row)) for row in ("ce-larger", "letkd-1"))
    assert larger == pytest.approx(layer, rel=0.03)
    assert larger >= layer


@pairs
@pytest.mark.parametrize(
    ("row", "whole"), [("layer-alone", "letkd-1"), ("sharp-alone", "letkd-1-sharp"), ("sharp-2-alone", "letkd-2-sharp")]
)
def test_a_layer_without_teacher_is_its_method_without_its_term(pair, row, whole):
    alone, letkd = distiller_of(pair, row), distiller_of(pair, whole)
    assert alone.weights == dict.fromkeys(letkd.weights, 0.0) | {"ce": 1.0}
    assert parameters(alone) == parameters(letkd)
    assert recipe_of(pair, row).methods == recipe_of(pair, whole).methods


@pairs
@pytest.mark.parametrize("row", ["letkd-1", "letkd-2"])
def test_a_sharp_row_differs_from_the_papers_only_in_the_start_of_its_layers(pair, row):
    sharp, paper = (recipe_of(pair, name).methods["letkd"]["sites"] for name in (f"{row}-sharp", row))
    assert sharp == {role: site | {"beta": -2.0, "scale_nu": "auto"} for role, site in paper.items()}
    assert recipe_of(pair, f"{row}-sharp").weights == recipe_of(pair, row).weights


@pytest.mark.parametrize("row", list_rows(ROOT / "evidence" / "cifar100-rn32-rn8-30.toml"))
def test_longer_runs_differ_from_their_pair_only_in_length(row):
    longer, pair = (recipe_of(name, row).model_dump() for name in ("cifar100-rn32-rn8-30", "cifar100-rn32-rn8"))
    epochs = [recipe["train"].pop("epochs") for recipe in (longer, pair)]
    for name in ("cache_views", "validate_every"):
        assert longer["train"].pop(name) == {"cache_views": 3, "validate_every": 5}[name]
        pair["train"].pop(name)
    assert longer == pair
    assert epochs == ([54, 6] if row == "ce-longer" else [30, 3])


@pytest.mark.parametrize("row", [row for row in list_rows(ROOT / "evidence" / "fractions.toml") if not row.endswith("pc")])
def test_label_fractions_have_the_settings_of_the_smallest_pair_and_equal_steps(row):
    pair = recipe_of("cifar10-rn56-rn8", row)
    for end, labelled, of_a_batch in (("", 45_000, 64), ("-1pc", 450, 32), ("-10pc", 4_500, 32)):
        recipe = recipe_of("fractions", row + end)
        assert (recipe.weights, recipe.methods, recipe.optim) == (pair.weights, pair.methods, pair.optim)
        assert recipe.data.unlabelled_share in (None, 0.5)
        of_a_batch = of_a_batch if recipe.data.unlabelled else 64
        assert labelled // of_a_batch * recipe.train.epochs == pytest.approx(2_100, rel=0.005)
