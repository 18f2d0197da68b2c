"""CSV files in docs/evidence to the tables and figures of docs/evidence.md.

    python evidence/tables.py            # write the tables and figures
    python evidence/tables.py --check    # fail if they do not follow from the CSV files

figures.py draws the figures.
"""

import argparse
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import unlabelled
from figures import Line, Point, accuracy_over_settings, accuracy_over_time, digest
from study import (
    DATA,
    FRACTIONS,
    PAIRS,
    PRESETS,
    ROOT,
    SWEEPS,
    UNFINISHED,
    Choice,
    Run,
    all_rows_of,
    command,
    read_choices,
    read_runs,
    rows_of,
)

from letkd.errors import LetkdError
from letkd.files import write_whole
from letkd.report.paired import NOTE, head, paired_difference
from letkd.runs.grid import Cell, Grid, as_markdown
from letkd.runs.results import mean_std

R = TypeVar("R", Run, Choice)
PAGE = ROOT / "docs" / "evidence.md"
README = ROOT / "README.md"
REFERENCES = ("ce", "kd")
LEADS = {"cifar10-rn56-rn8": "CIFAR-10", "cifar100-rn32-rn8": "CIFAR-100"}  # the README's pairs
LEADING = ("ce", "kd", "quest", "letkd-1", "letkd-1-sharp")  # the README's rows
QUESTIONS = (  # question, row, reference: what each control answers
    ("Does the layer add to its supervision?", "letkd-1", "quest"),
    ("Is it more than a larger student?", "letkd-1", "ce-larger"),
    ("Is it more than longer training?", "letkd-1", "ce-longer"),
    ("Does the layer help without a teacher?", "layer-alone", "ce"),
    ("Does the teacher help the layer?", "letkd-1", "layer-alone"),
    ("Does a sharp layer add to its supervision?", "letkd-1-sharp", "quest"),
    ("Is a sharp start better than the paper's?", "letkd-1-sharp", "letkd-1"),
    ("Is letKD-1, sharp, more than longer training?", "letkd-1-sharp", "ce-longer"),
    ("Does a sharp layer help without a teacher?", "sharp-alone", "ce"),
    ("Does the second layer help?", "letkd-2", "letkd-1"),
    ("Is letKD-2 more than longer training?", "letkd-2", "ce-longer-2"),
    ("Does the second layer help if both are sharp?", "letkd-2-sharp", "letkd-1-sharp"),
    ("Is letKD-2, sharp, more than longer training?", "letkd-2-sharp", "ce-longer-2"),
    ("Do two sharp layers help without a teacher?", "sharp-2-alone", "ce"),
    ("Is letKD-1 ahead of KD with a higher T?", "letkd-1", "kd-16"),
    ("Does KD help letKD-1?", "letkd-1-kd", "letkd-1"),
    ("Does letKD-1 help KD?", "letkd-1-kd", "kd"),
    ("Does letKD-2 help KD?", "letkd-2-kd", "kd"),
    ("Are letKD-2 and KD more than longer training?", "letkd-2-kd", "ce-longer-2"),
)
PANELS = {  # of the figure of sweeps: per line the row in the middle, its value, and how the names of the other rows begin
    "α": {"letKD-1": ("letkd-1", 1.0, "alpha-")},
    "λ": {"letKD-1": ("letkd-1", 4.0, "lambda-"), "QUEST": ("quest", 4.0, "quest-lambda-")},
    "labels per pixel (τ)": {"letKD-1": ("letkd-1", None, "tau-")},
    "K": {"letKD-1": ("letkd-1", 512.0, "K-")},
}
LABELS = {"-1pc": "1 %", "-10pc": "10 %", "": "100 %"}  # share of labelled images, by the end of a row's name
TIMES = (
    "n: number of seeds. Time per run: processor time of one thread, median over seeds. It does not include the fit of the labels and "
    "the teacher, which runs once on the three views for all rows and seeds and takes 3 to 7 minutes."
)


def by_row(runs: Sequence[R]) -> dict[str, list[R]]:
    return {row: [run for run in runs if run.row == row] for row in dict.fromkeys(run.row for run in runs)}


def accuracies(runs: Sequence[Run] | Sequence[Choice], split: str = "test") -> dict[str, dict[int, float]]:
    """Of the last epoch on a split ("test" or "val"), by row and seed."""
    return {row: {run.seed: getattr(run, split) for run in group} for row, group in by_row(runs).items()}


