"""Results as tables: mean ± std over seeds, for the last epoch and for the best validation epoch."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from letkd.progress import plain
from letkd.report.paired import NOTE, head, paired_difference
from letkd.runs.grid import WholeTable, escape_markdown, paragraph_markdown
from letkd.runs.records import Result
from letkd.runs.results import Row, mean_std

COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row.title,
    "test %, last epoch": lambda row: mean_std([r.last_test for r in row.results]),
    "n": lambda row: str(len(row.results)),
    "test %, best validation epoch": lambda row: mean_std([r.best_val_test for r in row.results]),
    "parameters": lambda row: f"{row.results[0].parameters:,}" if row.results else "–",
    "time per run": lambda row: f"{statistics.mean(r.seconds for r in row.results):.0f} s" if row.results else "–",
}


def _columns(rows: Sequence[Row], against: str | None) -> dict[str, Callable[[Row], str]]:
    """All columns; if `against` names a row, also the difference from that row."""
    averaged = any(result.ema_test is not None for row in rows for result in row.results)
    ema = {"test %, EMA": lambda row: mean_std([r.ema_test for r in row.results])} if averaged else {}
    reference = next((row for row in rows if against is not None and row.name == against), None)
    if reference is None or len(rows) < 2:
        return {**COLUMNS, **ema}
    other = reference

    def difference(row: Row) -> str:
        return "–" if row is other else str(paired_difference(row.by_seed(), other.by_seed()) or "–")

    columns: dict[str, Callable[[Row], str]] = {}
    for name, cell in {**COLUMNS, **ema}.items():
        columns[name] = cell
        if name == "n":
            columns[head(other.title)] = difference
    return columns


def _notes(rows: Sequence[Row], columns: Mapping[str, object]) -> list[str]:
    notes = [f"{row.title} {row.note}." for row in rows if row.note]
    return [*notes, NOTE] if any(head(row.title) in columns for row in rows) else notes


def without_labels(results: Sequence[Result]) -> list[str]:
    """Text lines with results other than accuracy: loss terms on held-out images, and probes of the features."""
    lines = []
    for name in dict.fromkeys(name for result in results for name in result.held_out):
        values = [result.held_out[name] for result in results if name in result.held_out]
        lines.append(f"{name} on held-out images: {statistics.mean(values):.4f}{_deviation(values, 4)}")
    for name in dict.fromkeys(name for result in results for name in result.probe):
        values = [result.probe[name] for result in results if name in result.probe]
        lines.append(f"{name} probe: {statistics.mean(values):.2f}{_deviation(values, 2)} %")
    return lines


def _deviation(values: Sequence[float], digits: int) -> str:
    return f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""


def as_markdown(rows: Sequence[Row], against: str | None = None) -> str:
    """The table as Markdown.

    Args:
        against: name of the row to compare the other rows with, seed by seed.
    """
    columns = _columns(rows, against)
    lines = [" | ".join(map(escape_markdown, columns)), " | ".join("---" for _ in columns)]
    lines += [" | ".join(escape_markdown(cell(row)) for cell in columns.values()) for row in rows]
    notes = [f"\n{paragraph_markdown(note)}\n" for note in _notes(rows, columns)]
    return "".join([f"| {line} |\n" for line in lines] + notes)


def as_rich(rows: Sequence[Row], title: str, against: str | None = None) -> WholeTable:
    """The table for `letkd.progress.show`; `against` as for `as_markdown`."""
    from rich.table import Table
    from rich.text import Text

    columns = _columns(rows, against)
    table = Table(title=title, title_justify="left")
    for k, name in enumerate(columns):
        table.add_column(name, justify="right" if k else "left")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    table.caption = Text("\n".join(plain(note) for note in _notes(rows, columns)))
    table.caption_justify = "left"
    return WholeTable(table)
