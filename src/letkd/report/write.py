"""`report.html` and the files beside it, from run folders."""

import hashlib
import io
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from letkd import __version__
from letkd.errors import RunError, nearest
from letkd.files import must_be_utf8, refuse_link, sweep, write_whole
from letkd.progress import bar
from letkd.report import sections as parts
from letkd.report.collect import Group, find_groups
from letkd.report.features import Way
from letkd.report.opened import Opened
from letkd.report.page import Book, Section, paragraph, render, text
from letkd.report.pair_tables import by_pair
from letkd.report.search import INTRODUCTION, search_section
from letkd.runs.grid import Cell, Grid, as_html
from letkd.runs.results import mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTRODUCTIONS = {
    "curves": "Mean over seeds; a band runs from the least to the greatest. Point at a curve, tap it or use the arrow keys to read its "
    "values; press a name to hide its line.",
    "health": "Measured at the end of each epoch on the same training images, not augmented. A template is used if it is the best match "
    "of some pixel, and dead if BN-ReLU lets it through nowhere; a pixel discards all if no template passes, so that x̂ = x.",
    "knowledge": "Point at a location, tap it or move with the arrow keys. Each has the colour of the label that the teacher gives it; "
    "beside the picture stand the teacher's labels p_T, the student's prediction p_S, and what the student keeps of it.",
}


def write_report(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    features: Way = "pca",
    root: Path | None = None,
    trust: bool = False,
    against: str | None = None,
) -> Path:
    """Write `out/report.html`, and tables and figures into `out/report/`; gives the page's path.

    Args:
        paths: run folders, or folders with runs below.
        features: how features are laid in the plane.
        root: folder of the data set's files, where it is not the one that the recipes name.
        trust: build networks of the user's own, too, which runs the code that the recipes name.
        against: title or method of the row that the others are compared with; the first student of each pair if omitted.
    """
    out = Path(out)
    files = must_be_utf8(out) / "report"
    refuse_link(files)
    opened, book = Opened(root=root, trust=trust), Book()
    groups = find_groups(paths, tell=opened.note)
    if against is not None and not any(against in (group.title, group.method) for group in groups):
        rows = nearest(against, {name for group in groups for name in (group.title, group.method) if name})
        raise RunError(f"`against={against}` is no row of these runs; nearest: {rows}")
    pairs = by_pair(groups)
    found = [Section("results", "Results", parts.results(book, groups, opened, against))]
    builders: dict[tuple[str, str], Callable[[str, list[Group]], str]] = {
        ("curves", "Curves"): lambda pair, held: parts.curve_charts(book, pair, held),
        ("health", "Health of the KD layers"): lambda pair, held: parts.health_of(book, pair, held),
        ("knowledge", "Transferred knowledge"): lambda pair, held: parts.knowledge_of(book, pair, held, opened),
        ("classes", "Class by class"): lambda pair, held: parts.classes_of(book, pair, held, opened),
        ("features", "Features"): lambda pair, held: parts.features_of(book, pair, held, opened, features),
    }
    with bar("writing the report", len(builders) * len(pairs)) as tick:
        for (key, title), build in builders.items():
            body = ""
            for pair, held in pairs.items():
                tick(f"{title.lower()} of {pair}")
                if one := build(pair, held):
                    body += (f"<h3>{text(pair)}</h3>" if len(pairs) > 1 else "") + one
            if body:
                found.append(Section(key, title, (paragraph(INTRODUCTIONS[key]) if key in INTRODUCTIONS else "") + body))
    if body := search_section(book, paths, opened):
        found.insert(1, Section("search", "Search", paragraph(INTRODUCTION) + body))
    found.append(Section("made", "How it was made", _made(groups, opened, out)))
    for folder in (out, files):
        sweep(folder)
    for name, content in book.files.items():
        write_file(files / _file_name(name), content)
    page = render(_title(pairs), _lead(groups, pairs), found, book.data(), f"Written by letkd {__version__}.")
    write_whole(out / "report.html", page.encode(errors="backslashreplace"))
    return out / "report.html"


def _title(pairs: dict[str, list[Group]]) -> str:
    if len(pairs) > 1:
        return f"{len(pairs)} pairs: {', '.join(pairs)}"
    ((pair, groups),) = pairs.items()
    recipe = next((group.runs[0].recipe for group in groups if group.runs and group.method != "teacher"), None)
    if recipe is None or recipe.teacher is None:
        return pair
    return f"{pair}: {recipe.teacher.model} → {recipe.student.model}"


def _lead(groups: Sequence[Group], pairs: dict[str, list[Group]]) -> str:
    done, runs = sum(len(group.results) for group in groups), sum(len(group.runs) for group in groups)
    rows = f"{len(groups)} rows" if len(groups) > 1 else "one row"
    some = f"{done} finished run{'s' if done != 1 else ''}" + (f" of {runs}" if runs > done else "")
    return (
        f"{some} in {rows}. Accuracy is that of the last epoch on the test split; what was best on the validation split stands "
        "beside it, named so."
    )


def _made(groups: Sequence[Group], opened: Opened, out: Path) -> str:
    rows = []
    for group in groups:
        for run in group.runs:
            recipe, result = run.recipe, run.result
            where = os.path.relpath(run.path, out)
            cells = [group.title, where, str(recipe.train.seed), str(recipe.train.epochs)]
            rows.append([Cell(one) for one in [*cells, mean_std([result.last_test if result else None])]])
    body = as_html(Grid("Runs", ["method", "folder", "seed", "epochs", "test %, last epoch"], rows))
    body += "".join(paragraph(f"{sentence}.", "note") for sentence in opened.missing)
    return body + paragraph("Tables and figures for papers are in the folder report beside this page.", "note")


def _file_name(name: str, most: int = 100) -> str:
    """A plain file name, cut where it is too long for a file system; a digest then keeps it apart from others."""
    plain = re.sub(r"[^\w.-]", "-", name)
    if len(plain.encode()) <= most:
        return plain
    ending = plain[plain.rindex(".") :] if plain.endswith((".csv", ".md", ".tex")) else ""
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{plain.encode()[:most].decode(errors='ignore')}-{digest}{ending}"


def write_file(path: Path, content: "str | Figure") -> None:
    """A text as it is; a figure as PNG and SVG, the same each time."""
    if isinstance(content, str):
        write_whole(path, content.encode(errors="backslashreplace"))
        return
    from matplotlib import rc_context
    from matplotlib.text import Text

    # Names of classes and methods are text, never mathtext: both for what is there and for the ticks that drawing adds.
    for label in content.findobj(Text):
        label.set_parse_math(False)
    with rc_context({"svg.hashsalt": "letkd", "text.parse_math": False}):
        for kind, facts in (("png", {}), ("svg", {"Date": None})):
            out = io.BytesIO()
            content.savefig(out, format=kind, dpi=160, metadata=facts)
            write_whole(path.with_name(f"{path.name}.{kind}"), out.getvalue())
            content.set_layout_engine("none")  # once laid out, it is for both
