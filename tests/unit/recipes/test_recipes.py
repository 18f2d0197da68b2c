"""Recipes: merging, the paper's numbers, and errors that name everything at once."""

import re
import tomllib
from dataclasses import replace
from functools import cache

import pytest

from letkd.errors import RecipeError
from letkd.methods import LetKD, letkd1, letkd2
from letkd.recipes import (
    HERE,
    derived_values,
    list_cells,
    list_methods,
    list_pairs,
    list_presets,
    merge,
    resolve,
    resolve_with_sources,
)
from letkd.recipes.schedule import lr_factor
from letkd.recipes.tables import as_toml, dotted, leaves


@pytest.mark.slow
def test_every_cell_resolves():
    for pair in list_pairs():
        for method in list_methods():
            assert resolve(f"{pair}/{method}") == resolve(pair, method=method)


def test_the_papers_numbers():
    recipe = resolve("cifar100/rn56-rn20/letkd-2")
    assert (recipe.train.epochs, recipe.data.batch_size, recipe.data.padding) == (240, 64, "reflect")
    assert (recipe.optim.lr, recipe.optim.momentum, recipe.optim.nesterov, recipe.optim.weight_decay) == (0.05, 0.9, True, 5e-4)
    assert [
        0.05 * lr_factor(100 * (epoch - 1), recipe, 100) for epoch in (1, 150, 151, 180, 181, 210, 211, 240)
    ] == pytest.approx([0.05, 0.05, 5e-3, 5e-3, 5e-4, 5e-4, 5e-5, 5e-5])
    sites = recipe.methods["letkd"]["sites"]
    assert (sites["penultimate"]["supervision"]["K"], sites["intermediate"]["supervision"]["K"]) == (4096, 8)
    assert (sites["penultimate"]["alpha"], sites["intermediate"]["alpha"]) == (1.0, 1.0)
    assert recipe.weights == {"ce": 1.0, "kd/penultimate": 1.0, "kd/intermediate": 1.0}
    assert (recipe.teacher.model, recipe.student.model) == ("resnet56", "resnet20")
    kd = resolve("cifar100/rn56-rn20/kd")
    assert (kd.methods["kd"]["T"], kd.weights) == (4.0, {"ce": 0.1, "kd": 0.9})


PAIRS = {
    "wrn40-2-wrn16-2": ("wrn_40_2", "wrn_16_2", 0.05, 6.0),
    "wrn40-2-wrn40-1": ("wrn_40_2", "wrn_40_1", 0.05, 6.0),
    "rn56-rn20": ("resnet56", "resnet20", 0.05, 2.0),
    "rn110-rn20": ("resnet110", "resnet20", 0.05, 2.0),
    "rn110-rn32": ("resnet110", "resnet32", 0.05, 2.0),
    "rn32x4-rn8x4": ("resnet32x4", "resnet8x4", 0.05, 8.0),
    "wrn40-2-snv1": ("wrn_40_2", "shufflenet_v1", 0.01, 8.0),
    "rn32x4-snv1": ("resnet32x4", "shufflenet_v1", 0.01, 8.0),
    "rn32x4-snv2": ("resnet32x4", "shufflenet_v2", 0.01, 8.0),
    "rn50-mnv2": ("resnet50_cifar", "mobilenetv2_half", 0.01, 8.0),
    "rn83-rn29": ("resnet83", "resnet29", 0.05, 2.0),
}


@pytest.mark.slow
def test_the_columns_of_cifar100():
    assert {pair for pair in list_pairs() if pair.startswith("cifar100/")} == {f"cifar100/{pair}" for pair in PAIRS}
    for pair, (teacher, student, lr, beta) in PAIRS.items():
        for method in list_methods():
            recipe = resolve(f"cifar100/{pair}/{method}")
            assert (recipe.data.name, recipe.data.val, recipe.train.epochs) == ("cifar100", 0.0, 240)
            if method == "teacher":
                assert (recipe.student.model, recipe.optim.lr) == (teacher, 0.05)
            else:
                assert (recipe.teacher.model, recipe.student.model, recipe.optim.lr) == (teacher, student, lr)
        assert resolve(f"cifar100/{pair}/dkd").methods["dkd"]["beta"] == beta


