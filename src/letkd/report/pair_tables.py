"""The tables of a report: methods by pairs, and for each pair all that was measured."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from letkd.report.collect import Group
from letkd.report.paired import NOTE, PairedDifference, head, paired_difference
from letkd.report.paper import PaperResult, place
from letkd.runs.grid import Cell, Grid
from letkd.runs.results import mean_std

NONE = "–"


def mean_of(group: Group) -> float | None:
    """Mean test accuracy of the last epoch; None where no run is finished."""
    known = tests_of(group)
    return statistics.mean(known) if known else None


def tests_of(group: Group) -> list[float]:
    """Test accuracy of the last epoch of every run that has one; without labels there is none."""
    return [result.last_test for result in group.results if result.last_test is not None]


def best_of(groups: Sequence[Group]) -> set[str]:
    """The keys of the students that are best, by the two digits that are printed; the teacher does not compete."""
    means = {
        group.key: round(mean, 2) for group in groups if group.method != "teacher" and (mean := mean_of(group)) is not None
    }
    return {key for key, mean in means.items() if mean == max(means.values())} if len(means) > 1 else set()


def ours(group: Group) -> str:
    """Mean ± std (n) of the last epoch."""
    known = tests_of(group)
    return f"{mean_std(known)} ({len(known)})" if known else NONE


def by_pair(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of every pair, both in the order they come."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.pair, []).append(group)
    return found


def matrix(groups: Sequence[Group]) -> Grid:
    """Methods × pairs: our last epoch, the paper's number below it, a dash where a pair has no such run."""
    pairs = by_pair(groups)
    best = {key for held in pairs.values() for key in best_of(held)}
    rows: dict[str, dict[str, Group]] = {}
    for group in groups:
        rows.setdefault(group.title, {})[group.pair] = group
    cells = [[Cell(title), *(_ours_and_paper(held.get(pair), best) for pair in pairs)] for title, held in _in_order(rows)]
    notes = [
        "Test accuracy in %, last epoch, mean ± std over seeds (number of seeds); below, the paper's number or one published "
        "elsewhere. Bold: best student."
    ]
    return Grid("Methods by pairs", ["method", *pairs], cells, notes)


def _in_order(rows: Mapping[str, dict[str, Group]]) -> list[tuple[str, dict[str, Group]]]:
    return sorted(rows.items(), key=lambda row: min(place(group.method) for group in row[1].values()))


def _ours_and_paper(group: Group | None, best: set[str]) -> Cell:
    if group is None:
        return Cell(NONE)
    return Cell(ours(group), _cited(group.paper) if group.paper else "", group.key in best)


def _cited(paper: PaperResult) -> str:
    mark = f", {paper.mark}" if paper.mark else ""
    return f"published {paper}{mark}" if paper.source else f"paper {paper}"


def reference_of(groups: Sequence[Group], against: str | None = None) -> Group | None:
    """The row that the others are compared with: the one of this title or method, or the first student; None for a lone row."""
    students = [group for group in groups if group.results and group.method != "teacher"]
    named = [group for group in students if against in (group.title, group.method)]
    return (named or ([] if against else students) or [None])[0] if len(students) > 1 else None


def difference(group: Group, reference: Group) -> PairedDifference | None:
    """Row less reference, by seed."""
    row, other = (
        {run.recipe.train.seed: run.result.last_test for run in g.runs if run.result and run.result.last_test is not None}
        for g in (group, reference)
    )
    return None if group is reference else paired_difference(row, other)


