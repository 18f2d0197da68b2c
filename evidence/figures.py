"""The figures of docs/evidence.md, as SVG.

Each contains a digest of its data, so that it is checked without being drawn again: its bytes depend on the version of matplotlib.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

STYLE = {"svg.hashsalt": "letkd", "svg.fonttype": "none", "font.size": 9}


@dataclass(frozen=True)
class Point:
    """A row in a figure: mean test accuracy with half its 95 % interval, and minutes per run."""

    title: str
    minutes: float
    mean: float
    half: float | None


@dataclass(frozen=True)
class Line:
    """A line in a panel. Its points: value of a setting, mean accuracy, and standard deviation over seeds."""

    title: str
    points: list[tuple[float, float, float]]


def digest(found: Any) -> str:
    """Of a figure's data: points, or lines by panel."""
    return hashlib.sha256(json.dumps(found, default=asdict).encode()).hexdigest()


def accuracy_over_time(title: str, found: Sequence[Point]) -> bytes:
    """Accuracy over time per run. The labels form a column on the right, in the order of accuracy, so that none overlap."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        drawn = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = drawn.add_subplot()
        for point in found:
            axes.errorbar(
                point.minutes, point.mean, point.half or 0, fmt="o", ms=4, lw=1, capsize=2, color=_colour(point.title)
            )
        axes.margins(x=0.08, y=0.08)
        axes.set(title=title, xlabel="processor minutes per run", ylabel="test accuracy (%), mean and 95 % interval")
        axes.spines[["top", "right"]].set_visible(False)
        low, high = axes.get_ylim()
        ordered = sorted(found, key=lambda p: (p.mean, p.title))
        gap = (high - low) / max(len(ordered), 12)
        for y, point in zip(spread([p.mean for p in ordered], gap, low + gap / 2, high - gap / 2), ordered, strict=True):
            axes.annotate(
                point.title,
                (point.minutes, point.mean),
                (1.03, (y - low) / (high - low)),
                textcoords="axes fraction",
                va="center",
                arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "0.7", "shrinkB": 3, "relpos": (0, 0.5)},
            )
        return _svg(drawn, found)


def accuracy_over_settings(panels: Mapping[str, Sequence[Line]]) -> bytes:
    """Accuracy over one setting per panel, on one scale of accuracy; settings are on a logarithmic scale."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        drawn = Figure(figsize=(7.2, 2.6), layout="constrained")
        for axes, (setting, lines) in zip(drawn.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
            for line in lines:
                if line.points:
                    x, mean, std = zip(*line.points, strict=True)
                    axes.errorbar(x, mean, std, fmt="o-", ms=3, lw=1, capsize=2, color=_colour(line.title), label=line.title)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_xlabel(setting)
            axes.spines[["top", "right"]].set_visible(False)
            if len(lines) > 1:
                axes.legend(frameon=False, fontsize=8)
        drawn.supylabel("validation accuracy (%), mean ± std", fontsize=9)
        return _svg(drawn, panels)


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending values moved apart to a distance of at least `gap`, within `low` and `high` if there is room."""
    placed: list[float] = []
    for value in values:
        placed.append(max([value, low, *(last + gap for last in placed[-1:])]))
    limit = high
    for k in reversed(range(len(placed))):
        placed[k] = min(placed[k], limit)
        limit = placed[k] - gap
    return placed


def _colour(title: str) -> str:
    return "C1" if title.startswith("letKD") else "C0"


def _svg(drawn: Any, data: Any) -> bytes:
    out = io.BytesIO()
    drawn.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Description": f"data {digest(data)}"})
    return out.getvalue()
