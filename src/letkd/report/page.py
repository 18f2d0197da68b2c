"""The page: one HTML file that contains its style, script and data, and loads nothing from the network."""

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from letkd.report.charts import Chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ASSETS = Path(__file__).with_name("assets")


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading; `body` is HTML."""

    key: str
    title: str
    body: str


@dataclass
class ReportFiles:
    """Collects the page's data, and the files next to the page by name."""

    charts: list[dict[str, Any]] = field(default_factory=list)
    knowledge: list[dict[str, Any]] = field(default_factory=list)
    planes: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, "str | Figure"] = field(default_factory=dict)

    def chart(self, chart: Chart) -> str:
        """Add a chart; returns the HTML element that the page draws it into."""
        self.charts.append(chart.as_json())
        return f'<figure class="chart" data-chart="{len(self.charts) - 1}"></figure>'

    def data(self) -> dict[str, Any]:
        return {"charts": self.charts, "knowledge": _finite(self.knowledge), "planes": self.planes}


def _finite(value: Any) -> Any:
    """The value with NaN and infinity replaced by None, because JSON does not have them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def text(value: object) -> str:
    """A value as escaped HTML text."""
    return html.escape(str(value), quote=True)


def paragraph(value: str, kind: str = "") -> str:
    return f'<p class="{kind}">{text(value)}</p>' if kind else f"<p>{text(value)}</p>"


def chosen(label: str, parts: Mapping[str, str]) -> str:
    """Parts of which the page shows one at a time; all of them without JavaScript."""
    inside = "".join(f'<div data-name="{text(name)}">{body}</div>' for name, body in parts.items())
    return f'<div data-choose="{text(label)}">{inside}</div>'


def render(title: str, lead: str, sections: Sequence[Section], data: Mapping[str, Any], footer: str) -> str:
    """The whole page."""
    main = "\n".join(
        f'<section id="{text(part.key)}" aria-labelledby="{text(part.key)}-title"><h2 id="{text(part.key)}-title">'
        f"{text(part.title)}</h2>\n{part.body}</section>"
        for part in sections
    )
    slots = {
        "title": text(title),
        "lead": text(lead),
        "nav": "".join(f'<a href="#{text(part.key)}">{text(part.title)}</a>' for part in sections),
        "main": main,
        "footer": text(footer),
        "style": _asset("page.css"),
        "script": _asset("page.js"),
        # Only "<" could end the script element.
        "data": json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    # One pass, so that inserted text is not substituted again.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
