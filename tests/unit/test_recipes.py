"""Recipes: merging, the paper's numbers, and errors that name everything at once."""

import tomllib

import pytest

from letkd.errors import RecipeError
from letkd.recipes import HERE, list_methods, list_pairs, merge, resolve
from letkd.train.optim import lr_at


def test_every_cell_resolves():
    for pair in list_pairs():
        for method in list_methods():
            assert resolve(f"{pair}/{method}") == resolve(pair, method=method)


def test_the_papers_numbers():
    recipe = resolve("cifar100/rn56-rn20/letkd-2")
    assert (recipe.train.epochs, recipe.data.batch_size, recipe.data.padding) == (240, 64, "reflect")
    assert (recipe.optim.lr, recipe.optim.momentum, recipe.optim.nesterov, recipe.optim.weight_decay) == (0.05, 0.9, True, 5e-4)
    assert [lr_at(epoch, recipe.optim) for epoch in (1, 150, 151, 180, 181, 210, 211, 240)] == pytest.approx(
        [0.05, 0.05, 5e-3, 5e-3, 5e-4, 5e-4, 5e-5, 5e-5]
    )
    sites = recipe.methods["letkd"]["sites"]
    assert (sites["penultimate"]["supervision"]["K"], sites["intermediate"]["supervision"]["K"]) == (4096, 8)
    assert (sites["penultimate"]["alpha"], sites["intermediate"]["alpha"]) == (1.0, 1.0)
    assert recipe.weights == {"ce": 1.0, "kd/penultimate": 1.0, "kd/intermediate": 1.0}
    assert (recipe.teacher.model, recipe.student.model) == ("resnet56", "resnet20")
    kd = resolve("cifar100/rn56-rn20/kd")
    assert (kd.methods["kd"]["T"], kd.weights) == (4.0, {"ce": 0.1, "kd": 0.9})


def test_every_number_of_a_method_says_where_it_comes_from():
    for path in (HERE / "methods").glob("*.toml"):
        for line in path.read_text().splitlines():
            key, equals, _ = line.partition(" = ")
            if equals and key not in ("title", "kind"):
                assert "#" in line, f"{path.name}: {line}"


def test_the_teacher_row_trains_the_pairs_teacher():
    recipe = resolve("digits/tiny/teacher")
    assert recipe.student.model == resolve("digits/tiny/kd").teacher.model
    assert (recipe.teacher, recipe.data.fraction) == (None, 1.0)


def test_layers_override_in_order(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('[data]\nname = "digits"\n[student]\nmodel = "resnet8"\n[optim]\nlr = 0.3\n')
    assert resolve(own).optim.lr == 0.3
    assert resolve(own).optim.momentum == 0.9
    assert resolve(own, overrides={"optim.lr": 0.2}).optim.lr == 0.2
    assert resolve(own, overrides={"optim.lr": 0.2}, settings=["optim.lr=0.1"]).optim.lr == 0.1
    assert resolve(own, settings=["data.root=some/folder"]).data.root == "some/folder"


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ('weights."kd/penultimate"=0.5', ["weights", "kd/penultimate"], 0.5),
        ("weights.kd/penultimate=0.5", ["weights", "kd/penultimate"], 0.5),
        ('teacher.taps."penultimate.conv3x3"=layer3.1.conv1', ["teacher", "taps", "penultimate.conv3x3"], "layer3.1.conv1"),
        ("optim.milestones=[1, 2]", ["optim", "milestones"], [1, 2]),
    ],
)
def test_settings_are_toml(setting, path, value):
    found = resolve("digits/tiny/quest", settings=[setting]).model_dump()
    for part in path:
        found = found[part]
    assert found == value


def test_merge_keeps_both_sides_of_a_table():
    assert merge({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}, "c": 5}) == {"a": {"x": 1, "y": 4}, "b": 3, "c": 5}


def test_all_errors_at_once():
    with pytest.raises(RecipeError) as caught:
        resolve("digits/tiny/kd", settings=["optim.lrr=1", "train.epochs=0", "colour=1", "weights.ce=-1", "data.val=two"])
    text = str(caught.value)
    assert "\n" not in text
    for part in ("'optim.lrr' (nearest: lr)", "'train.epochs' is 0", "unknown key 'colour'", "ce=-1", "'data.val' is 'two'"):
        assert part in text


@pytest.mark.parametrize(
    ("name", "method", "settings", "match"),
    [
        ("digits/tny", None, [], "no recipe 'digits/tny'; nearest: digits/tiny"),
        ("digits/tiny/letkd2", None, [], "no method 'letkd2'; nearest: letkd-2"),
        ("digits/tiny/kd", "quest", [], "names the method 'kd' and --method names 'quest'"),
        ("digits/tiny", None, ["epochs"], "write key=value"),
        ("missing.toml", None, [], "no recipe file missing.toml"),
        (None, "ce", [], "'data.name' is missing; 'student' is missing"),
    ],
)
def test_wrong_names(name, method, settings, match):
    with pytest.raises(RecipeError, match=match):
        resolve(name, method=method, settings=settings)


def test_a_file_that_is_no_toml(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe = [")
    with pytest.raises(RecipeError, match=r"x\.toml is no TOML file"):
        resolve(path)


def test_recipes_in_the_package_are_toml():
    paths = list(HERE.rglob("*.toml"))
    assert len(paths) >= 15
    for path in paths:
        tomllib.loads(path.read_text())