# T and weight of KD-LS; T, weight and beta of DKD-LS: from the authors' logs, their defaults where there is none.
STANDARDISED = {
    "wrn40-2-wrn16-2": ((2, 9), (2, 12, 2)),
    "wrn40-2-wrn40-1": ((2, 9), (2, 12, 2)),
    "rn56-rn20": ((2, 9), (3, 18, 2)),
    "rn110-rn20": ((2, 9), (2, 9, 2)),
    "rn110-rn32": ((2, 9), (2, 15, 2)),
    "rn32x4-rn8x4": ((2, 9), (2, 9, 8)),
    "wrn40-2-snv1": ((2, 9), (2, 9, 8)),
    "rn32x4-snv1": ((2, 9), (2, 9, 8)),
    "rn32x4-snv2": ((2, 9), (2, 9, 8)),
    "rn50-mnv2": ((3, 1), (2, 15, 2)),
    "rn83-rn29": ((2, 9), (2, 9, 2)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_settings_of_standardised_logits(pair):
    kd, dkd = resolve(f"cifar100/{pair}/kd-ls"), resolve(f"cifar100/{pair}/dkd-ls")
    table = dkd.methods["dkd"]
    assert kd.methods["kd"]["standardise"] is table["standardise"] is True
    found = (kd.methods["kd"]["T"], kd.weights["kd"]), (table["T"], dkd.weights["dkd"], table["beta"])
    assert found == STANDARDISED[pair]
    assert (kd.weights["ce"], dkd.weights["ce"], table["alpha"]) == (0.1, 1.0, 1.0)


@pytest.mark.parametrize(("other", "chosen"), [("kd", {"kd": 0.3}), ("kd-ls", {"kd": 6.0}), ("dist", {"dist": 0.15})])
@pytest.mark.parametrize("site", ["letkd-1", "letkd-2"])
def test_a_row_of_two_methods_is_both_of_their_rows(site, other, chosen):
    """With the pair's exceptions for each of them, but with weights of its own."""
    for pair in ("cifar100/rn50-mnv2", "imagenet/rn34-rn18"):
        both, one, two = (resolve(pair, method=name) for name in (f"{site}-{other}", site, other))
        assert both.methods == one.methods | two.methods
        assert both.weights == {"ce": 1.0} | chosen | {name: 4.0 for name in one.weights if name != "ce"}
    assert both.title == f"{one.title}+{two.title}"


TINY = {
    "wrn40-2-wrn16-2": ("wrn_40_2", "wrn_16_2", 0.05),
    "wrn40-2-wrn40-1": ("wrn_40_2", "wrn_40_1", 0.05),
    "rn56-rn20": ("resnet56", "resnet20", 0.05),
    "wrn40-2-snv1": ("wrn_40_2", "shufflenet_v1", 0.01),
    "rn50-mnv2": ("resnet50_cifar", "mobilenetv2_half", 0.01),
}


def test_the_columns_of_tiny_imagenet():
    assert {pair for pair in list_pairs() if pair.startswith("tiny-")} == {f"tiny-imagenet/{pair}" for pair in TINY}
    for pair, (teacher, student, lr) in TINY.items():
        recipe = resolve(f"tiny-imagenet/{pair}/letkd-2")
        assert (recipe.teacher.model, recipe.student.model, recipe.optim.lr) == (teacher, student, lr)
        assert (recipe.data.name, recipe.data.augment, recipe.data.rotation) == ("tiny-imagenet", "rotate", 20)
        assert (recipe.train.epochs, recipe.optim.milestones) == (240, [150, 180, 210])
        sites = recipe.methods["letkd"]["sites"]
        assert sites["penultimate"]["alpha"] == (0.5 if pair == "rn50-mnv2" else 1.0)
        assert sites["intermediate"]["alpha"] == 1.0


def test_the_settings_of_imagenet():
    nets = {"rn34-rn18": ("resnet34", "resnet18", 0.5), "rn50-mnv2": ("resnet50", "mobilenetv1", 2.0)}
    assert {pair for pair in list_pairs() if pair.startswith("imagenet/")} == {f"imagenet/{pair}" for pair in nets}
    for pair, (teacher, student, beta) in nets.items():
        recipe = resolve(f"imagenet/{pair}/letkd-2")
        assert (recipe.teacher.model, recipe.student.model) == (teacher, student)
        assert (recipe.train.epochs, recipe.optim.lr, recipe.optim.milestones) == (100, 0.1, [30, 60, 90])
        assert (recipe.data.batch_size, recipe.optim.weight_decay, recipe.data.augment) == (256, 1e-4, "resized-crop")
        assert resolve(f"imagenet/{pair}/dkd").methods["dkd"]["beta"] == beta
        assert resolve(f"imagenet/{pair}/kd").weights == {"ce": 0.5, "kd": 0.5}


@pytest.mark.parametrize(
    ("method", "mnv2", "others"),
    [
        ("letkd-1", {"penultimate": 0.1}, {"penultimate": 1.0}),
        ("letkd-2", {"penultimate": 0.1, "intermediate": 0.2}, {"penultimate": 1.0, "intermediate": 1.0}),
    ],
)
def test_alpha_is_1_but_for_rn50_mnv2(method, mnv2, others):
    for pair in PAIRS:
        sites = resolve(f"cifar100/{pair}/{method}").methods["letkd"]["sites"]
        assert {role: site["alpha"] for role, site in sites.items()} == (mnv2 if pair == "rn50-mnv2" else others), pair


@pytest.mark.parametrize(("row", "create"), [("letkd-1", letkd1), ("letkd-2", letkd2)])
@pytest.mark.parametrize("sharp", [False, True])
def test_the_functions_of_python_give_the_layers_of_the_rows(row, create, sharp):
    name = f"{row}-sharp" if sharp else row
    recipe = LetKD.from_recipe(resolve(f"cifar100/rn56-rn20/{name}").methods["letkd"])
    for role, site in create(sharp=sharp).sites.items():
        assert replace(site, supervision=recipe.sites[role].supervision) == recipe.sites[role]
    layer = recipe.sites["penultimate"].layer(d=64, K=4096)
    assert layer.bn.bias.unique().tolist() == [-2.0 if sharp else 0.0]
    assert layer.nu.scale.item() == pytest.approx(28.16 if sharp else 1.0)


def test_every_number_of_a_method_says_where_it_comes_from():
    lines = [(path.stem, line) for path in (HERE / "methods").glob("*.toml") for line in path.read_text().splitlines()]
    numbers = [(name, line) for name, line in lines if re.match(r"(?!title|kind|like)\S+ = ", line)]
    assert {"kd", "letkd-2"} <= {name for name, _ in numbers}
    assert not [(name, line) for name, line in numbers if "#" not in line]


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


def test_a_file_of_ones_own_defines_rows(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(
        '[data]\nname = "digits"\n[student]\nmodel = "resnet8"\n[teacher]\nmodel = "resnet14"\n[weights]\nce = 0.5\n'
        "[rows.kd.methods.kd]\nT = 2.0\n"
        '[rows.warm]\nlike = "kd"\ntitle = "Warm"\n[rows.warm.methods.kd]\nT = 9.0\n[rows.warm.weights]\nkd = 3.0\n'
        '[rows.warmer]\nlike = "warm"\n[rows.warmer.weights]\nkd = 4.0\n'
    )
    assert resolve(own, method="kd").methods["kd"]["T"] == 2.0
    assert resolve(own, method="ce").methods == {}
    warm, warmer = resolve(own, method="warm"), resolve(own, method="warmer")
    assert (warm.title, warm.methods["kd"]["T"], dict(warm.weights)) == ("Warm", 9.0, {"ce": 0.5, "kd": 3.0})
    assert (warmer.title, warmer.methods["kd"]["T"], warmer.weights["kd"]) == ("Warm", 9.0, 4.0)
    with pytest.raises(RecipeError, match="unknown method 'wram'; nearest: warm"):
        resolve(own, method="wram")
    own.write_text("rows = 3")
    with pytest.raises(RecipeError, match="one table per row"):
        resolve(own, method="kd")


def test_a_preset_lies_over_the_cell_and_under_what_the_user_says(tmp_path):
    recipe, sources = resolve_with_sources("cifar100/rn56-rn20/kd", preset="fast", settings=["train.epochs=3"])
    assert (recipe.optim.schedule, sources["optim.schedule"]) == ("linear", "presets/fast.toml")
    assert (recipe.train.epochs, sources["train.epochs"]) == (3, "--set")
    assert resolve("cifar100/rn56-rn20/kd", preset="paper") == resolve("cifar100/rn56-rn20/kd")
    own = tmp_path / "own.toml"
    own.write_text('preset = "fast"\n[data]\nname = "digits"\n[student]\nmodel = "resnet8"\n[train]\nepochs = 7\n')
    assert (resolve(own).optim.schedule, resolve(own).train.epochs) == ("linear", 7)
    assert resolve(own, preset="finetune").optim.name == "adamw"
    with pytest.raises(RecipeError, match="unknown preset 'fsat'; choose one of fast, finetune, paper"):
        resolve("digits/tiny/ce", preset="fsat")


@pytest.mark.parametrize("preset", list_presets())
def test_a_preset_has_exceptions_for_rows_that_set_their_own_weights(preset):
    # An exception for a method also applies to the rows like it, whose own weights it must not replace.
    for method in list_methods():
        own, file = resolve_with_sources("digits/tiny", method=method)
        recipe, sources = resolve_with_sources("digits/tiny", method=method, preset=preset)
        for term, weight in recipe.weights.items():
            key = dotted(("weights", term))
            if file[key] == f"methods/{method}.toml" and sources[key] != f"presets/{preset}.toml, exceptions.{method}":
                assert weight == own.weights[term], (method, key)


def test_a_key_that_one_table_has_may_stand_alone():
    recipe = resolve("cifar100/rn56-rn20/letkd-2", settings=["epochs=1", "lr=0.2", "batch_size=32", "title=mine"])
    assert (recipe.train.epochs, recipe.optim.lr, recipe.data.batch_size, recipe.title) == (1, 0.2, 32, "mine")
    with pytest.raises(RecipeError, match="unknown key 'model'"):
        resolve("cifar100/rn56-rn20/letkd-2", settings=["model=resnet8"])  # student or teacher?


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
    for part in (
        "'optim.lrr' (nearest: lr)",
        "'train.epochs' is 0",
        "unknown key 'colour'",
        "'weights.ce' is -1",
        "'data.val' is 'two'",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("name", "method", "settings", "match"),
    [
        ("digits/tny", None, [], "unknown recipe 'digits/tny'; nearest: digits/tiny"),
        ("digits/tiny/letkd2", None, [], "unknown method 'letkd2'; nearest: letkd-2"),
        ("digits/tiny/kd", "quest", [], "names the method 'kd', but `method=` is 'quest'"),
        ("digits/tiny", None, ["epochs"], "write key=value"),
        ("missing.toml", None, [], "the recipe file missing.toml does not exist"),
        (
            None,
            "ce",
            [],
            r"'data.name' is missing \(name the data set with --data\); 'student' is missing \(name it with --student\)",
        ),
    ],
)
def test_wrong_names(name, method, settings, match):
    with pytest.raises(RecipeError, match=match):
        resolve(name, method=method, settings=settings)


def test_a_file_that_is_no_toml(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe = [")
    with pytest.raises(RecipeError, match=r"x\.toml is not a valid TOML file"):
        resolve(path)


def test_recipes_in_the_package_are_toml():
    paths = list(HERE.rglob("*.toml"))
    assert len(paths) >= 15
    for path in paths:
        tomllib.loads(path.read_text())


def test_cells_are_pairs_and_methods():
    assert len(list_cells()) == len(set(list_cells())) == len(list_pairs()) * len(list_methods())
    assert "cifar100/rn56-rn20/letkd-2" in list_cells()


@cache
def table_in(file: str) -> dict:
    return tomllib.loads((HERE / file).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("quick", [False, True])
def test_every_value_has_a_source_that_says_it(quick):
    for cell in list_cells():
        recipe, sources = resolve_with_sources(cell, quick=quick)
        shown = recipe.model_dump(exclude_unset=True)
        assert {dotted(path) for path, _ in leaves(shown)} == sources.keys()
        for path, value in leaves(shown):
            source = sources[dotted(path)]
            if source == "--quick":
                assert quick
                continue
            file, _, inside = source.partition(", ")
            said = table_in(file)
            trained_teacher = cell.endswith("/teacher") and path[0] == "student"
            for part in (*inside.split("."), *(("teacher", *path[1:]) if trained_teacher else path)):
                said = said[part] if part else said
            if path != ("phases",):  # Phase fills in its own defaults
                assert said == value, (cell, path)


def test_sources_by_name(tmp_path):
    recipe, sources = resolve_with_sources(
        "cifar100/rn50-mnv2/letkd-2",
        overrides={"data.root": "here", "student.taps": {"penultimate.conv3x3": "a"}},
        settings=["optim.lr=0.2", "train.seed=3", "optim.lr=0.3"],
    )
    assert recipe.optim.lr == 0.3
    assert sources["optim.lr"] == sources["train.seed"] == "--set"
    assert sources["data.root"] == sources['student.taps."penultimate.conv3x3"'] == "override"
    assert sources["optim.momentum"] == "base.toml"
    assert sources["data.val"] == "pairs/cifar100/rn50-mnv2.toml"
    assert sources['weights."kd/penultimate"'] == "methods/letkd-2.toml"
    assert sources["methods.letkd.sites.intermediate.alpha"] == "pairs/cifar100/rn50-mnv2.toml, exceptions.letkd-2"
    own = tmp_path / "own.toml"
    own.write_text('data.name = "digits"\nstudent.model = "resnet8"\noptim.lr = 0.3\n')
    _, sources = resolve_with_sources(own)
    assert (sources["optim.lr"], sources["optim.gamma"]) == (str(own), "base.toml")


def test_a_value_that_replaces_a_table_is_the_only_source_left():
    _, sources = resolve_with_sources("digits/tiny/kd", settings=["methods.kd=4", "methods.kd={T=2.0}", "methods.kd.x={}"])
    assert {key: source for key, source in sources.items() if key.startswith("methods")} == {
        "methods.kd.T": "--set",
        "methods.kd.x": "--set",
    }


def test_the_teachers_weights_are_not_where_its_training_starts():
    recipe, sources = resolve_with_sources("digits/tiny/teacher", settings=["teacher.weights=old", "teacher.model=resnet8"])
    assert (recipe.student.model, recipe.student.weights, recipe.teacher) == ("resnet8", None, None)
    assert sources["student.model"] == "--set"
    assert "student.weights" not in sources


@pytest.mark.parametrize("value", [True, 3, 0.1, 1e-5, float("inf"), 'a "b" \\ ü', [], [1, 2], {}, [{"a b": {"c": [0.5]}}]])
def test_values_as_toml(value):
    assert tomllib.loads(f"x = {as_toml(value)}") == {"x": value}


@pytest.mark.slow
def test_quick_is_a_smoke_run_of_the_same_recipe():
    for cell in list_cells():
        whole, small = resolve(cell), resolve(cell, quick=True)
        assert (small.train.epochs, small.train.steps) == (1, 2)
        assert small.data.fraction <= 0.02
        assert small.data.batch_size <= 16
        assert [phase.epochs for phase in small.phases] == [1] * len(whole.phases)
        assert [phase.weights for phase in small.phases] == [phase.weights for phase in whole.phases]
        assert (small.student, small.teacher, small.optim, small.weights) == (
            whole.student,
            whole.teacher,
            whole.optim,
            whole.weights,
        )
        numbers = dict(leaves(whole.methods))
        for path, value in leaves(small.methods):
            assert value == (min(numbers.pop(path), 4) if path[-1] == "K" else numbers.pop(path)), (cell, path)
        assert not numbers


def test_quick_makes_nothing_larger_and_yields_to_the_user(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('data = { name = "digits", batch_size = 4, fraction = 0.01 }\nstudent.model = "resnet8"\ntrain.steps = 1\n')
    recipe = resolve(own, quick=True)
    assert (recipe.data.batch_size, recipe.data.fraction, recipe.train.steps) == (4, 0.01, 1)
    recipe = resolve("digits/tiny/quest", quick=True, overrides={"train.epochs": 3}, settings=["data.fraction=0.5"])
    assert (recipe.train.epochs, recipe.data.fraction, recipe.data.batch_size) == (3, 0.5, 16)


def test_quick_leaves_wrong_values_to_the_schema(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(
        'train = 5\nphases = ["a"]\nmethods = 1\ndata = { name = "digits", fraction = "x" }\nstudent.model = "resnet8"\n'
    )
    with pytest.raises(RecipeError, match=r"'data.fraction' is 'x'.*'train' is 5.*'methods' is 1.*'phases.0' is 'a'"):
        resolve(own, quick=True)


def test_a_method_that_is_like_another_holds_only_what_differs():
    plain, changed = (resolve(f"cifar100/rn50-mnv2/{name}").model_dump() for name in ("letkd-2", "letkd-2-01"))
    assert changed["methods"]["letkd"]["sites"]["intermediate"].pop("alpha") == 0.0
    assert plain["methods"]["letkd"]["sites"]["intermediate"].pop("alpha") == 0.2, "the pair's exception for letkd-2"
    assert (plain.pop("title"), changed.pop("title")) == ("letKD-2", "letKD-2, α = 0, 1")
    assert plain == changed


@pytest.mark.parametrize(
    ("epochs", "milestones"), [(240, [150, 180, 210]), (480, [300, 360, 420]), (24, [15, 18, 21]), (3, [2]), (2, [1]), (1, [])]
)
def test_milestones_move_with_the_epochs(epochs, milestones):
    for given in ({"settings": [f"epochs={epochs}"]}, {"overrides": {"train.epochs": epochs}}):
        recipe, sources = resolve_with_sources("cifar100/rn56-rn20/kd", **given)
        assert recipe.optim.milestones == milestones
        change = (
            f"optim.milestones = {milestones} (base.toml, scaled from 240 to {epochs} epochs); set optim.milestones to choose "
        )
        change += "another value"
        assert derived_values(recipe, sources) == ([] if epochs == 240 else [change])


@pytest.mark.parametrize(("method", "key"), [("dkd", "methods.dkd.warmup"), ("reviewkd", "methods.reviewkd.warmup")])
def test_the_warm_up_of_a_method_moves_with_the_epochs(method, key):
    def warmup(*settings: str, **more) -> int:
        recipe, sources = resolve_with_sources(f"cifar100/rn56-rn20/{method}", settings=settings, **more)
        moved = any(line.startswith(f"{key} = ") for line in derived_values(recipe, sources))
        assert moved == ("scaled from 240" in sources[key])
        return recipe.methods[method]["warmup"]

    assert [warmup(), warmup("epochs=48"), warmup("epochs=12"), warmup("epochs=3")] == [20, 4, 1, 0]
    assert warmup("epochs=12", f"{key}=7") == warmup(f"{key}=7", "epochs=12") == 7
    assert warmup(quick=True) == 20
    assert warmup(preset="fast") == (0 if method == "dkd" else 1)
    assert resolve(f"digits/tiny/{method}").methods[method]["warmup"] == 3  # of 40, as 20 of 240
    assert resolve(f"imagenet/rn34-rn18/{method}", settings=["epochs=50"]).methods[method]["warmup"] <= 1


def test_milestones_that_are_set_stay(tmp_path):
    own = tmp_path / "own.toml"
    known = '[data]\nname = "digits"\n[student]\nmodel = "resnet8"\n'
    own.write_text(f"{known}[train]\nepochs = 24\n")
    assert resolve(own).optim.milestones == [15, 18, 21]
    own.write_text(f"{known}[train]\nepochs = 24\n[optim]\nmilestones = [7]\n")
    assert resolve(own).optim.milestones == [7]
    assert resolve(own, settings=["epochs=48"]).optim.milestones == [14]
    assert resolve("cifar100/rn56-rn20/kd", settings=["milestones=[5]", "epochs=10"]).optim.milestones == [5]
    for more in (["milestones=[5]"], ["schedule=cosine"]):
        recipe, sources = resolve_with_sources("cifar100/rn56-rn20/kd", settings=["epochs=10", *more])
        assert recipe.optim.milestones == ([5] if "milestones" in more[0] else [150, 180, 210])
        assert derived_values(recipe, sources) == []
    assert resolve("cifar100/rn56-rn20/kd", quick=True).optim.milestones == [150, 180, 210]
    assert resolve("cifar100/rn56-rn20/kd", quick=True, settings=["epochs=24"]).optim.milestones == [15, 18, 21]


@pytest.mark.parametrize(("name", "size"), [("resnet8", 32), ("resnet18", 224), ("timm:resnet18", None)])
def test_a_folder_of_images_has_the_input_size_of_a_student_from_the_zoo(name, size):
    given = {"data.name": "folder", "student.model": name}
    recipe, sources = resolve_with_sources(None, method="ce", overrides=given)
    line = f"data.size = {size} (input size of {name}); set data.size to choose another"
    assert recipe.data.size == size
    assert derived_values(recipe, sources) == ([line] if size else [])
    recipe, sources = resolve_with_sources(None, method="ce", overrides=given, settings=["data.size=48"])
    assert (recipe.data.size, derived_values(recipe, sources)) == (48, [])


def test_a_data_set_keeps_its_own_size():
    assert resolve(None, method="ce", overrides={"data.name": "cifar10", "student.model": "resnet18"}).data.size is None


def test_an_unknown_key_in_a_list_of_tables_gets_a_sentence():
    with pytest.raises(RecipeError, match=r"unknown key 'phases\.0\.epoch' \(nearest: epochs, weights\)"):
        resolve("digits/tiny/kd", settings=["phases=[{epochs=1, weights={}, epoch=3}]"])


@pytest.mark.parametrize(
    "setting",
    ["epochs=20.0", "epochs=true", "epochs='20'", "optim.lr=true", "optim.lr='0.1'", "milestones=[0]", "milestones=[-3]"],
)
def test_a_value_of_another_type_is_refused(setting):
    with pytest.raises(RecipeError, match=r"(train\.epochs|optim\.lr|optim\.milestones\.0)' is .*Input should be"):
        resolve("digits/tiny/ce", settings=[setting])
    assert resolve("digits/tiny/ce", settings=["optim.lr=1"]).optim.lr == 1.0


def test_a_setting_that_is_a_comment_in_toml_is_an_unknown_key():
    with pytest.raises(RecipeError, match="unknown key '#optim"):
        resolve("digits/tiny/ce", settings=["#optim.lr=1"])
