"""A table of text cells, as Markdown, LaTeX, CSV or HTML, or for a terminal."""

import csv
import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table


@dataclass(frozen=True)
class Cell:
    """A cell: `text`, small print `below` it, and whether it is bold (the best of its column)."""

    text: str
    below: str = ""
    bold: bool = False


@dataclass(frozen=True)
class Grid:
    """Rows under a head. The first column is text, the others are numbers.

    Args:
        title: what the table shows.
        notes: sentences under it.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default_factory=tuple)


def as_markdown(grid: Grid) -> str:
    lines = [[escape_markdown(name) for name in grid.head], ["---", *("---:" for _ in grid.head[1:])]]
    lines += [[_bold(cell, escape_markdown, "**", "**") for cell in row] for row in grid.rows]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"### {escape_markdown(grid.title)}\n\n{text}" + "".join(f"\n{paragraph_markdown(note)}\n" for note in grid.notes)


def as_latex(grid: Grid) -> str:
    """A `tabular` with the rules of booktabs."""
    lines = [" & ".join(_latex(name) for name in grid.head) + r" \\", r"\midrule"]
    lines += [" & ".join(_bold(cell, _latex, r"\textbf{", "}") for cell in row) + r" \\" for row in grid.rows]
    body = "\n".join([rf"\begin{{tabular}}{{l{'r' * (len(grid.head) - 1)}}}", r"\toprule", *lines, r"\bottomrule"])
    notes = "".join(f"% {_one_line(note)}\n" for note in grid.notes)
    return f"% {_one_line(grid.title)}; needs \\usepackage{{booktabs}}\n{body}\n\\end{{tabular}}\n{notes}"


def as_html(grid: Grid) -> str:
    """A table element that scrolls horizontally if it is wider than the page."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in grid.head)
    rows = "".join(
        "<tr>" + "".join(_html(cell, "th" if k == 0 else "td") for k, cell in enumerate(row)) + "</tr>" for row in grid.rows
    )
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in grid.notes)
    title = html.escape(grid.title)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(grid.title, quote=True)}"><table>'
        f"<caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{notes}"
    )


@dataclass(frozen=True)
class WholeTable:
    """A table for a terminal that cuts no word: its head wraps, then its cells; if this is not enough, lines exceed the console."""

    table: "Table"

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        columns, unlimited = self.table.columns, options.update(width=100_000)
        heads = [console.measure(column.header, options=unlimited) for column in columns]
        cells = [[console.measure(cell, options=unlimited) for cell in column.cells] for column in columns]
        # The longest text and the longest word of each column's head and cells, in characters.
        longest = [max((cell.maximum for cell in column), default=0) for column in cells]
        words = [max((cell.minimum for cell in column), default=0) for column in cells]
        frame = 3 * len(columns) + 1  # lines and padding
        room = options.max_width - frame
        whole = [max(head.maximum, text) for head, text in zip(heads, longest, strict=True)]
        widths = _narrowed(whole, [max(head.minimum, text) for head, text in zip(heads, longest, strict=True)], room)
        tight = _narrowed(widths, [max(head.minimum, word) for head, word in zip(heads, words, strict=True)], room)
        widths = tight if sum(tight) <= room else widths
        for column, width in zip(columns, widths, strict=True):
            column.width = width
        total = sum(widths) + frame
        console.width = max(console.width, total)  # the console crops lines to its width
        yield from console.render(self.table, options.update(width=total))


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """The widths, the widest reduced until their sum is `room` or none is above its least width."""
    widths = list(widths)
    while sum(widths) > room and (above := [k for k, width in enumerate(widths) if width > least[k]]):
        widths[max(above, key=lambda k: widths[k])] -= 1
    return widths


def as_rich(grid: Grid) -> WholeTable:
    """For a terminal."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(grid.title), title_justify="left", caption="\n".join(map(escape, grid.notes)) or None)
    table.caption_justify = "left"
    for k, name in enumerate(grid.head):
        table.add_column(escape(name), justify="right" if k else "left")
    for row in grid.rows:
        table.add_row(*(_bold(cell, escape, "[bold]", "[/bold]") for cell in row))
    return WholeTable(table)


def as_csv(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Plain values; None becomes empty. Text that a spreadsheet would read as a formula gets a leading quote."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([["" if value is None else _no_formula(value) for value in row] for row in rows])
    return out.getvalue()


def _no_formula(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r", "\n") else value


def _bold(cell: Cell, escape: Callable[[str], str], before: str, after: str) -> str:
    text = f"{before}{escape(cell.text)}{after}" if cell.bold else escape(cell.text)
    return f"{text} ({escape(cell.below)})" if cell.below else text


def _html(cell: Cell, tag: str) -> str:
    text = f"<strong>{html.escape(cell.text)}</strong>" if cell.bold else html.escape(cell.text)
    below = f"<small>{html.escape(cell.below)}</small>" if cell.below else ""
    return f'<th scope="row">{text}{below}</th>' if tag == "th" else f"<td>{text}{below}</td>"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def escape_markdown(text: str) -> str:
    """Text as Markdown shows it: no emphasis, links, formulae or HTML."""
    text = _one_line(text).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "\\|*_`[]$~#" else c for c in text)


def paragraph_markdown(text: str) -> str:
    """Text as a separate paragraph: its start is not read as a list, quotation or rule either."""
    return re.sub(r"^(\d*)([-+>]|[.)](?=\s))", r"\1\\\2", escape_markdown(text))


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
_LATEX |= {"Δ": r"$\Delta$", "→": r"$\to$", "x̂": r"$\hat{x}$", "−": "$-$", "×": r"$\times$", "≥": r"$\ge$", "≤": r"$\le$"}
_LATEX |= {"α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "λ": r"$\lambda$", "μ": r"$\mu$", "ν": r"$\nu$", "τ": r"$\tau$"}
_LATEX |= {"ω": r"$\omega$", "…": r"\ldots{}", "′": "$'$", "“": "``", "”": "''"}
_LATEX |= {"[": "{[}", "*": "{*}"}  # after \\ and rules they would start an option
_LATEX |= {c: f"\\{c}" for c in "&%$#_{}"}


def _latex(text: str) -> str:
    text = _one_line(text).replace("x̂", "\0")
    return "".join(_LATEX.get(c, c) for c in text).replace("\0", _LATEX["x̂"])
