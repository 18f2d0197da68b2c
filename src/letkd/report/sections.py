"""The sections of a report, each from the groups of a pair: HTML for the page, figures and tables for the files beside it."""

import json
from collections.abc import Sequence

from letkd.report.charts import Chart, draw, draw_all
from letkd.report.classes import Confusion, class_chart, confusion_matrix, confusions, per_class
from letkd.report.collect import Group, Run
from letkd.report.curves import curves, health_charts, training
from letkd.report.features import (
    Way,
    answer,
    as_rgba_png,
    correlation_difference,
    draw_differences,
    draw_planes,
    in_the_plane,
)
from letkd.report.knowledge import knowledge
from letkd.report.knowledge_pictures import as_json, draw_knowledge
from letkd.report.opened import Opened, batch_of, some
from letkd.report.page import Book, chosen, paragraph, text
from letkd.report.pair_tables import HEAD, by_pair, detail, matrix, plain
from letkd.runs.grid import Cell, Grid, as_csv, as_html, as_latex, as_markdown

FEATURE_IMAGES = 300


def slug(pair: str) -> str:
    return pair.replace("/", "-")


def finished(groups: Sequence[Group]) -> list[tuple[Group, Run]]:
    """The groups with a finished run, and the first one of each."""
    return [(group, next(run for run in group.runs if run.result is not None)) for group in groups if group.results]


def results(book: Book, groups: Sequence[Group], opened: Opened, against: str | None = None) -> str:
    """The tables, here and as Markdown, LaTeX and CSV; `against` as for `detail`."""
    macs = {
        group.key: opened.attempt(f"MACs of {group.title}", lambda run=run: opened.macs(run)) for group, run in finished(groups)
    }
    pairs = by_pair(groups)
    grids = [matrix(groups)] if len(pairs) > 1 else []
    grids += [detail(pair, held, macs, against=against) for pair, held in pairs.items()]
    book.files["table.md"] = "\n".join(as_markdown(grid) for grid in grids)
    book.files["table.tex"] = "\n".join(as_latex(grid) for grid in grids)
    book.files["table.csv"] = as_csv(HEAD, plain(groups, macs, against=against))
    return "".join(as_html(grid) for grid in grids)


def curve_charts(book: Book, pair: str, groups: Sequence[Group]) -> str:
    """Accuracy, losses and learning rate."""
    charts = curves(pair, groups)
    if not charts:
        return paragraph("No run has finished an epoch yet.")
    losses = [chart for chart in charts if chart.key.startswith("loss-")]
    shared = [chart for chart in charts if chart not in losses]
    for chart in shared:
        book.files[f"{slug(pair)}-{chart.key}"] = draw(chart)
    book.files[f"{slug(pair)}-losses"] = draw_all(losses, title=pair)
    one = chosen("Loss of", {chart.title.removeprefix("Loss: "): book.chart(chart) for chart in losses})
    how = training(groups)
    table = "" if how is None else as_html(how)
    return f'{table}<div class="charts">{"".join(map(book.chart, shared))}<div>{one}</div></div>'


def health_of(book: Book, pair: str, groups: Sequence[Group]) -> str:
    """The KD layers by epoch."""
    charts = health_charts(pair, groups)
    sites: dict[str, list[Chart]] = {}
    for chart in charts:
        sites.setdefault(chart.key.removeprefix("health-").rpartition("-")[0], []).append(chart)
    body = ""
    for site, held in sites.items():
        book.files[f"{slug(pair)}-health-{site}"] = draw_all(held, title=site)
        body += f'<h3>{text(site)}</h3><div class="charts small">{"".join(map(book.chart, held))}</div>'
    return body


def classes_of(book: Book, pair: str, groups: Sequence[Group], opened: Opened) -> str:
    """Accuracy by class, and the confusions that teaching fixed."""
    matrices, names = {}, ()
    for group, first in finished(groups):
        what = f"classes of {group.title}"
        found = [opened.attempt(what, lambda run=run: opened.predictions(run)) for run in group.runs if run.result is not None]
        held = opened.attempt(what, lambda first=first: opened.classes(first))
        known = [one for one in found if one is not None]
        if known and held is not None:
            names = held
            matrices[group.title] = confusion_matrix(known, len(held))
    if not matrices:
        return ""
    chart = class_chart(pair, matrices, names, {group.title: k for k, group in enumerate(groups)})
    book.files[f"{slug(pair)}-classes"] = draw(chart)
    rows = [[name, *(per_class(one)[c] for one in matrices.values())] for c, name in enumerate(names)]
    book.files[f"{slug(pair)}-classes.csv"] = as_csv(["class", *matrices], rows)
    body = f'<div class="charts"><div>{book.chart(chart)}</div><div>'
    alone = next((group.title for group in groups if group.method == "ce"), None)
    if alone is not None and alone in matrices:
        taught = [group.title for group in groups if group.title in matrices and group.method not in ("ce", "teacher")]
        lists = {title: confusions(matrices[alone], matrices[title], names) for title in taught}
        body += "<h3>Confusions that teaching fixed</h3>" if lists else ""
        body += chosen("Taught by", {title: as_html(_confusion_grid(alone, title, held)) for title, held in lists.items()})
        every = [[title, one.true, one.taken, one.alone, one.taught] for title, held in lists.items() for one in held]
        book.files[f"{slug(pair)}-confusions.csv"] = as_csv(["method", "class", "taken for", "student alone", "taught"], every)
    return f"{body}</div></div>"


