"""Charts with few and with many rows: legends fit, rows can be told apart, axes keep their size."""

import warnings

import pytest
from matplotlib.figure import Figure

from letkd.report.charts import Chart, Series, draw, draw_all

ROWS = [3, 8, 18, 20, 43]
LONG = "FitNet + KD layer, no supervision"


def lines(rows: int, epochs: int = 3) -> Chart:
    series = [Series(f"row {k}" if k else LONG, [float(k + e) for e in range(epochs)], k) for k in range(rows)]
    return Chart("val", "Accuracy", "epoch", "%", list(range(1, epochs + 1)), series)


def dots(rows: int, classes: int = 2) -> Chart:
    series = [Series(f"row {k}" if k else LONG, [float(k + c) for c in range(classes)], k) for k in range(rows)]
    return Chart("classes", "Accuracy", "class", "%", [f"class {c}" for c in range(classes)], series, kind="dots")


def drawn(figure: Figure) -> Figure:
    """The figure, laid out; a warning of the layout is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    return figure


def assert_legend_fits(figure: Figure) -> None:
    (legend,) = figure.legends
    page, box = figure.bbox, legend.get_window_extent()
    assert page.x0 <= box.x0
    assert box.x1 <= page.x1
    assert page.y0 <= box.y0
    assert box.y1 <= page.y1
    for axes in figure.axes:
        assert not box.overlaps(axes.get_tightbbox()), axes.get_title(loc="left")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("make", [lines, dots])
def test_the_legend_fits_the_figure_and_the_axes_keep_their_size(make, rows):
    figure = drawn(draw(make(rows)))
    assert_legend_fits(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()][1:] == [f"row {k}" for k in range(1, rows)]
    few = drawn(draw(make(1))).axes[0].get_window_extent()
    now = figure.axes[0].get_window_extent()
    assert now.height >= 0.99 * few.height
    assert now.width >= 0.5 * few.width
    assert figure.get_size_inches()[0] == pytest.approx(6.4), "as wide as a page's text"


@pytest.mark.parametrize("rows", [2, 18, 43])
def test_panels_share_a_legend_that_covers_none_of_them(rows):
    figure = drawn(draw_all([lines(rows) for _ in range(11)], title="penultimate"))
    assert [axes.get_legend() for axes in figure.axes] == [None] * 12
    assert_legend_fits(figure)
    assert len(figure.legends[0].get_texts()) == rows
    boxes = [axes.get_tightbbox() for axes in figure.axes[:11]]
    assert not any(one.overlaps(other) for k, one in enumerate(boxes) for other in boxes[:k])


def test_a_colour_with_several_meanings_has_a_legend_per_panel():
    """Losses: the third colour is the term of each method."""
    charts = [
        Chart(name, name, "epoch", "loss", [1, 2], [Series("loss", [2.0, 1.0], 0), Series(name, [1.0, 1.0], 1)])
        for name in ("kd", "at")
    ]
    figure = drawn(draw_all(charts, title="losses"))
    assert figure.legends == []
    assert [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes] == [
        ["loss", "kd"],
        ["loss", "at"],
    ]


def test_a_name_as_long_as_a_list_of_settings_is_wrapped():
    chart = lines(3)
    long = Series(f"letKD-2 ({', '.join(f'letkd.sites.intermediate.supervision.K{k} 16' for k in range(6))})", [1.0, 2.0, 3.0])
    figure = drawn(draw(Chart("val", "t", "epoch", "%", chart.x, [*chart.series, long])))
    assert_legend_fits(figure)
    assert figure.legends[0].get_texts()[-1].get_text().replace("\n", " ").startswith("letKD-2 (letkd.sites.")


def test_43_rows_look_different():
    points = draw(dots(43)).axes[0].collections
    assert len({(tuple(one.get_facecolor()[0]), one.get_paths()[0].vertices.tobytes()) for one in points}) == 43
    for epochs in (3, 240):
        curves = draw(lines(43, epochs)).axes[0].lines
        assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in curves}) == 43
    assert len(range(240)[:: curves[-1].get_markevery()]) <= 14, "marks on long lines are sparse"


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 7, 240])
def test_epochs_are_whole_numbers(epochs):
    for figure in (draw(lines(2, epochs)), draw_all([lines(2, epochs)], title="t")):
        axes = drawn(figure).axes[0]
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert len(ticks) >= min(2, epochs)
        assert all(float(tick).is_integer() for tick in ticks)
        labels = [label.get_text() for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        assert all("." not in label for label in labels)


def test_every_class_lies_inside_of_the_axes():
    axes = drawn(draw(dots(2))).axes[0]
    bottom, top = axes.get_ylim()
    assert (top, bottom) == (-0.5, 1.5)
