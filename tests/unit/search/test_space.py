"""What `--over` says: ranges, choices, and a sentence for everything else."""

import sys

import pytest

from letkd.errors import RecipeError
from letkd.recipes import resolve
from letkd.search.space import Range, check_keys, parse_range, parse_ranges

TAU = "methods.letkd.sites.penultimate.supervision.tau"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim.lr=log:0.01..0.3", Range("optim.lr", 0.01, 0.3, log=True)),
        ("optim.lr = 1e-3..1", Range("optim.lr", 1e-3, 1)),
        ("a.K=4..64", Range("a.K", 4, 64)),
        ("a.K=log:4..64", Range("a.K", 4, 64, log=True)),
        ("x=-2..-1", Range("x", -2, -1)),
        ('weights."kd/penultimate"=0.1..2.0', Range('weights."kd/penultimate"', 0.1, 2.0)),
        ("data.augment=crop|none", Range("data.augment", choices=("crop", "none"))),
    ],
)
def test_ranges(text, expected):
    assert parse_range(text) == expected
    assert parse_range(str(expected)) == expected, "it reads what it writes"


def test_whole_numbers_stay_whole():
    assert parse_range("a=4..64").whole
    assert not parse_range("a=4..64.0").whole


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optim.lr", "write key=LOW..HIGH"),
        ("=1..2", "write key=LOW..HIGH"),
        ("a=", "write key=LOW..HIGH"),
        ("a=1", "write key=LOW..HIGH"),
        ("a=x..y", "write key=LOW..HIGH"),
        ("a=true..false", "write key=LOW..HIGH"),
        ("a=0..inf", "write key=LOW..HIGH"),
        ("a=log:1..nan", "write key=LOW..HIGH"),
        ("a=2..1", "the range is empty"),
        ("a=1..1", "the range is empty"),
        ("a=log:0..1", "a logarithmic range must start above 0"),
        ("a=x||y", "a choice is empty or repeated"),
        ("a=x|x", "a choice is empty or repeated"),
    ],
)
def test_what_is_no_range_gets_a_sentence(text, says):
    with pytest.raises(RecipeError, match=says):
        parse_range(text)


def test_one_range_a_key():
    with pytest.raises(RecipeError, match="names a twice"):
        parse_ranges(["a=1..2", "a=3..4"])
    with pytest.raises(RecipeError, match="nothing to search"):
        parse_ranges([])


@pytest.mark.parametrize(
    ("cell", "key", "says"),
    [
        ("digits/tiny/letkd-1", TAU, None),
        ("digits/tiny/letkd-1", "lr", None),
        ("digits/tiny/letkd-1", 'weights."kd/penultimate"', None),
        ("digits/tiny/kd", TAU, "methods has no 'letkd' here; nearest: kd"),
        ("digits/tiny/letkd-1", TAU.replace("penultimate", "penultimat"), "has no 'penultimat' here; nearest: penultimate"),
        ("digits/tiny/letkd-1", "optin.lr", "the recipe has no 'optin' here; nearest: optim"),
        ("digits/tiny/letkd-1", "train.seed", "trials with another train.seed cannot be compared"),
        ("digits/tiny/letkd-1", "seed", "trials with another train.seed cannot be compared"),
        ("digits/tiny/letkd-1", "val", "trials with another data.val cannot be compared"),
    ],
)
def test_keys_that_the_recipe_has_no_place_for(cell, key, says):
    ranges = [Range(key, 0.1, 0.2)]
    if says is None:
        check_keys(ranges, resolve(cell))
    else:
        with pytest.raises(RecipeError, match=says):
            check_keys(ranges, resolve(cell))


def test_without_optuna_a_sentence_names_the_extra(letkd, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = letkd("search", "digits/tiny/ce", "--over", "optim.lr=log:0.01..0.1")
    assert (code, err) == (2, "letkd: `letkd search` needs optuna, which is not installed: pip install 'letkd[search]'\n")
