"""Write `report.html` and its files from run folders."""

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
from letkd.report.opened import RunOpener
from letkd.report.page import ReportFiles, Section, paragraph, render, text
from letkd.report.pair_tables import by_pair
from letkd.report.search_section import INTRODUCTION, search_section
from letkd.runs.grid import Cell, Grid, as_html
from letkd.runs.results import mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTRODUCTIONS = {
    "curves": "Mean over seeds; the band shows minimum and maximum. The values are those of each line's last epoch; hover over a curve, "
    "tap it or use the arrow keys to read those of another epoch. Click a name to hide its line.",
    "health": "Measured at the end of each epoch on the same training images, without augmentation. A template is used if it is the best "
    "match of at least one pixel, and dead if it is zero after BN-ReLU everywhere; a pixel discards all if every template is zero "
    "there, so that x̂ = x.",
    "knowledge": "Hover over a location, tap it or move with the arrow keys. Locations are coloured by the teacher's label; next to the "
    "image are the teacher's labels p_T, the student's prediction p_S, and what the student's layer keeps of it.",
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
    """Write `out/report.html`, and tables and figures into `out/report/`; returns the path of the page.

    Args:
        paths: run folders, or folders that contain runs.
        features: projection of the features to two dimensions.
        root: folder of the data set's files; default: the one in the recipes.
        trust: also build custom networks, which runs the code that the recipes name.
        against: title, method or folder of the row to compare with; default: the first student of each pair.
    """
    out = Path(out)
    folder = must_be_utf8(out) / "report"
    refuse_link(folder)
    opener, files = RunOpener(root=root, trust=trust), ReportFiles()
    groups = find_groups(paths, tell=opener.note)
    if against is not None and not any(group.results and against in group.names for group in groups):
        rows = nearest(against, {name for group in groups if group.results for name in group.names})
        raise RunError(f"`against={against}` is not a row of these runs; nearest: {rows}")
    pairs = by_pair(groups)
    found = [Section("results", "Results", parts.results(files, groups, opener, against))]
    builders: dict[tuple[str, str], Callable[[str, list[Group]], str]] = {
        ("curves", "Curves"): lambda pair, rows: parts.curve_charts(files, pair, rows),
        ("health", "Health of the KD layers"): lambda pair, rows: parts.health_of(files, pair, rows),
        ("knowledge", "Transferred knowledge"): lambda pair, rows: parts.knowledge_of(files, pair, rows, opener),
        ("classes", "Class by class"): lambda pair, rows: parts.classes_of(files, pair, rows, opener),
        ("features", "Features"): lambda pair, rows: parts.features_of(files, pair, rows, opener, features),
    }
    with bar("writing the report", len(builders) * len(pairs)) as tick:
        for (key, title), build in builders.items():
            body = ""
            for pair, same_pair in pairs.items():
                tick(f"{title.lower()} of {pair}")
                if one := build(pair, same_pair):
                    body += (f"<h3>{text(pair)}</h3>" if len(pairs) > 1 else "") + one
            if body:
                found.append(Section(key, title, (paragraph(INTRODUCTIONS[key]) if key in INTRODUCTIONS else "") + body))
    if body := search_section(files, paths, opener):
        found.insert(1, Section("search", "Search", paragraph(INTRODUCTION) + body))
    found.append(Section("made", "About this report", _runs(groups, opener, out)))
    for swept in (out, folder):
        sweep(swept)
    for name, content in files.files.items():
        write_file(folder / _file_name(name), content)
    page = render(_title(pairs), _lead(groups, pairs), found, files.data(), f"Written by letkd {__version__}.")
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
    finished = f"{done} finished run{'s' if done != 1 else ''}" + (f" of {runs}" if runs > done else "")
    return (
        f"{finished} in {rows}. Accuracy is that of the last epoch on the test split; the accuracy of the best validation epoch has its "
        "own column."
    )


def _runs(groups: Sequence[Group], opener: RunOpener, out: Path) -> str:
    rows = []
    for group in groups:
        for run in group.runs:
            recipe, result = run.recipe, run.result
            folder = os.path.relpath(run.path, out)
            cells = [group.title, folder, str(recipe.train.seed), str(recipe.train.epochs)]
            rows.append([Cell(one) for one in [*cells, mean_std([result.last_test if result else None])]])
    body = as_html(Grid("Runs", ["method", "folder", "seed", "epochs", "test %, last epoch"], rows))
    body += "".join(paragraph(f"{sentence}.", "note") for sentence in opener.missing)
    return body + paragraph("Tables and figures for papers are in the folder report next to this page.", "note")


def _file_name(name: str, most: int = 100) -> str:
    """A plain file name; if it is too long for a file system, it is truncated and made unique by a digest."""
    plain = re.sub(r"[^\w.-]", "-", name)
    if len(plain.encode()) <= most:
        return plain
    ending = plain[plain.rindex(".") :] if plain.endswith((".csv", ".md", ".tex")) else ""
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{plain.encode()[:most].decode(errors='ignore')}-{digest}{ending}"


def write_file(path: Path, content: "str | Figure") -> None:
    """Write a text as it is, and a figure as PNG and SVG with deterministic content."""
    if isinstance(content, str):
        write_whole(path, content.encode(errors="backslashreplace"))
        return
    from matplotlib import rc_context
    from matplotlib.text import Text

    # Names of classes and methods are text, never mathtext, both in existing labels and in ticks added by drawing.
    for label in content.findobj(Text):
        label.set_parse_math(False)
    with rc_context({"svg.hashsalt": "letkd", "text.parse_math": False}):
        for kind, facts in (("png", {}), ("svg", {"Date": None})):
            out = io.BytesIO()
            content.savefig(out, format=kind, dpi=160, metadata=facts)
            write_whole(path.with_name(f"{path.name}.{kind}"), out.getvalue())
            content.set_layout_engine("none")  # the layout of the first format is used for both
