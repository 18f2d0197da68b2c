"""Legends outside of the axes, in figures that grow with them."""

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

Place = Literal["outside right upper", "outside lower center"]
CHARACTERS = 40  # per line of a name
MOST_COLUMNS = 6
MARGIN = 0.2  # inches


def add_legend(figure: "Figure", handles: Mapping[str, Any], *, font_size: float = 8) -> None:
    """Add a legend: at the right if it leaves two thirds of the width, otherwise below, and the figure then becomes higher.

    Args:
        handles: artists by name.
    """
    width, height = figure.get_size_inches()
    legend = _legend(figure, handles, "outside right upper", 1, font_size)
    w, h = _inches(legend)
    if w <= width / 3 and h <= height - MARGIN:
        return
    for columns in range(min(MOST_COLUMNS, len(handles)), 0, -1):
        legend.remove()
        legend = _legend(figure, handles, "outside lower center", columns, font_size)
        w, h = _inches(legend)
        if w <= width - MARGIN:
            break
    figure.set_size_inches(max(width, w + MARGIN), height + h + MARGIN)


def _legend(figure: "Figure", handles: Mapping[str, Any], place: Place, columns: int, font_size: float) -> "Legend":
    names = [textwrap.fill(name, CHARACTERS) for name in handles]
    legend = figure.legend(
        list(handles.values()), names, loc=place, ncols=columns, fontsize=font_size, frameon=False, handlelength=2.6
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return legend


def _inches(legend: "Legend") -> tuple[float, float]:
    box = legend.get_window_extent()
    dpi = legend.figure.dpi
    return box.width / dpi, box.height / dpi
