"""Figures by what is in their axes: curves, classes, features, correlations."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from letkd.batch import Batch
from letkd.distiller.teacher_input import AdaptedTeacher, TeacherInput
from letkd.errors import NonFiniteError, TapError
from letkd.models import create_model
from letkd.models.cost import macs
from letkd.recipes import resolve
from letkd.recipes.schema import Network, Teacher
from letkd.report.charts import Chart, Series, draw, draw_all
from letkd.report.classes import class_chart, confusion_matrix, confusions, per_class
from letkd.report.collect import Group, Run
from letkd.report.curves import curves, health_charts
from letkd.report.features import correlation_difference, draw_differences, draw_planes, outputs, project
from letkd.runs.evaluation import Predictions, predict
from tests.support.pair import Net, a_stream


def group(method: str, *seeds: list[dict]) -> Group:
    recipe = resolve("digits/tiny", method=method)
    return Group(recipe.title, "digits/tiny", method, [Run(None, recipe, None, rows) for rows in seeds])


def rows(*values: float, **more) -> list[dict]:
    return [
        {"epoch": k, "lr": 0.1 / k, "train_top1": v, "loss": v, "ce": v, "val_top1": v, **more} for k, v in enumerate(values, 1)
    ]


def test_a_curve_is_the_mean_over_seeds_with_the_range_around_it():
    one, other = group("ce", rows(10, 20), rows(30, 50)), group("kd", rows(1, 2, 3, kd=7.0))
    charts = {chart.key: chart for chart in curves("digits/tiny", [one, other])}
    figure = draw(charts["val"])
    axes = figure.axes[0]
    (x, y), (_, y2) = (line.get_data() for line in axes.lines)
    assert list(x) == [1, 2, 3]
    assert list(y[:2]) == [20, 35]
    assert np.isnan(y[2]), "that run has no third epoch"
    assert list(y2) == [1, 2, 3]
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (10, 50)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Student", "KD"]
    assert draw(charts["lr"]).axes[0].get_yscale() == "log"
    assert "ema" not in charts
    averaged = {chart.key: chart for chart in curves("digits/tiny", [group("kd", rows(1, 2, kd=7.0, ema_val_top1=3.0))])}
    assert list(averaged["ema"].series[0].y) == [3.0, 3.0]
    assert [series.name for series in averaged["loss-digits-tiny-kd"].series] == ["loss", "ce", "kd"], "it is no loss term"
    losses = charts["loss-digits-tiny-kd"]
    assert [series.name for series in losses.series] == ["loss", "ce", "kd"]
    assert "ce × 0.1, kd × 0.9" in losses.note
    panels = draw_all([charts["val"], charts["train"]], title="both").axes
    assert [panel.get_title(loc="left") for panel in panels] == ["Validation accuracy", "Training accuracy (augmented images)"]


def test_values_of_some_epochs_are_shown_as_a_line_or_as_points():
    """With `train.validate_every`, epochs have no validation accuracy."""
    sparse = [row | {"val_top1": row["val_top1"] if row["epoch"] % 10 == 0 else None} for row in rows(*range(1, 41))]
    (chart,) = (chart for chart in curves("digits/tiny", [group("ce", sparse)]) if chart.key == "val")
    assert (list(chart.x), list(chart.series[0].y)) == ([10, 20, 30, 40], [10, 20, 30, 40])
    both = curves("digits/tiny", [group("ce", sparse), group("kd", rows(*range(1, 41)))])
    lone, whole = draw(next(chart for chart in both if chart.key == "val")).axes[0].lines
    assert (lone.get_marker(), whole.get_marker()) == ("o", ""), "a line cannot show points between gaps"


def test_health_has_a_chart_for_each_value_of_each_site():
    health = {"penultimate": {"used": 4.0, "discarded": 0.5}, "intermediate": {"used": 3.0}}
    charts = health_charts("digits/tiny", [group("ce", rows(1)), group("letkd-2", rows(1, 2, health=health))])
    assert {chart.key: [list(series.y) for series in chart.series] for chart in charts} == {
        "health-penultimate-used": [[4.0, 4.0]],
        "health-penultimate-discarded": [[50.0, 50.0]],
        "health-intermediate-used": [[3.0, 3.0]],
    }
    assert charts[0].series[0].colour == 1, "a method has one colour in all charts"


def test_classes_and_confusions_by_counting():
    alone = [
        Predictions(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 0, 2])),
        Predictions(torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 0, 2])),
    ]
    taught = [Predictions(torch.tensor([0, 0, 2, 2]), torch.tensor([0, 0, 0, 2]))]
    one, other = confusion_matrix(alone, 3), confusion_matrix(taught, 3)
    assert one.tolist() == [[1, 2, 0], [0, 0, 0], [0.5, 0, 0.5]]
    assert per_class(one) == [pytest.approx(100 / 3), None, 50.0]
    found = confusions(one, other, ("a", "b", "c"))
    assert [(c.true, c.taken, c.fixed) for c in found] == [("a", "b", 2.0), ("c", "a", 0.5), ("a", "c", -1.0)]
    chart = class_chart("p", {"alone": one, "taught": other}, ("a", "b", "c"), {"alone": 0, "taught": 1}, most=2)
    assert list(chart.x) == ["a", "c"]
    assert "2 of 3 classes" in chart.note
    points = [collection.get_offsets().tolist() for collection in draw(chart).axes[0].collections]
    assert points[1] == [[pytest.approx(200 / 3), 0], [100.0, 1]]


def test_predictions_are_the_models_and_keep_the_order_of_the_images(tmp_path):
    stream = a_stream()
    model = Net(4).train()
    found = predict(model, reversed(stream))
    assert model.training
    expected = torch.cat([model.eval()(batch.x).argmax(dim=1) for batch in stream])
    assert torch.equal(found.predicted, expected)
    assert torch.equal(found.labels, torch.cat([batch.y for batch in stream]))
    found.save(tmp_path / "predictions.safetensors")
    again = Predictions.load(tmp_path / "predictions.safetensors", 3)
    assert torch.equal(again.predicted, found.predicted)
    assert torch.equal(again.labels, found.labels)


def test_the_plane_is_the_first_two_principal_components():
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 5, 1, 1, 0.5, 0.1])
    from sklearn.decomposition import PCA

    ours, theirs = project(x), PCA(2).fit_transform(x.numpy())
    for k in range(2):
        assert abs(np.corrcoef(ours[:, k], theirs[:, k])[0, 1]) == pytest.approx(1, abs=1e-4)
    assert np.abs(ours).max() == pytest.approx(1)
    assert project(x[:, :1]).shape == (40, 2), "one feature makes a line"
    mapped = project(x, "tsne")
    assert mapped.shape == (40, 2)
    assert not np.allclose(np.abs(mapped), np.abs(ours), atol=0.1)


def test_feature_and_correlation_figures_hold_their_data():
    student = create_model("resnet8_tiny", num_classes=10)
    batch = Batch(torch.randn(6, 3, 32, 32), torch.arange(6))
    found = outputs(student, batch, Network(model="resnet8_tiny"), step=4)
    torch.testing.assert_close(found.logits, student.eval()(batch.x))
    torch.testing.assert_close(student.fc(found.pooled), found.logits)
    plane = project(found.pooled)
    panel = draw_planes({"Teacher": plane, "Student": -plane}, batch.y, tuple("0123456789")).axes[1]
    np.testing.assert_allclose(panel.collections[0].get_offsets(), -plane)
    other = found.logits.clone()
    other[:, 0] = -other[:, 0]
    difference = correlation_difference(found.logits, other)
    expected = np.corrcoef(found.logits.detach().double().T) - np.corrcoef(other.detach().double().T)
    np.testing.assert_allclose(difference.detach(), expected, atol=1e-9)
    image = draw_differences({"KD": difference.detach()}).axes[0].images[0].get_array()
    np.testing.assert_allclose(image, expected, atol=1e-9)


def test_features_of_an_own_network_are_read_at_the_taps_of_the_recipe_or_at_the_proposed_one():
    own = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 3)
    )
    halves, zeros = (0.5, 0.5, 0.5), (0.0, 0.0, 0.0)
    teacher = AdaptedTeacher(own, TeacherInput(zeros, halves, zeros, halves, size=(8, 8), order=(2, 0)))
    batch = Batch(torch.randn(5, 3, 6, 6), torch.zeros(5, dtype=torch.int64))
    for taps in ({"pooled": "3:input"}, {"pooled": "2"}, {"penultimate": "0"}, {}):
        found = outputs(own, batch, Network(model="net.py:own", taps=taps))
        torch.testing.assert_close(own[3](found.pooled), found.logits, msg=str(taps))
        found = outputs(teacher, batch, Teacher(model="net.py:own", taps=taps))
        torch.testing.assert_close(own[3](found.pooled)[:, [2, 0]], found.logits, msg=str(taps))
    maps = outputs(own, batch, Network(model="net.py:own", taps={"pooled": "1"}))
    assert maps.pooled.shape == (5, 4), "the recipe's tap, not the proposed one"
    assert outputs(own, batch, Network(model="net.py:own", taps={"pooled": "0"})).pooled.shape == (5, 4 * 16)


def test_a_network_whose_classifier_is_not_found_is_named_with_the_option():
    without_linear = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 6), torch.nn.Flatten())
    teacher = AdaptedTeacher(without_linear, TeacherInput(*[(0.5, 0.5, 0.5)] * 4))
    batch = Batch(torch.randn(2, 3, 6, 6), torch.zeros(2, dtype=torch.int64))
    for model, table, option in (
        (without_linear, Network(model="net.py:own"), "--tap"),
        (teacher, Teacher(model="net.py:own"), "--teacher-tap"),
    ):
        with pytest.raises(TapError, match=rf"^net\.py:own has no tap 'pooled', .* {option} pooled=module\.path"):
            outputs(model, batch, table)
    infinite = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 3))
    infinite[1].bias.data.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match=r"^net\.py:own returns NaN"):
        outputs(infinite, batch, Network(model="net.py:own"))


def test_titles_of_panels_do_not_overlap():
    titles = [
        "FitNet + KD layer, no supervision",
        "FitNet + KD layer, supervised",
        "letKD-2 (letkd.sites.intermediate.supervision.K 16)",
    ]
    points, classes = np.zeros((20, 2)), tuple(f"class {c}" for c in range(20))
    for figure in (
        draw_planes(dict.fromkeys(titles, points), torch.arange(20), classes),
        draw_differences(dict.fromkeys(titles, torch.ones(3, 3))),
    ):
        figure.draw_without_rendering()
        boxes = [axes.title.get_window_extent() for axes in figure.axes[:3]]
        assert not any(one.overlaps(other) for one, other in pairwise(boxes))
        for legend in figure.legends:
            assert figure.bbox.y0 <= legend.get_window_extent().y0
            assert legend.get_window_extent().y1 <= figure.bbox.y1


def test_macs_by_hand():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(4 * 25, 7))
    assert macs(net, torch.zeros(1, 3, 5, 5)) == 25 * 4 * 27 + 100 * 7


def test_a_chart_of_one_series_needs_no_legend():
    assert draw(Chart("k", "t", "x", "y", [1, 2], [Series("a", [1.0, None])])).legends == []


def test_a_loss_that_is_no_number_is_a_gap_on_the_page():
    chart = Chart("k", "t", "x", "y", [1, 2], [Series("a", [float("nan"), 1 / 3])])
    assert chart.as_json()["series"][0]["y"] == [None, 0.333333]
