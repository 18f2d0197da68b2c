"""Charts as data, drawn by matplotlib into files and by the page's script."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Eight colours that colour-blind readers can distinguish (Okabe and Ito), with a darker yellow; the page uses the same.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#5b4fc7", "#6b6b6b")


@dataclass(frozen=True)
class Series:
    """A named series of values over x. `low` and `high` bound an optional band; None is a gap.

    Args:
        colour: index of the colour, so that a method has the same colour in every chart.
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
    """The chart as a matplotlib figure."""
    if chart.kind == "dots":
        return _dots(chart)
    figure = new_figure()
    axes = figure.subplots()
    _lines(axes, chart)
    _label(axes, chart)
    return figure


def _lines(axes: "Axes", chart: Chart) -> None:
    tidy(axes)
    for series in chart.series:
        colour, style = COLOURS[series.colour % len(COLOURS)], ("-", "--", ":")[series.colour // len(COLOURS) % 3]
        y = _gaps(series.y)
        marker = "." if len(y) < 25 or _has_lone_points(series.y) else ""
        axes.plot(chart.x, y, style, color=colour, linewidth=1.5, label=series.name, marker=marker)
        if series.low is not None and series.high is not None:
            axes.fill_between(chart.x, _gaps(series.low), _gaps(series.high), color=colour, alpha=0.15, linewidth=0)
    if chart.log_y:
        from matplotlib.ticker import LogFormatter

        axes.set_yscale("log")
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(LogFormatter())  # the default writes powers of ten in mathtext


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _has_lone_points(values: Sequence[float | None]) -> bool:
    """Whether a value has gaps on both sides, so that no line shows it."""
    padded = [None, *values, None]
    return any(padded[i] is padded[i + 2] is None and value is not None for i, value in enumerate(values))


def _dots(chart: Chart) -> "Figure":
    figure = new_figure(6.4, 0.9 + 0.26 * len(chart.x))
    axes = figure.subplots()
    tidy(axes)
    rows = list(range(len(chart.x)))
    for series in chart.series:
        points = [(value, row) for value, row in zip(series.y, rows, strict=True) if value is not None]
        axes.scatter(
            [x for x, _ in points], [y for _, y in points], s=26, color=COLOURS[series.colour % len(COLOURS)], label=series.name
        )
    axes.set_yticks(rows, [str(name) for name in chart.x])
    axes.invert_yaxis()
    _label(axes, chart)
    return figure


def _label(axes: "Axes", chart: Chart) -> None:
    axes.set_title(chart.title, fontsize=10, loc="left")
    axes.set_xlabel(chart.x_label if chart.kind == "lines" else chart.y_label, fontsize=9)
    axes.set_ylabel(chart.y_label if chart.kind == "lines" else chart.x_label, fontsize=9)
    if len(chart.series) > 1:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_all(charts: Sequence[Chart], *, title: str, columns: int = 3) -> "Figure":
    """Several line charts in one figure."""
    rows = -(-len(charts) // columns)
    figure = new_figure(4.2 * min(columns, len(charts)), 2.9 * rows)
    panels = figure.subplots(rows, min(columns, len(charts)), squeeze=False).flatten()
    for axes, chart in zip(panels, charts, strict=False):
        _lines(axes, chart)
        axes.set_title(chart.title, fontsize=9, loc="left")
        axes.set_xlabel(chart.x_label, fontsize=8)
        if len(chart.series) > 1:
            axes.legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    for axes in panels[len(charts) :]:
        axes.set_axis_off()
    return figure
