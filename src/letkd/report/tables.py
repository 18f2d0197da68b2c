"""Results as tables: mean ± std over seeds, n, the last epoch first and what was best on validation beside it, named so."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from letkd.train.runs import Result


@dataclass(frozen=True)
class Row:
    """One method and its finished runs; where there are none, a note says why."""

    title: str
    results: "Sequence[Result]"
    note: str = ""


def mean_std(values: Sequence[float | None]) -> str:
    """`mean ± std` (the sample's, n − 1) with two digits; a lone value has no std; a dash where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    if len(known) == 1:
        return f"{known[0]:.2f}"
    return f"{statistics.mean(known):.2f} ± {statistics.stdev(known):.2f}"


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
    lines += [" | ".join(cell(row) for cell in COLUMNS.values()) for row in rows]
    notes = [f"\n{row.title} {row.note}.\n" for row in rows if row.note]
    return "".join([f"| {line} |\n" for line in lines] + notes)


def as_rich(rows: Sequence[Row], title: str) -> "Table":
    """The table for a terminal."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for k, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if k else "left")
    for row in rows:
        table.add_row(*(cell(row) for cell in COLUMNS.values()))
    notes = [f"{row.title} {row.note}" for row in rows if row.note]
    table.caption = "\n".join(notes) or None
    table.caption_justify = "left"
    return table
