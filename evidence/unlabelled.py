"""The study of images without labels: run folders to CSV files in docs/evidence, and these to its tables.

    python evidence/unlabelled.py RUNS --commit COMMIT     # RUNS/ROW/seed-N -> docs/evidence/unlabelled-*.csv

RUNS is laid out as in docs/evidence.md: `letkd-1` and `quest` are pre-trained without labels, `letkd-1-10` is fine-tuned with 10 % of the
labels, and so on. Only finished runs are collected; lines of other runs stay in the files.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collect import check_recipe, counted, newer
from study import DATA, ROOT, UNFINISHED, Run, command, read_csv, write_csv

from letkd.errors import RunError
from letkd.report.paired import NOTE, head, paired_difference
from letkd.runs.folder import RunFolder
from letkd.runs.grid import Cell, Grid, as_markdown
from letkd.runs.results import mean_std

STARTS = {"scratch": "From scratch", "quest": "Pre-trained by QUEST", "letkd-1": "Pre-trained by letKD-1"}
PRETRAINED, FINETUNED = "unlabelled-pretrained.csv", "unlabelled-finetuned.csv"
FEW = {"1%": ("data.fraction=0.01", "train.epochs=200"), "10%": ("data.fraction=0.1", "train.epochs=40")}  # labels
LABELLED = {"1%": "450 labels (1 %)", "10%": "4,500 labels (10 %)"}


@dataclass(frozen=True)
class PreTrained:
    """A run without labels: `term` is the distillation term on held-out images, `knn` and `linear` are probes in per cent."""

    row: str
    seed: int
    commit: str
    epochs: int
    term: float
    knn: float
    linear: float
    parameters: int
    cpu_seconds: int
    seconds: int


def collect(runs: Path, commit: str, folder: Path = DATA) -> int:
    """Add finished runs to the CSV files; returns how many there are."""
    pretrained = {(run.row, run.seed): run for run in read_csv(folder / PRETRAINED, PreTrained)}
    finetuned = {(run.pair, run.row, run.seed): run for run in read_csv(folder / FINETUNED, Run)}
    for row in STARTS:
        for run in _finished(runs / row):
            check_recipe(run, ROOT / "evidence/unlabelled-pretrain.toml", row, ())
            result, seed = run.result, run.recipe.train.seed
            (term,) = result.held_out.values()
            numbers = (round(value, 4) for value in (term, result.probe["knn"], result.probe["linear"]))
            times = round(result.cpu_seconds), round(result.seconds)
            found = PreTrained(row, seed, commit, result.epochs, *numbers, result.parameters, *times)
            pretrained[row, seed] = newer(pretrained.get((row, seed)), found)
        for labels, settings in FEW.items():
            for run in _finished(runs / f"{row}-{labels.removesuffix('%')}"):
                check_recipe(run, ROOT / "evidence/unlabelled-finetune.toml", "ce", (*settings, *_start(run, row)))
                found = counted(labels, row, run, commit)
                finetuned[labels, row, found.seed] = newer(finetuned.get((labels, row, found.seed)), found)
    if not pretrained and not finetuned:
        raise RunError(f"{runs} holds no finished run; its folders are {', '.join(STARTS)}, and these with -1 or -10")
    order = list(STARTS)
    write_csv(folder / PRETRAINED, PreTrained, sorted(pretrained.values(), key=lambda run: (order.index(run.row), run.seed)))
    write_csv(folder / FINETUNED, Run, sorted(finetuned.values(), key=lambda run: (run.pair, order.index(run.row), run.seed)))
    return len(pretrained) + len(finetuned)


def _start(run: RunFolder, row: str) -> tuple[str, ...]:
    """The initial weights of a run as a setting: none from scratch, else those of the same seed, pre-trained by the row's method."""
    if row == "scratch":
        return ()
    weights, seed = Path(run.recipe.student.weights or ""), run.recipe.train.seed
    if weights.parts[-3:] != (expected := (row, f"seed-{seed}", "student.safetensors")):
        raise RunError(
            f"{run.path} did not start from {'/'.join(expected)} but from {weights}; move it to the folder of its start"
        )
    return (f"student.weights={str(weights)!r}",)


