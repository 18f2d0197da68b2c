"""Results as tables: mean ± std over seeds, n, the last epoch first and what was best on validation beside it, named so."""

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from letkd.report.grid import escape_markdown, paragraph_markdown
from letkd.runs.results import Row, mean_std

if TYPE_CHECKING:
    from rich.table import Table


COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row.title,
    "test %, last epoch": lambda row: mean_std([r.last_test for r in row.results]),
    "n": lambda row: str(len(row.results)),
    "test %, best on val.": lambda row: mean_std([r.best_val_test for r in row.results]),
    "parameters": lambda row: f"{row.results[0].parameters:,}" if row.results else "–",
    "time a run": lambda row: f"{statistics.mean(r.seconds for r in row.results):.0f} s" if row.results else "–",
}


def as_markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(escape_markdown(cell(row)) for cell in COLUMNS.values()) for row in rows]
    notes = [f"\n{paragraph_markdown(f'{row.title} {row.note}')}.\n" for row in rows if row.note]
    return "".join([f"| {line} |\n" for line in lines] + notes)


def as_rich(rows: Sequence[Row], title: str) -> "Table":
    """The table for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    for k, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if k else "left")
    for row in rows:
        table.add_row(*(escape(cell(row)) for cell in COLUMNS.values()))
    notes = [escape(f"{row.title} {row.note}") for row in rows if row.note]
    table.caption = "\n".join(notes) or None
    table.caption_justify = "left"
    return table
