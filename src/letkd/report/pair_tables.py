"""The tables of a report: methods by pairs, and all measurements of each pair."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from letkd.report.collect import Group
from letkd.report.paired import NOTE, PairedDifference, head, paired_difference
from letkd.report.paper import PaperResult, table_position
from letkd.report.results_table import without_labels
from letkd.runs.grid import Cell, Grid
from letkd.runs.records import Result
from letkd.runs.results import mean_std

NONE = "–"


def mean_of(group: Group) -> float | None:
    """Mean test accuracy of the last epoch; None if no run is finished."""
    known = tests_of(group)
    return statistics.mean(known) if known else None


def tests_of(group: Group) -> list[float]:
    """Test accuracy of the last epoch of every finished run with labelled test images."""
    return [result.last_test for result in group.results if result.last_test is not None]


def best_of(groups: Sequence[Group]) -> set[str]:
    """Keys of the students with the highest mean, rounded to the two printed digits; the teacher is excluded."""
    means = {
        group.key: round(mean, 2) for group in groups if group.method != "teacher" and (mean := mean_of(group)) is not None
    }
    return {key for key, mean in means.items() if mean == max(means.values())} if len(means) > 1 else set()


def ours(group: Group) -> str:
    """Mean ± std (n) of the last epoch."""
    known = tests_of(group)
    return f"{mean_std(known)} ({len(known)})" if known else NONE


def by_pair(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups by pair, in the given order."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.pair, []).append(group)
    return found


def matrix(groups: Sequence[Group]) -> Grid:
    """Methods × pairs: our last epoch with the paper's number below it; a dash if a pair has no such run."""
    pairs = by_pair(groups)
    best = {key for same_pair in pairs.values() for key in best_of(same_pair)}
    rows: dict[str, dict[str, Group]] = {}
    for group in groups:
        rows.setdefault(group.title, {})[group.pair] = group
    cells = [[Cell(title), *(_ours_and_paper(row.get(pair), best) for pair in pairs)] for title, row in _in_order(rows)]
    notes = [
        "Test accuracy in %, last epoch, mean ± std over seeds (number of seeds); below, the paper's number or one published "
        "elsewhere. Bold: highest mean of the students; differences within the standard deviation are not significant."
    ]
    return Grid("Methods by pairs", ["method", *pairs], cells, notes)


def _in_order(rows: Mapping[str, dict[str, Group]]) -> list[tuple[str, dict[str, Group]]]:
    return sorted(rows.items(), key=lambda row: min(table_position(group.method) for group in row[1].values()))


def _ours_and_paper(group: Group | None, best: set[str]) -> Cell:
    if group is None:
        return Cell(NONE)
    return Cell(ours(group), _cited(group.paper) if group.paper else "", group.key in best)


def _cited(paper: PaperResult) -> str:
    mark = f", {paper.mark}" if paper.mark else ""
    return f"published {paper}{mark}" if paper.source else f"paper {paper}"


def reference_of(groups: Sequence[Group], against: str | None = None) -> Group | None:
    """The row to compare with: the one of this name, or the first student; None if there is only one student."""
    students = [group for group in groups if group.results and group.method != "teacher"]
    named = [group for group in students if against is None or against in group.names]
    return named[0] if named and len(students) > 1 else None


def difference(group: Group, reference: Group) -> PairedDifference | None:
    """Row minus reference, by seed."""
    row, other = (
        {run.recipe.train.seed: run.result.last_test for run in g.runs if run.result and run.result.last_test is not None}
        for g in (group, reference)
    )
    return None if group is reference else paired_difference(row, other)


def detail(pair: str, groups: Sequence[Group], macs: Mapping[str, int | None], *, against: str | None = None) -> Grid:
    """The table of one pair with all columns, and notes on its rows.

    Args:
        macs: multiply-accumulates per image by the group's key, if known.
        against: title, method or folder of the row to compare with; default: the first student.
    """
    best, other = best_of(groups), reference_of(groups, against)
    columns: dict[str, Callable[[Group], Cell]] = {
        "method": lambda group: Cell(group.title),
        "test %, last epoch": lambda group: Cell(
            mean_std([result.last_test for result in group.results]), bold=group.key in best
        ),
        "n": lambda group: Cell(str(len(group.results))),
        **({} if other is None else {head(other.title): lambda group: Cell(str(difference(group, other) or NONE))}),
        "test %, best validation epoch": lambda group: Cell(mean_std([result.best_val_test for result in group.results])),
        **({} if not any(map(_ema, groups)) else {"test %, EMA": lambda group: Cell(mean_std(_ema(group)))}),
        "paper": lambda group: Cell(str(group.paper or NONE), group.paper.mark if group.paper else ""),
        "parameters": lambda group: Cell(f"{group.results[0].parameters:,}" if group.results else NONE),
        "MACs": lambda group: Cell(millions(macs.get(group.key))),
        "time per run": lambda group: Cell(_duration([result.seconds for result in group.results])),
    }
    rows = [[cell(group) for cell in columns.values()] for group in groups]
    return Grid(pair, list(columns), rows, [*_notes(groups), *([] if other is None else [NOTE])])