def _finished(folder: Path) -> list[RunFolder]:
    found = [RunFolder(path) for path in RunFolder.children(folder)]
    for run in found:
        if run.result is None:
            print(f"{run.path}: not finished, not collected")
    return [run for run in found if run.result is not None]


def finetuned_table(runs: Sequence[Run]) -> Grid:
    lines = []
    for labels, shown in LABELLED.items():
        groups = {row: [run for run in runs if (run.pair, run.row) == (labels, row)] for row in STARTS}
        by_seed = {row: {run.seed: run.test for run in group} for row, group in groups.items()}
        best = max((statistics.mean(tests.values()) for tests in by_seed.values() if tests), default=None)
        for row, group in groups.items():
            tests = by_seed[row]
            against = [
                None if row in (other, "scratch") else paired_difference(tests, by_seed[other])
                for other in ("scratch", "quest")
            ]
            lines.append(
                [
                    Cell(STARTS[row]),
                    Cell(shown),
                    Cell(mean_std(list(tests.values())), bold=bool(tests) and statistics.mean(tests.values()) == best),
                    Cell(str(len(group))),
                    *(Cell(str(difference or "–")) for difference in against),
                    Cell(f"{group[0].parameters:,}" if group else "–"),
                    Cell(_minutes(group)),
                ]
            )
    columns = ["start", "labels", "test %, last epoch", "n", head("scratch"), head("QUEST"), "parameters"]
    notes = [NOTE, "Bold: highest mean for these labels. Time per run: processor time of fine-tuning, median over seeds."]
    return Grid("CIFAR-10, ResNet-8 fine-tuned with few labels", [*columns, "time per run"], lines, notes)


def pretrained_table(runs: Sequence[PreTrained]) -> Grid:
    lines = []
    for row in ("quest", "letkd-1"):
        group = [run for run in runs if run.row == row]
        means = [mean_std([getattr(run, name) for run in group]) for name in ("knn", "linear", "term")]
        count = f"{group[0].parameters:,}" if group else "–"
        lines.append(
            [Cell(STARTS[row].removeprefix("Pre-trained by ")), *map(Cell, (*means, str(len(group)), count, _minutes(group)))]
        )
    columns = ["method", "nearest neighbours %", "linear %", "KL on held-out images", "n", "parameters", "time per run"]
    notes = [
        "Probes of the student's features, fitted to 10,000 labelled training images, on the test split. The student has seen no "
        "label, and its 1,000 logits, as many as the teacher's, are not trained."
    ]
    return Grid("CIFAR-10 images without labels, EfficientNet-Lite0 → ResNet-8", columns, lines, notes)


def _minutes(group: Sequence[PreTrained | Run]) -> str:
    return f"{statistics.median(run.cpu_seconds for run in group) / 60:.1f} min" if group else "–"


def text(folder: Path = DATA) -> str:
    """The tables as Markdown."""
    pretrained, finetuned = read_csv(folder / PRETRAINED, PreTrained), read_csv(folder / FINETUNED, Run)
    if not pretrained and not finetuned:
        return f"{UNFINISHED}\n"
    files = " and ".join(f"[{name}](evidence/{name})" for name in (PRETRAINED, FINETUNED))
    return f"{as_markdown(finetuned_table(finetuned))}\n{as_markdown(pretrained_table(pretrained))}\nRuns: {files}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the results of the study of images without labels into docs/evidence.")
    parser.add_argument("runs", type=Path, help="folder with letkd-1/seed-0, letkd-1-10/seed-0, scratch-1/seed-0, …")
    parser.add_argument("--commit", required=True, help="commit of the letkd that trained the runs")
    given = parser.parse_args()
    print(f"{DATA}: {collect(given.runs, given.commit)} runs without labels or with few")
    return 0


if __name__ == "__main__":
    command(main)