def detail(pair: str, groups: Sequence[Group], macs: Mapping[str, int | None], *, against: str | None = None) -> Grid:
    """One pair: every column, with what a reader must know of each row below.

    Args:
        macs: multiply-accumulates of an inference by the group's key, where they are known.
        against: title or method of the row that the others are compared with; the first student if omitted.
    """
    best, other = best_of(groups), reference_of(groups, against)
    columns: dict[str, Callable[[Group], Cell]] = {
        "method": lambda group: Cell(group.title),
        "test %, last epoch": lambda group: Cell(
            mean_std([result.last_test for result in group.results]), bold=group.key in best
        ),
        "n": lambda group: Cell(str(len(group.results))),
        **({} if other is None else {head(other.title): lambda group: Cell(str(difference(group, other) or NONE))}),
        "test %, best on val.": lambda group: Cell(mean_std([result.best_val_test for result in group.results])),
        **({} if not any(map(_ema, groups)) else {"test %, EMA": lambda group: Cell(mean_std(_ema(group)))}),
        "paper": lambda group: Cell(str(group.paper or NONE), group.paper.mark if group.paper else ""),
        "parameters": lambda group: Cell(f"{group.results[0].parameters:,}" if group.results else NONE),
        "MACs": lambda group: Cell(millions(macs.get(group.key))),
        "time a run": lambda group: Cell(_duration([result.seconds for result in group.results])),
    }
    rows = [[cell(group) for cell in columns.values()] for group in groups]
    return Grid(pair, list(columns), rows, [*_notes(groups), *([] if other is None else [NOTE])])


def _ema(group: Group) -> list[float]:
    """Test accuracies of the averages of the weights."""
    return [result.ema_test for result in group.results if result.ema_test is not None]


def _notes(groups: Sequence[Group]) -> list[str]:
    notes = ["Parameters and MACs are those of the student as it ships, for one image. Bold: best student."]
    if any(group.paper and group.paper.read_off for group in groups):
        notes.append("“about”: read off a plot of the paper.")
    notes += [
        f"{group.title}: {group.paper} is no number of the paper; published in: {group.paper.source}."
        for group in groups
        if group.paper and group.paper.source
    ]
    notes += [f"{group.title} {group.note}." for group in groups if group.note]
    for group in groups:
        if open_runs := len(group.runs) - len(group.results):
            notes.append(f"{group.title}: {open_runs} of {len(group.runs)} runs not finished, and not counted.")
        seeds = [run.recipe.train.seed for run in group.runs]
        if len(set(seeds)) < len(seeds):
            notes.append(f"{group.title}: a seed is there more than once, so n says more than it means.")
    taught = sorted({result.teacher_top1 for group in groups for result in group.results if result.teacher_top1 is not None})
    if taught:
        shown = " to ".join(f"{value:.2f}" for value in dict.fromkeys((taught[0], taught[-1])))
        notes.append(
            f"The teacher gave {shown} % on validation images (training images without a validation split) before training."
        )
    changes: dict[tuple[str, ...], list[str]] = {}
    for group in groups:
        if group.changed:
            changes.setdefault(tuple(group.changed), []).append(group.title)
    for changed, titles in changes.items():
        which = "All rows" if len(titles) == len([g for g in groups if g.runs]) and len(titles) > 1 else ", ".join(titles)
        notes.append(f"{which}: settings other than the recipe's: {'; '.join(changed)}.")
    return notes


def millions(count: int | None) -> str:
    """A number of operations in millions."""
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


def plain(groups: Sequence[Group], macs: Mapping[str, int | None], *, against: str | None = None) -> list[list[object]]:
    """The same as numbers, a row for each group, under `HEAD`."""
    rows: list[list[object]] = []
    references = {pair: reference_of(held, against) for pair, held in by_pair(groups).items()}
    for group in groups:
        other = references[group.pair]
        d = None if other is None else difference(group, other)
        last = tests_of(group)
        held = [result.best_val_test for result in group.results if result.best_val_test is not None]
        row = [group.pair, group.method, group.title, len(last), *_mean_and_std(last), *_mean_and_std(held)]
        paper = group.paper
        row += [paper.mean, paper.std, paper.n, paper.source or "paper", paper.mark] if paper else [None] * 5
        seconds = [result.seconds for result in group.results]
        row += [
            group.results[0].parameters if seconds else None,
            macs.get(group.key),
            statistics.mean(seconds) if seconds else None,
        ]
        apart = [None] * 5 if d is None or other is None else [other.title, d.mean, d.low, d.high, d.n]
        rows.append([*row, group.note, *apart, *_mean_and_std(_ema(group))])
    return rows


def _mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None