def results_table(pair: str, runs: Sequence[Run], rows: Sequence[str] = (), *, references: Sequence[str] = REFERENCES) -> Grid:
    """The named rows of the pair (default: all), also those without a finished run, with their differences to the references."""
    found, titles, by_seed = by_row(runs), rows_of(pair), accuracies(runs)
    means = {row: statistics.mean(tests.values()) for row, tests in by_seed.items()}
    best = max(means.values(), default=None)
    lines = []
    for row in rows or titles:
        group = found.get(row, [])
        cells = [Cell(titles[row]), Cell(mean_std([run.test for run in group]), bold=row in means and means[row] == best)]
        cells += [Cell(str(len(group)))]
        cells += [Cell(_difference(by_seed, row, other)) for other in references]
        cells += [Cell(f"{group[0].parameters:,}" if group else "–"), Cell(f"{minutes(group):.1f} min" if group else "–")]
        lines.append(cells)
    columns = ["row", "test %, last epoch", "n", *(head(titles[row]) for row in references), "parameters", "time per run"]
    return Grid(
        PAIRS[pair],
        columns,
        lines,
        [NOTE, TIMES, "Bold: highest mean. A difference whose interval contains 0 is not significant."],
    )


def questions_table(pair: str, runs: Sequence[Run]) -> Grid:
    """The differences that the controls are for."""
    by_seed, titles = accuracies(runs), rows_of(pair)
    lines = [
        [Cell(question), Cell(f"{titles[row]} − {titles[other]}"), Cell(_difference(by_seed, row, other))]
        for question, row, other in QUESTIONS
        if {row, other} <= titles.keys()
    ]
    return Grid(f"{PAIRS[pair]}: questions", ["question", "rows", "Δ test %"], lines)


def summary(folder: Path = DATA) -> str:
    """The leading rows of both pairs as a Markdown table without title and notes, for the README. Parameters: of the first pair."""
    columns, lines = ["row", "parameters"], []
    for pair, name in LEADS.items():
        runs = [run for run in read_runs(pair, folder) if run.row in LEADING]
        found = results_table(pair, runs, LEADING, references=LEADING[:1]).rows  # row, test, n, Δ, parameters, time
        lines = lines or [[line[0], line[4]] for line in found]
        lines = [[*line, more[1], more[3], more[5]] for line, more in zip(lines, found, strict=True)]
        columns += [f"{name}, test %", "Δ to CE", "time per run"]
    return as_markdown(Grid("README", columns, lines)).partition("\n\n")[2]


def _difference(by_seed: Mapping[str, Mapping[int, float]], row: str, other: str) -> str:
    if row == other or row not in by_seed or other not in by_seed:
        return "–"
    return str(paired_difference(by_seed[row], by_seed[other]) or "–")


def minutes(group: Sequence[Run]) -> float:
    return statistics.median(run.cpu_seconds for run in group) / 60


def points(pair: str, runs: Sequence[Run]) -> list[Point]:
    titles, found = rows_of(pair), []
    for row, group in by_row(runs).items():
        accuracy = paired_difference({run.seed: run.test for run in group}, {run.seed: 0.0 for run in group})
        if accuracy is not None:
            half = None if accuracy.half is None else round(accuracy.half, 4)
            found.append(Point(titles[row], round(minutes(group), 2), round(accuracy.mean, 4), half))
    return found


def choices_table(pair: str, choices: Sequence[Choice]) -> Grid:
    titles = all_rows_of(pair)
    best = {row: max(choice.val for choice in choices if choice.row == row) for row in {choice.row for choice in choices}}
    lines = [
        [
            Cell(titles[choice.row]),
            Cell(f"{choice.val:.2f}", bold=choice.val == best[choice.row]),
            *map(Cell, (choice.weights or "–", f"{choice.lr:g}", "crops and flips" if choice.crop else "flips")),
            *map(Cell, (choice.K or "–", choice.tau or "–")),
            Cell("–" if choice.perplexity is None else f"{choice.perplexity:.2f}"),
            Cell(choice.other or "–"),
        ]
        for choice in choices
    ]
    epochs, seeds = ({getattr(choice, name) for choice in choices} for name in ("epochs", "seed"))
    title = f"{PAIRS[pair]}: {_range(epochs)} epochs, seed {_range(seeds)}"
    columns = ["row", "validation %", "weights", "rate", "augmentation", "K", "τ", "perplexity", "other settings"]
    used = [k for k in range(len(columns)) if any(line[k].text != "–" for line in lines)]
    columns, lines = [columns[k] for k in used], [[line[k] for k in used] for line in lines]
    notes = [
        "Last epoch on the 5,000 validation images. Bold: highest of the row. The weight of the cross-entropy is 1. "
        "Perplexity: effective number of labels per pixel, mean over pixels of exp(entropy of p_T)."
    ]
    return Grid(title, columns, lines, notes)


def _range(numbers: set[int]) -> str:
    return "–".join(str(n) for n in sorted({min(numbers), max(numbers)}))


