"""Paired differences between rows against scipy's test, and what the tables print of them."""

import pytest
import torch
from scipy.stats import ttest_rel

from letkd.report.paired import PairedDifference, paired_difference
from letkd.report.results_table import as_markdown
from letkd.runs.records import Result
from letkd.runs.results import Row


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_the_interval_is_that_of_the_paired_t_test(n):
    g = torch.Generator().manual_seed(n)
    a, b = (70 + torch.randn(2, n, generator=g, dtype=torch.float64)).tolist()
    found = paired_difference(dict(enumerate(a)), dict(enumerate(b)))
    expected = ttest_rel(a, b).confidence_interval(0.95)
    assert (found.low, found.high, found.n) == pytest.approx((expected.low, expected.high, n), rel=1e-9)
    assert found.mean == pytest.approx(sum(a) / n - sum(b) / n)


def test_only_seeds_of_both_rows_count():
    found = paired_difference({0: 71.0, 1: 73.0, 5: 99.0}, {1: 70.0, 0: 70.0, 7: 0.0})
    assert (found.mean, found.n) == (2.0, 2)
    assert paired_difference({0: 71.0}, {1: 70.0}) is None
    assert paired_difference({0: 71.0}, {0: 70.0}) == PairedDifference(1.0, None, 1)


def test_a_difference_below_what_is_shown_has_no_negative_zero():
    assert str(PairedDifference(-0.004, 0.0041, 3)) == "+0.00 [−0.01, +0.00] (3)"


def test_tables_show_the_difference_to_the_row_named():
    def row(name, *tests):
        results = [Result(test, 99.0, None, None, None, None, 1000, 1, 1.0) for test in tests]
        return Row(name.upper(), results, name=name, seeds=range(len(tests)))

    rows = [row("teacher", 80.0), row("ce", 70.0, 71.0), row("kd", 72.0, 72.5), Row("AT", [], "failed: x", "at", (0, 1))]
    text = as_markdown(rows, "ce")
    assert text.startswith("| method | test %, last epoch | n | Δ to CE |")
    # t(0.975; 1) = 12.7062; the differences 2 and 1.5 have s/√2 = 0.25
    assert "| KD | 72.25 ± 0.35 | 2 | +1.75 \\[−1.43, +4.93\\] (2) |" in text
    assert "| CE | 70.50 ± 0.71 | 2 | – |" in text
    assert "| AT | – | 0 | – |" in text
    assert "| TEACHER | 80.00 | 1 | +10.00 (1) |" in text
    assert text.count("Student's t on the differences per seed") == 1
    assert "Δ" not in as_markdown(rows), "only if asked for"
