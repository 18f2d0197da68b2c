"""The plots of a search."""

import pytest

from letkd.report.search_section import slices
from letkd.runs.study_file import Record, Study


def a_study(lrs: list[float]) -> Study:
    trials = [Record(k, "COMPLETE", {"optim.lr": lr, "optim.kind": "sgd"}, 50.0 + k, 3, 50.0 + k) for k, lr in enumerate(lrs)]
    return Study("study", ["optim.lr=log:0.001..0.5", "optim.kind=sgd|adamw"], ["optim.lr"], trials, len(lrs) - 1, {})


@pytest.mark.parametrize(("lrs", "wanted"), [([0.001, 0.03, 0.5], "0.01"), ([0.02, 0.03, 0.05], "0.03")])
def test_rates_on_a_logarithmic_axis_are_plain_numbers(lrs, wanted):
    figure = slices(a_study(lrs))
    figure.draw_without_rendering()
    axis = figure.axes[0].xaxis
    labels = [label.get_text() for label in axis.get_majorticklabels() + axis.get_minorticklabels()]
    assert wanted in labels
    assert not any("$" in label for label in labels), labels


def test_the_legend_names_only_what_is_shown():
    figure = slices(a_study([0.001, 0.03, 0.5]))
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["complete", "best"]