def results_text(folder: Path = DATA) -> str:
    parts = []
    for pair, title in PAIRS.items():
        if runs := read_runs(pair, folder):
            figure = f"![{title}: test accuracy over time per run](evidence/{pair}.svg)"
            tables = f"{as_markdown(results_table(pair, runs))}\n{as_markdown(questions_table(pair, runs))}"
            parts.append(f"{tables}\n{figure}\n\nOrange: letKD. Runs: [{pair}.csv](evidence/{pair}.csv)\n")
    return "\n".join(parts) or f"{UNFINISHED}\n"


def choices_text(folder: Path = DATA) -> str:
    choices = read_choices(folder)
    tables = [
        choices_table(pair, [c for c in choices if c.pair == pair]) for pair in PAIRS if any(c.pair == pair for c in choices)
    ]
    text = "\n".join(as_markdown(table) for table in tables)
    return f"{text}\nRuns: [choices.csv](evidence/choices.csv)\n" if text else "No run is finished yet.\n"


def presets_text(folder: Path = DATA) -> str:
    """The preset `fast` next to the paper's schedule, method by method."""
    runs = read_runs(PRESETS, folder)
    if not runs:
        return f"{UNFINISHED}\n"
    found, by_seed, lines = by_row(runs), accuracies(runs), []
    for row, title in rows_of(PRESETS).items():
        group = found.get(row, [])
        cells = [title, mean_std([run.test for run in group]), str(len(group))]
        cells += [
            _difference(by_seed, row, other) for other in (f"{row.removesuffix('-fast')}-paper", f"ce-{row.rpartition('-')[2]}")
        ]
        cells += [str(group[0].epochs) if group else "–"]
        lines.append([Cell(text) for text in [*cells, f"{minutes(group):.1f} min" if group else "–"]])
    references = head("the paper's schedule"), head("the student alone")
    columns = ["row", "test %, last epoch", "n", *references, "epochs", "time per run"]
    times = (
        "Time per run: processor time of one thread with the teacher, median over seeds. It does not include the fit of the labels, "
        "which the seeds share."
    )
    table = Grid("CIFAR-10, 4,500 images, ResNet-56 → ResNet-20: presets", columns, lines, [NOTE, times])
    return f"{as_markdown(table)}\nRuns: [{PRESETS}.csv](evidence/{PRESETS}.csv)\n"


def sweeps_text(folder: Path = DATA) -> str:
    """Settings of letKD-1, one at a time, on validation."""
    choices = read_choices(folder, SWEEPS)
    if not choices:
        return f"{UNFINISHED}\n"
    groups, by_seed, titles = by_row(choices), accuracies(choices, "val"), rows_of(SWEEPS)
    lines = []
    for row, group in groups.items():
        cells = [titles[row], mean_std([choice.val for choice in group]), str(len(group)), _difference(by_seed, row, "letkd-1")]
        cells += [_mean([getattr(choice, name) for choice in group]) for name in ("perplexity", "matches", "added")]
        lines.append([Cell(text) for text in cells])
    note = (
        f"{NOTE.replace('test accuracy', 'validation accuracy')} letKD-1 has α = 1, λ = 4, K = 512 and τ from the data; each row "
        "changes one setting of it or of letKD-1, sharp. Labels and templates: effective numbers per pixel, mean over pixels of the "
        "perplexity of p_T and of p."
    )
    columns = ["row", "validation %, last epoch", "n", head("letKD-1"), "labels", "templates", "α‖x'‖ / ‖x‖"]
    table = Grid("CIFAR-10, 4,500 images, ResNet-56 → ResNet-8: settings of letKD-1", columns, lines, [note])
    figure = f"![Validation accuracy over α, λ, labels per pixel and K](evidence/{SWEEPS}.svg)"
    left = [title for row, title in titles.items() if row not in groups]
    more = f"Not trained yet: {'; '.join(left)}.\n\n" if left else ""
    return f"{figure}\n\nOrange: letKD-1.\n\n{as_markdown(table)}\n{more}Runs: [{SWEEPS}.csv](evidence/{SWEEPS}.csv)\n"


def sweep_panels(choices: Sequence[Choice]) -> dict[str, list[Line]]:
    """The lines of the figure by panel: accuracy over α, λ, K, and over the perplexity of p_T, which τ determines."""
    groups = by_row(choices)
    return {setting: [Line(title, _swept(groups, *line)) for title, line in lines.items()] for setting, lines in PANELS.items()}


def _swept(
    groups: Mapping[str, Sequence[Choice]], base: str, value: float | None, stem: str
) -> list[tuple[float, float, float]]:
    """The value of a setting, mean accuracy and standard deviation of every row that changes it; without `value`, the perplexity."""
    values = {row: float(row.removeprefix(stem)) for row in groups if re.fullmatch(rf"{stem}[\d.]+", row)}
    values |= {base: value} if base in groups else {}
    found = []
    for row, x in values.items():
        val = [choice.val for choice in groups[row]]
        std = statistics.stdev(val) if len(val) > 1 else 0.0
        perplexity = statistics.mean(choice.perplexity or math.nan for choice in groups[row])
        found.append((round(perplexity if value is None else x, 3), round(statistics.mean(val), 4), round(std, 4)))
    return sorted(found)


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.2f}" if known else "–"


