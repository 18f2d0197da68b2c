"""The sections of a report, built from the groups of a pair: HTML for the page, and files with figures and tables."""

import json
from collections.abc import Sequence

from letkd.report.charts import Chart, draw, draw_all
from letkd.report.classes import Confusion, class_chart, confusion_matrix, confusions, per_class
from letkd.report.collect import Group, Run
from letkd.report.curves import curves, health_charts, training
from letkd.report.features import (
    Way,
    as_rgba_png,
    correlation_difference,
    draw_differences,
    draw_planes,
    outputs,
    project,
)
from letkd.report.knowledge import knowledge
from letkd.report.knowledge_pictures import as_json, draw_knowledge
from letkd.report.opened import RunOpener, balanced_sample, batch_of
from letkd.report.page import ReportFiles, chosen, paragraph, text
from letkd.report.pair_tables import by_pair, detail, matrix, plain
from letkd.runs.grid import Cell, Grid, as_csv, as_html, as_latex, as_markdown

FEATURE_IMAGES = 300


def slug(pair: str) -> str:
    return pair.replace("/", "-")


def finished(groups: Sequence[Group]) -> list[tuple[Group, Run]]:
    """The groups that have a finished run, each with its first finished run."""
    return [(group, next(run for run in group.runs if run.result is not None)) for group in groups if group.results]


def results(files: ReportFiles, groups: Sequence[Group], opener: RunOpener, against: str | None = None) -> str:
    """The tables, for the page and as Markdown, LaTeX and CSV files; `against` as for `detail`."""
    macs = {
        group.key: opener.attempt(f"MACs of {group.title}", lambda run=run: opener.macs(run)) for group, run in finished(groups)
    }
    pairs = by_pair(groups)
    grids = [matrix(groups)] if len(pairs) > 1 else []
    grids += [detail(pair, same_pair, macs, against=against) for pair, same_pair in pairs.items()]
    files.files["table.md"] = "\n".join(as_markdown(grid) for grid in grids)
    files.files["table.tex"] = "\n".join(as_latex(grid) for grid in grids)
    files.files["table.csv"] = as_csv(*plain(groups, macs, against=against))
    return "".join(as_html(grid) for grid in grids)


def curve_charts(files: ReportFiles, pair: str, groups: Sequence[Group]) -> str:
    """Accuracy, losses and learning rate."""
    charts = curves(pair, groups)
    if not charts:
        return paragraph("No run has finished an epoch yet.")
    losses = [chart for chart in charts if chart.key.startswith("loss-")]
    shared = [chart for chart in charts if chart not in losses]
    for chart in shared:
        files.files[f"{slug(pair)}-{chart.key}"] = draw(chart)
    files.files[f"{slug(pair)}-losses"] = draw_all(losses, title=pair)
    one = chosen("Loss of", {chart.title.removeprefix("Loss: "): files.chart(chart) for chart in losses})
    how = training(groups)
    table = "" if how is None else as_html(how)
    return f'{table}<div class="charts">{"".join(map(files.chart, shared))}<div>{one}</div></div>'


def health_of(files: ReportFiles, pair: str, groups: Sequence[Group]) -> str:
    """Health of the KD layers by epoch."""
    charts = health_charts(pair, groups)
    sites: dict[str, list[Chart]] = {}
    for chart in charts:
        sites.setdefault(chart.key.removeprefix("health-").rpartition("-")[0], []).append(chart)
    body = ""
    for site, of_site in sites.items():
        files.files[f"{slug(pair)}-health-{site}"] = draw_all(of_site, title=site)
        body += f'<h3>{text(site)}</h3><div class="charts small">{"".join(map(files.chart, of_site))}</div>'
    return body


def classes_of(files: ReportFiles, pair: str, groups: Sequence[Group], opener: RunOpener) -> str:
    """Accuracy per class, and the confusions that distillation fixed."""
    matrices, names = {}, ()
    for group, first in finished(groups):
        what = f"classes of {group.title}"
        found = [opener.attempt(what, lambda run=run: opener.predictions(run)) for run in group.runs if run.result is not None]
        classes = opener.attempt(what, lambda first=first: opener.classes(first))
        known = [one for one in found if one is not None]
        if known and classes is not None:
            names = classes
            matrices[group.title] = confusion_matrix(known, len(classes))
    if not matrices:
        return ""
    chart = class_chart(pair, matrices, names, {group.title: k for k, group in enumerate(groups)})
    files.files[f"{slug(pair)}-classes"] = draw(chart)
    rows = [[name, *(per_class(one)[c] for one in matrices.values())] for c, name in enumerate(names)]
    files.files[f"{slug(pair)}-classes.csv"] = as_csv(["class", *matrices], rows)
    body = f'<div class="charts"><div>{files.chart(chart)}</div><div>'
    alone = next((group.title for group in groups if group.method == "ce"), None)
    if alone is not None and alone in matrices:
        taught = [group.title for group in groups if group.title in matrices and group.method not in ("ce", "teacher")]
        lists = {title: confusions(matrices[alone], matrices[title], names) for title in taught}
        body += "<h3>Confusions that distillation fixed</h3>" if lists else ""
        body += chosen("Method", {title: as_html(_confusion_grid(alone, title, found)) for title, found in lists.items()})
        every = [[title, one.true, one.taken, one.alone, one.taught] for title, found in lists.items() for one in found]
        files.files[f"{slug(pair)}-confusions.csv"] = as_csv(["method", "class", "taken for", "student alone", "taught"], every)
    return f"{body}</div></div>"


