"""`weights = "auto"` in a run: the value is measured, printed, kept, and the same after an interruption."""

import json

import pytest
import torch

import letkd.training.loop as loop
from letkd.errors import LetkdError, RecipeError, RunError, Stopped
from letkd.models import create_model, save_weights
from letkd.models.weights import read_state_dict
from letkd.recipes import resolve
from letkd.report.collect import find_groups
from letkd.report.curves import curves
from tests.support.runs import stop_after

SMALL = [
    *("data.fraction=0.05", "data.batch_size=16", "train.steps=3", "train.epochs=10"),
    *("student.model=resnet8_tiny", "teacher.model=resnet14_tiny", "optim.milestones=[]"),
]
WAYS = {
    "letkd-1": ["train.cache_views=2"],
    "kd": ["data.mix=mixup"],
    "letkd-1-kd": ["train.accumulate=2", "train.precision=bf16-mixed"],
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    save_weights(create_model("resnet14_tiny", num_classes=10), path)
    return path


def recipe_for(method, teacher, *settings):
    K = [f"methods.letkd.sites.penultimate.supervision.K={K}" for K in (4,) if method.startswith("letkd")]
    return resolve("digits/tiny", method=method, overrides={"teacher.weights": str(teacher)}, settings=[*SMALL, *K, *settings])


@pytest.mark.parametrize("method", WAYS)
def test_a_run_stopped_while_it_measures_ends_with_the_same_bits(method, teacher, tmp_path, caplog):
    caplog.set_level("INFO", logger="letkd")
    recipe = recipe_for(method, teacher, *WAYS[method], "train.epochs=7", "weights=auto", "weights.ce=1")  # 3 of 21 steps
    names = [name for name in recipe.weights if name != "ce"]
    whole = loop.train(recipe, tmp_path / "whole", supervision=tmp_path / "shared")
    assert list(whole.auto_weights) == names
    said = [record.message for record in caplog.records if "automatic weights" in record.message]
    values = ", ".join(f"{name} {value:.4g}" for name, value in whole.auto_weights.items())
    assert said == [f"automatic weights after 3 steps: {values}"]
    with pytest.raises(Stopped):
        loop.train(recipe, tmp_path / "stopped", supervision=tmp_path / "shared", on_step=stop_after(2))
    again = loop.train(recipe, tmp_path / "stopped", supervision=tmp_path / "shared")
    assert again.auto_weights == whole.auto_weights
    states = [read_state_dict(tmp_path / run / "last" / "checkpoint.safetensors") for run in ("whole", "stopped")]
    weights = [{name: value for name, value in state.items() if name.startswith("module.")} for state in states]
    assert [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])] == []
    rows = [json.loads(line) for line in (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()]
    for name in names:
        assert {row[f"weight/{name}"] for row in rows} == {whole.auto_weights[name]}  # constant after the first epoch
    assert json.loads((tmp_path / "stopped" / "result.json").read_text())["auto_weights"] == whole.auto_weights
    (loss,) = [chart for chart in curves("a pair", find_groups([tmp_path / "whole"])) if chart.key.startswith("loss")]
    assert {series.name for series in loss.series} == {"loss", "ce", *names}
    assert f"{names[0]} × {whole.auto_weights[names[0]]:.4g} (auto)" in loss.note
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"epochs": 9})})
    with pytest.raises(RunError, match=r"the automatic weight of .* is measured in the first tenth of 7 epochs, not of 9"):
        loop.train(longer, tmp_path / "whole")


def test_auto_applies_to_all_terms_but_the_cross_entropy(teacher):
    assert recipe_for("letkd-1-kd", teacher, "weights=auto:0.5").weights == {
        "ce": 1.0,
        "kd": "auto:0.5",
        "kd/penultimate": "auto:0.5",
    }
    assert recipe_for("letkd-1-kd", teacher, "weights.kd=auto").weights["kd"] == "auto"
    assert recipe_for("letkd-1-kd", teacher, "weights.kd=0", "weights=auto").weights["kd"] == 0
    assert recipe_for("ce", teacher, "weights=auto").weights == recipe_for("ce", teacher).weights  # a row of a comparison
    with pytest.raises(RecipeError, match=r'--set: weights = "auto" applies to no term; name one'):
        recipe_for("kd", teacher, "weights.kd=0", "weights=auto")


@pytest.mark.parametrize("value", ["-1", "1e7", "'often'", "'auto:0'", "'auto:x'", "true", "nan", "[1]"])
def test_a_wrong_weight_is_one_sentence(value, teacher):
    with pytest.raises(
        RecipeError, match=r"'weights.kd' is .*: a weight is a number from 0 to 1,000,000, or \"auto\", or a share"
    ):
        recipe_for("kd", teacher, f"weights.kd={value}")


def test_auto_without_a_cross_entropy_is_refused_before_any_work(teacher, tmp_path):
    with pytest.raises(LetkdError, match="a share of the gradient of 'ce', whose weight is 0; give a number"):
        loop.train(recipe_for("kd", teacher, "weights.ce=0", "weights.kd=auto"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