def fractions_text(folder: Path = DATA) -> str:
    """Methods by the share of labelled images, on validation."""
    choices = read_choices(folder, FRACTIONS)
    if not choices:
        return f"{UNFINISHED}\n"
    groups, by_seed = by_row(choices), accuracies(choices, "val")
    titles, lines = rows_of(FRACTIONS), []
    for method in [row for row in titles if not row.endswith("pc")]:
        cells = [titles[method]]
        for end in LABELS:
            row = method + end
            cells += [mean_std([choice.val for choice in groups.get(row, [])]), _difference(by_seed, row, f"ce{end}")]
        lines.append([Cell(text) for text in cells])
    columns = ["row", *(text for label in LABELS.values() for text in (f"validation %, {label} labels", head("CE")))]
    seeds = _range({choice.seed for choice in choices})
    note = (
        f"{NOTE.replace('test accuracy', 'validation accuracy')} Last epoch, {'seed' if seeds.isdigit() else 'seeds'} {seeds}."
    )
    table = Grid("CIFAR-10, ResNet-56 → ResNet-8: labels for a part of the images", columns, lines, [note])
    return f"{as_markdown(table)}\nRuns: [{FRACTIONS}.csv](evidence/{FRACTIONS}.csv)\n"


def parts(folder: Path = DATA) -> dict[str, str]:
    """The computed parts of the page, by the name in their markers."""
    return {
        "results": results_text(folder),
        "choices": choices_text(folder),
        "without labels": unlabelled.text(folder),
        "presets": presets_text(folder),
        "sweeps": sweeps_text(folder),
        "fractions": fractions_text(folder),
    }


def filled(page: str, parts: Mapping[str, str], path: Path) -> str:
    """The text of the page at `path`, with what is between its markers replaced."""
    for name, text in parts.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        if page.count(start) != 1 or page.count(end) != 1:
            raise LetkdError(f"{path} must contain the line {start.strip()!r} once, and {end.strip()!r} after it")
        page = re.sub(
            f"{re.escape(start)}.*?{re.escape(end)}", lambda _, t=start + "\n" + text + "\n" + end: t, page, flags=re.DOTALL
        )
    return page


def page_text(page: str, folder: Path = DATA) -> str:
    """The page with its tables computed from the CSV files."""
    return filled(page, parts(folder), PAGE)


def readme_text(page: str, folder: Path = DATA) -> str:
    """The README with its table of real images computed from the CSV files."""
    return filled(page, {"real images": summary(folder)}, README)


def figures(folder: Path = DATA) -> dict[str, Any]:
    """The data of the figures by name: points per pair, and the panels of the sweeps."""
    found: dict[str, Any] = {pair: points(pair, runs) for pair in PAIRS if (runs := read_runs(pair, folder))}
    choices = read_choices(folder, SWEEPS)
    return found | ({SWEEPS: sweep_panels(choices)} if choices else {})


def problems(page: Path = PAGE, folder: Path = DATA) -> list[str]:
    """What on the page does not follow from the CSV files, one sentence each."""
    text = page.read_text(encoding="utf-8")
    found = [] if page_text(text, folder) == text else [f"the tables of {page} do not follow from {folder}"]
    data = figures(folder)
    for name in (*PAIRS, SWEEPS):
        path = folder / f"{name}.svg"
        drawn = path.read_text(encoding="utf-8") if path.exists() else ""
        if (name in data) != bool(drawn) or (name in data and digest(data[name]) not in drawn):
            found.append(f"{path} does not follow from {name}.csv")
    return found


def readme_problems() -> list[str]:
    text = README.read_text(encoding="utf-8")
    return [] if readme_text(text) == text else [f"the table of {README} does not follow from {DATA}"]


def write(page: Path = PAGE, folder: Path = DATA) -> None:
    write_whole(page, page_text(page.read_text(encoding="utf-8"), folder).encode())
    for name, data in figures(folder).items():
        drawn = accuracy_over_settings(data) if name == SWEEPS else accuracy_over_time(PAIRS[name], data)
        write_whole(folder / f"{name}.svg", drawn)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables and figures of docs/evidence.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if they do not follow from the CSV files")
    if not parser.parse_args().check:
        write()
        write_whole(README, readme_text(README.read_text(encoding="utf-8")).encode())
        return 0
    if found := [*problems(), *readme_problems()]:
        print("; ".join(found) + "; run `python evidence/tables.py`")
    return 1 if found else 0


if __name__ == "__main__":
    command(main)