def _confusion_grid(alone: str, title: str, found: Sequence[Confusion], *, most: int = 10, worst: int = 3) -> Grid:
    shown = [one for one in found[:most] if one.fixed > 0]
    shown += [one for one in found[-worst:] if one.fixed < 0]
    rows = []
    for one in shown:
        change = f"{-one.fixed:+.1f}".replace("-", "−")
        rows.append(
            [
                Cell(f"{one.true} predicted as {one.taken}"),
                *(Cell(v) for v in (f"{one.alone:.1f}", f"{one.taught:.1f}", change)),
            ]
        )
    note = "Number of test images, mean over seeds: the largest decreases, then the largest increases."
    return Grid(f"{alone} compared with {title}", ["confusion", "without teacher", "distilled", "change"], rows, [note])


def knowledge_of(files: ReportFiles, pair: str, groups: Sequence[Group], opener: RunOpener) -> str:
    """Images whose locations show the teacher's labels and the student's use of them."""
    parts = {}
    for group, run in finished(groups):
        tables = json.dumps(run.recipe.methods)
        if '"sites"' not in tables:
            continue
        found = opener.attempt(
            f"transferred knowledge of {group.title}", lambda run=run: knowledge(opener.distiller(run), opener.tested(run))
        )
        # The page shows the last one first: the sub-classes of the paper's figure, if there are any.
        for one in sorted(found or (), key=lambda one: one.per_class is not None):
            files.files[f"{group.key}-knowledge-{one.site}"] = draw_knowledge(one)
            files.knowledge.append(as_json(one, group.title))
            templates = files.knowledge[-1]["templates"]
            strips = "".join(
                f"<figure><figcaption>{text(item['name'])} · {100 * item['share']:.1f} % of pixels</figcaption>"
                + "".join(f'<img src="{text(png)}" alt="">' for png in item["png"])
                + "</figure>"
                for item in templates
            )
            nearest = "<h3>Training patches nearest to the most frequent templates</h3>"
            body = f'<div data-knowledge="{len(files.knowledge) - 1}">{nearest}<div class="patches">{strips}</div></div>'
            parts[f"{group.title}, {one.site}"] = body
    return chosen("Knowledge in", parts) if parts else ""


def features_of(files: ReportFiles, pair: str, groups: Sequence[Group], opener: RunOpener, way: Way) -> str:
    """Teacher and students side by side: features in two dimensions, and differences of the logits' correlations."""
    students = [(group, run) for group, run in finished(groups) if group.method != "teacher"]
    if not students:
        return ""
    data = opener.attempt("features", lambda: opener.tested(students[0][1]))
    if data is None:
        return ""
    batch, _ = batch_of(data, data.test, balanced_sample(data.test.labels, FEATURE_IMAGES))
    found = {}
    taught = next((run for _, run in students if run.recipe.methods), None)
    if taught is not None and (table := taught.recipe.teacher) is not None:
        found["Teacher"] = opener.attempt("features of the teacher", lambda: outputs(opener.teacher(taught), batch, table))
    for group, run in students:
        found[group.title] = opener.attempt(
            f"features of {group.title}", lambda run=run: outputs(opener.student(run), batch, run.recipe.student)
        )
    known = {title: one for title, one in found.items() if one is not None}
    planes = {title: project(one.pooled, way) for title, one in known.items()}
    if not planes:
        return ""
    files.files[f"{slug(pair)}-features"] = draw_planes(planes, batch.y, data.classes)
    panels = [{"title": title, "at": [[round(float(v), 3) for v in point] for point in at]} for title, at in planes.items()]
    names = list(data.classes) if data.num_classes <= 20 else []
    files.planes.append({"panels": panels, "labels": batch.y.tolist(), "classes": names})
    how = "the first two principal components" if way == "pca" else "t-SNE"
    body = paragraph(
        f"Input of each classifier for {len(batch.y)} test images, projected by {how}; one colour per class.", "note"
    )
    body += f'<div data-planes="{len(files.planes) - 1}"></div>'
    teacher = known.pop("Teacher", None)
    if teacher is not None:  # a teacher with other classes or without a classifier cannot be compared
        known = {title: one for title, one in known.items() if one.logits.shape == teacher.logits.shape}
    if teacher is not None and known:
        maps = {title: correlation_difference(teacher.logits, one.logits) for title, one in known.items()}
        files.files[f"{slug(pair)}-correlations"] = draw_differences(maps)
        largest = max(float(one.abs().max()) for one in maps.values()) or 1.0
        figures = "".join(
            f"<figure><figcaption>{text(title)}: {float(one.abs().mean()):.3f}</figcaption>"
            f'<img src="{as_rgba_png(one, largest)}" alt="Mean absolute difference {float(one.abs().mean()):.3f}"></figure>'
            for title, one in maps.items()
        )
        body += "<h3>Correlations of logits, teacher minus student</h3>"
        body += paragraph(
            "One square per pair of classes: red if the teacher's logits correlate more than the student's, blue if less. The "
            "number is the mean absolute difference.",
            "note",
        )
        body += f'<div class="panels">{figures}</div>'
    return body