def _confusion_grid(alone: str, title: str, found: Sequence[Confusion], *, most: int = 10, worst: int = 3) -> Grid:
    shown = [one for one in found[:most] if one.fixed > 0]
    shown += [one for one in found[-worst:] if one.fixed < 0]
    rows = []
    for one in shown:
        change = f"{-one.fixed:+.1f}".replace("-", "−")
        rows.append(
            [Cell(f"{one.true} taken for {one.taken}"), *(Cell(v) for v in (f"{one.alone:.1f}", f"{one.taught:.1f}", change))]
        )
    note = "Test images, mean over seeds; the confusions that fell most, then those that grew most."
    return Grid(f"{alone} alone against {title}", ["confusion", "alone", "taught", "change"], rows, [note])


def knowledge_of(book: Book, pair: str, groups: Sequence[Group], opened: Opened) -> str:
    """Pictures whose locations tell what the teacher says there and what the student does with it."""
    parts = {}
    for group, run in finished(groups):
        tables = json.dumps(run.recipe.methods)
        if '"sites"' not in tables:
            continue
        found = opened.attempt(
            f"transferred knowledge of {group.title}", lambda run=run: knowledge(opened.distiller(run), opened.tested(run))
        )
        # The page shows the last one first: the sub-classes of the paper's figure, where there are any.
        for one in sorted(found or (), key=lambda one: one.per_class is not None):
            book.files[f"{group.key}-knowledge-{one.site}"] = draw_knowledge(one)
            book.knowledge.append(as_json(one, group.title))
            templates = book.knowledge[-1]["templates"]
            strips = "".join(
                f"<figure><figcaption>{text(item['name'])} · {100 * item['share']:.1f} % of pixels</figcaption>"
                + "".join(f'<img src="{text(png)}" alt="">' for png in item["png"])
                + "</figure>"
                for item in templates
            )
            nearest = "<h3>Training patches nearest to the most frequent templates</h3>"
            body = f'<div data-knowledge="{len(book.knowledge) - 1}">{nearest}<div class="patches">{strips}</div></div>'
            parts[f"{group.title}, {one.site}"] = body
    return chosen("What passes in", parts) if parts else ""


def features_of(book: Book, pair: str, groups: Sequence[Group], opened: Opened, way: Way) -> str:
    """Teacher and students side by side: features in the plane, and differences of the logits' correlations."""
    students = [(group, run) for group, run in finished(groups) if group.method != "teacher"]
    if not students:
        return ""
    data = opened.attempt("features", lambda: opened.tested(students[0][1]))
    if data is None:
        return ""
    batch, _ = batch_of(data, data.test, some(data.test.labels, FEATURE_IMAGES))
    answers = {}
    taught = next((run for _, run in students if run.recipe.methods), None)
    if taught is not None:
        answers["Teacher"] = opened.attempt("features of the teacher", lambda: answer(opened.teacher(taught), batch))
    for group, run in students:
        answers[group.title] = opened.attempt(f"features of {group.title}", lambda run=run: answer(opened.student(run), batch))
    known = {title: one for title, one in answers.items() if one is not None}
    planes = {title: in_the_plane(one.pooled, way) for title, one in known.items()}
    if not planes:
        return ""
    book.files[f"{slug(pair)}-features"] = draw_planes(planes, batch.y, data.classes)
    panels = [{"title": title, "at": [[round(float(v), 3) for v in point] for point in at]} for title, at in planes.items()]
    names = list(data.classes) if data.num_classes <= 20 else []
    book.planes.append({"panels": panels, "labels": batch.y.tolist(), "classes": names})
    how = "the first two principal components" if way == "pca" else "t-SNE"
    body = paragraph(
        f"What each classifier is given for {len(batch.y)} test images, by {how}; a colour for each class.", "note"
    )
    body += f'<div data-planes="{len(book.planes) - 1}"></div>'
    teacher = known.pop("Teacher", None)
    if teacher is not None:  # one of other classes, or without a classifier, has nothing to compare
        known = {title: one for title, one in known.items() if one.logits.shape == teacher.logits.shape}
    if teacher is not None and known:
        maps = {title: correlation_difference(teacher.logits, one.logits) for title, one in known.items()}
        book.files[f"{slug(pair)}-correlations"] = draw_differences(maps)
        largest = max(float(one.abs().max()) for one in maps.values()) or 1.0
        figures = "".join(
            f"<figure><figcaption>{text(title)}: {float(one.abs().mean()):.3f}</figcaption>"
            f'<img src="{as_rgba_png(one, largest)}" alt="Mean absolute difference {float(one.abs().mean()):.3f}"></figure>'
            for title, one in maps.items()
        )
        body += "<h3>Correlations of logits, teacher less student</h3>"
        body += paragraph(
            "A square for each two classes: red where the teacher's logits go together more than the student's, blue where less. The "
            "number is the mean absolute difference.",
            "note",
        )
        body += f'<div class="panels">{figures}</div>'
    return body
