"""Charts as data, drawn by matplotlib into files and by the page's script."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from letkd.report.legends import add_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Eight colours that colour-blind readers can distinguish (Okabe and Ito), with a darker yellow; the page uses the same.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#5b4fc7", "#6b6b6b")
# Marks and dashes of the next eight series, and so on: 64 kinds of points, 192 kinds of lines.
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", ":")
FEW = 25  # points of a line that are all marked
PANEL = (4.2, 2.9)  # inches


@dataclass(frozen=True)
class Series:
    """A named series of values over x. `low` and `high` bound an optional band; None is a gap.

    Args:
        colour: index of the colour and of the mark, so that a method looks the same in every chart.
    """

    name: str
    y: Sequence[float | None]
    colour: int = 0
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclass(frozen=True)
class Chart:
    """Lines over x, or points per name in x.

    Args:
        key: name for files.
        x: numbers or names.
        log_y: logarithmic y axis.
        digits: decimal places shown on the page.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    x: Sequence[float] | Sequence[str]
    series: Sequence[Series]
    kind: Literal["lines", "dots"] = "lines"
    log_y: bool = False
    digits: int = 2
    note: str = ""
    group: str = ""

    def as_json(self) -> dict[str, Any]:
        """The chart for the page, with six significant digits."""
        return _rounded(asdict(self))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None  # JSON has no NaN; shown as a gap
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def new_figure(width: float = 6.4, height: float = 3.6) -> "Figure":
    """An empty figure without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: "Axes") -> None:
    """Remove the box around the axes and add faint horizontal lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def draw(chart: Chart) -> "Figure":
    """The chart as a matplotlib figure, as high as its rows and its legend need."""
    figure = new_figure() if chart.kind == "lines" else new_figure(6.4, 0.9 + 0.26 * len(chart.x))
    axes = figure.subplots()
    handles = _lines(axes, chart) if chart.kind == "lines" else _dots(axes, chart)
    across, up = (chart.x_label, chart.y_label) if chart.kind == "lines" else (chart.y_label, chart.x_label)
    axes.set_title(chart.title, fontsize=10, loc="left")
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(up, fontsize=9)
    if len(handles) > 1:
        add_legend(figure, handles)
    return figure


def _lines(axes: "Axes", chart: Chart) -> dict[str, Any]:
    """Draw the lines; returns them by name."""
    tidy(axes)
    drawn = {}
    for series in chart.series:
        colour, level = COLOURS[series.colour % len(COLOURS)], series.colour // len(COLOURS)
        y = _gaps(series.y)
        all_marked = len(y) < FEW or _has_lone_points(series.y)
        (drawn[series.name],) = axes.plot(
            chart.x,
            y,
            DASHES[level % len(DASHES)],
            color=colour,
            linewidth=1.5,
            marker=MARKS[level % len(MARKS)] if all_marked or level else "",
            markersize=3.5,
            markevery=1 if all_marked else len(y) // 12,
        )
        if series.low is not None and series.high is not None:
            axes.fill_between(chart.x, _gaps(series.low), _gaps(series.high), color=colour, alpha=0.15, linewidth=0)
    if len(chart.x) == 1:
        axes.set_xticks(list(chart.x))
    elif all(float(x).is_integer() for x in chart.x):
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    if chart.log_y:
        from matplotlib.ticker import LogFormatter

        axes.set_yscale("log")
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(LogFormatter())  # the default writes powers of ten in mathtext
    return drawn


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _has_lone_points(values: Sequence[float | None]) -> bool:
    """Whether a value has gaps on both sides, so that no line shows it."""
    padded = [None, *values, None]
    return any(padded[i] is padded[i + 2] is None and value is not None for i, value in enumerate(values))


def _dots(axes: "Axes", chart: Chart) -> dict[str, Any]:
    """Draw the points, one row per name; returns them by name of the series."""
    tidy(axes)
    rows = list(range(len(chart.x)))
    drawn = {}
    for series in chart.series:
        points = [(value, row) for value, row in zip(series.y, rows, strict=True) if value is not None]
        drawn[series.name] = axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            s=26,
            color=COLOURS[series.colour % len(COLOURS)],
            marker=MARKS[series.colour // len(COLOURS) % len(MARKS)],
        )
    axes.set_yticks(rows, [str(name) for name in chart.x])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    return drawn


def draw_all(charts: Sequence[Chart], *, title: str, columns: int = 3) -> "Figure":
    """Several line charts in one figure, with one legend if a name looks the same in all of them, otherwise with one legend each."""
    columns, rows = min(columns, len(charts)), -(-len(charts) // columns)
    looks = {(series.name, series.colour) for chart in charts for series in chart.series}
    shared = len({name for name, _ in looks}) == len({colour for _, colour in looks}) == len(looks)
    figure = new_figure(PANEL[0] * columns, PANEL[1] * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    handles = {}
    for axes, chart in zip(panels, charts, strict=False):
        drawn = _lines(axes, chart)
        handles |= drawn
        axes.set_title(chart.title, fontsize=9, loc="left")
        axes.set_xlabel(chart.x_label, fontsize=8)
        if len(drawn) > 1 and not shared:
            axes.legend(list(drawn.values()), list(drawn), fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    for axes in panels[len(charts) :]:
        axes.set_axis_off()
    if len(handles) > 1 and shared:
        add_legend(figure, handles)
    return figure
