"""The section of a report on a search: table of trials, importances, and a slice plot per key."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from letkd.report.charts import COLOURS, Chart, Series, new_figure, tidy
from letkd.report.opened import RunOpener
from letkd.report.page import ReportFiles, text
from letkd.runs.grid import Cell, Grid, as_html
from letkd.runs.study_file import STUDY, Study, read_study, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTRODUCTION = (
    "Trials were compared on the validation split. Only the best recipe was evaluated on the test split; its runs are under "
    "Results."
)


def search_section(files: ReportFiles, paths: Sequence[str | Path], opener: RunOpener) -> str:
    """The studies found in these folders."""
    folders = sorted({found.parent for path in paths for found in Path(path).rglob(STUDY)})
    studies = [opener.attempt(f"search in {folder}", lambda folder=folder: read_study(folder)) for folder in folders]
    return "".join(_study(files, study) for study in studies if study is not None)


def _study(files: ReportFiles, study: Study) -> str:
    keys = list(study.trials[0].params)
    head, rows = rows_of(keys, study.trials, study.best)
    counts = {state: sum(t.state == state for t in study.trials) for state in ("COMPLETE", "PRUNED", "FAIL")}
    note = ", ".join(f"{n} {state.lower()}" for state, n in counts.items() if n)
    body = as_html(Grid(f"Trials of {study.name}", head, [[Cell(one) for one in row] for row in rows], [f"{note}."]))
    if study.importance:
        chart = Chart(
            f"{study.name}-importance",
            "Importance for the validation accuracy",
            "key",
            "share",
            list(study.importance),
            [Series("importance", list(study.importance.values()))],
            kind="dots",
        )
        from letkd.report.charts import draw

        files.files[f"{study.name}-importance"] = draw(chart)
        body += f'<div class="charts">{files.chart(chart)}</div>'
    figure = slices(study)
    files.files[f"{study.name}-slices"] = figure
    names = ", ".join(keys)
    return body + f'<figure class="chart"><img src="{_png(figure)}" alt="{text(f"Validation accuracy by {names}")}"></figure>'


def slices(study: Study) -> "Figure":
    """For each key, the validation accuracy over its values: completed trials filled, pruned ones hollow at their last epoch."""
    keys = list(study.trials[0].params)
    figure = new_figure(4.2 * min(3, len(keys)), 2.9 * -(-len(keys) // 3))
    panels = figure.subplots(-(-len(keys) // 3), min(3, len(keys)), squeeze=False).flatten()
    shown = [trial for trial in study.trials if trial.last is not None]
    for axes, key in zip(panels, keys, strict=False):
        tidy(axes)
        for complete in (False, True):
            trials = [trial for trial in shown if (trial.value is not None) == complete]
            if not trials:
                continue
            x = [trial.params[key] for trial in trials]
            numeric = all(isinstance(value, int | float) for value in x)
            axes.scatter(
                x if numeric else [str(value) for value in x],
                [trial.last for trial in trials],
                s=26,
                facecolors=COLOURS[0] if complete else "none",
                edgecolors=COLOURS[0],
                label="complete" if complete else "pruned",
            )
        best = next((trial for trial in shown if trial.number == study.best), None)
        if best is not None:
            axes.scatter([best.params[key]], [best.last], s=60, marker="*", color=COLOURS[1], label="best")
        if key in study.log:
            values = [float(trial.params[key]) for trial in shown]
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")  # plain numbers, not mathtext
            axes.xaxis.set_minor_formatter("{x:g}" if max(values) < 10 * min(values) else "")
        axes.set_xlabel(key.rpartition(".")[2] if len(key) > 40 else key, fontsize=8)
        axes.set_ylabel("validation %", fontsize=8)
        axes.legend(fontsize=7, frameon=False)
    for axes in panels[len(keys) :]:
        axes.set_axis_off()
    return figure


def _png(figure: "Figure") -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