def _ema(group: Group) -> list[float]:
    """Test accuracies of the averaged weights (EMA)."""
    return [result.ema_test for result in group.results if result.ema_test is not None]


def _notes(groups: Sequence[Group]) -> list[str]:
    notes = [
        "Parameters and MACs (for one image) are those of the exported student. Bold: highest mean of the students; differences within the "
        "standard deviation are not significant."
    ]
    if any(group.paper and group.paper.read_off for group in groups):
        notes.append("“about”: read off a plot of the paper.")
    notes += [
        f"{group.title}: {group.paper} is not from the paper; source: {group.paper.source}."
        for group in groups
        if group.paper and group.paper.source
    ]
    notes += [f"{group.title} {group.note}." for group in groups if group.note]
    notes += [f"{group.title}: {'; '.join(lines)}." for group in groups if (lines := without_labels(group.results))]
    for group in groups:
        if open_runs := len(group.runs) - len(group.results):
            notes.append(f"{group.title}: {open_runs} of {len(group.runs)} runs are not finished and not counted.")
        seeds = [run.recipe.train.seed for run in group.runs]
        if len(set(seeds)) < len(seeds):
            notes.append(f"{group.title}: some seeds occur more than once, so n overstates the number of independent runs.")
    teachers = sorted({result.teacher_top1 for group in groups for result in group.results if result.teacher_top1 is not None})
    if teachers:
        shown = " to ".join(f"{value:.2f}" for value in dict.fromkeys((teachers[0], teachers[-1])))
        notes.append(
            f"Accuracy of the teacher before training: {shown} % on validation images (on training images if there is no validation split)."
        )
    changes: dict[tuple[str, ...], list[str]] = {}
    for group in groups:
        if group.changed:
            changes.setdefault(tuple(group.changed), []).append(group.title)
    for changed, titles in changes.items():
        which = "All rows" if len(titles) == len([g for g in groups if g.runs]) and len(titles) > 1 else ", ".join(titles)
        notes.append(f"{which}: settings that differ from the recipe: {'; '.join(changed)}.")
    return notes


def millions(count: int | None) -> str:
    """A number of operations, in millions."""
    return NONE if count is None else f"{count / 1e6:,.2f} M"


def _duration(seconds: Sequence[float]) -> str:
    if not seconds:
        return NONE
    mean = statistics.mean(seconds)
    if mean < 600:
        return f"{mean:.0f} s"
    return f"{mean / 60:.0f} min" if mean < 2 * 3600 else f"{mean / 3600:.1f} h"


HEAD = (
    *("pair", "method", "title", "n", "last_test_mean", "last_test_std", "best_on_validation_test_mean"),
    *("best_on_validation_test_std", "paper_mean", "paper_std", "paper_n", "paper_source", "paper_mark"),
    *("parameters", "macs", "seconds_mean", "note"),
    *("difference_to", "difference_mean", "difference_low", "difference_high", "difference_n"),
    *("ema_test_mean", "ema_test_std"),
)


def plain(
    groups: Sequence[Group], macs: Mapping[str, int | None], *, against: str | None = None
) -> tuple[list[str], list[list[object]]]:
    """The table as numbers: its columns, and one row per group. Terms on held-out images and probes have columns if a run has them."""
    rows: list[list[object]] = []
    measured = list(dict.fromkeys(name for group in groups for result in group.results for name in _measured(result)))
    references = {pair: reference_of(same_pair, against) for pair, same_pair in by_pair(groups).items()}
    for group in groups:
        other = references[group.pair]
        d = None if other is None else difference(group, other)
        last = tests_of(group)
        best = [result.best_val_test for result in group.results if result.best_val_test is not None]
        row = [group.pair, group.method, group.title, len(group.results), *_mean_and_std(last), *_mean_and_std(best)]
        paper = group.paper
        row += [paper.mean, paper.std, paper.n, paper.source or "paper", paper.mark] if paper else [None] * 5
        seconds = [result.seconds for result in group.results]
        row += [
            group.results[0].parameters if seconds else None,
            macs.get(group.key),
            statistics.mean(seconds) if seconds else None,
        ]
        compared = [None] * 5 if d is None or other is None else [other.title, d.mean, d.low, d.high, d.n]
        row += [group.note, *compared, *_mean_and_std(_ema(group))]
        found = [_measured(result) for result in group.results]
        rows.append(row + [value for name in measured for value in _mean_and_std([one[name] for one in found if name in one])])
    return [*HEAD, *(f"{name}_{what}" for name in measured for what in ("mean", "std"))], rows


def _measured(result: Result) -> dict[str, float]:
    """Loss terms on held-out images and accuracies of probes, by column of the table."""
    return {
        **{f"held_out_{name}": value for name, value in result.held_out.items()},
        **{f"probe_{name}": value for name, value in result.probe.items()},
    }


def _mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None
