"""Run folders to CSV files in docs/evidence.

    python evidence/collect.py PAIR RUNS --commit COMMIT     # RUNS/ROW/seed-N -> docs/evidence/PAIR.csv; PAIR can be "presets"
    python evidence/collect.py PAIR --choices RUN RUN …      # -> docs/evidence/choices.csv
    python evidence/collect.py STUDY RUNS                    # RUNS/ROW/seed-N -> docs/evidence/STUDY.csv: "sweeps" or "fractions"

Only finished runs are collected. A counted run, or one of a study, is refused if its recipe differs from its row in the recipe file.
Lines of other runs stay in the file, and a line whose numbers have not changed keeps its commit.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from study import (
    DATA,
    FRACTIONS,
    PAIRS,
    PRESETS,
    SWEEPS,
    Choice,
    Run,
    all_rows_of,
    command,
    read_choices,
    read_runs,
    recipe_file,
    rows_of,
    write_choices,
    write_runs,
    write_validated,
)

from letkd.errors import RunError
from letkd.recipes import Recipe, resolve
from letkd.recipes.tables import as_toml, dotted, leaves
from letkd.runs.folder import RunFolder, differences

# May differ between runs of one row: what does not change the student, and where its inputs are.
CIRCUMSTANCES = {"data.root", "teacher.weights", "train.seed", "train.validate_every", "title", "probe"}
SHOWN = {"optim.lr", "data.crop", "train.epochs", "train.cache_views"}  # have columns of their own, or follow from one


def collect(pair: str, runs: Path, commit: str, folder: Path = DATA, *, settings: Sequence[str] = ()) -> list[Run]:
    """Add the finished runs in RUNS/ROW/seed-N to the pair's CSV file; returns all its runs.

    Args:
        commit: of the letkd that trained them.
        settings: `key=value` settings that all runs had, for a study smaller than the published one.
    """
    known = {(run.row, run.seed): run for run in read_runs(pair, folder)}
    for row in rows_of(pair):
        for path in RunFolder.children(runs / row):
            run = RunFolder(path)
            check_recipe(run, recipe_file(pair), row, settings)
            found = counted(pair, row, run, commit)
            if found is None:
                print(f"{path}: not finished, not collected")
                continue
            known[row, found.seed] = newer(known.get((row, found.seed)), found)
    if not known:
        raise RunError(f"{runs} holds no finished run of {pair}; run `letkd compare evidence/{pair}.toml --out {runs}`")
    write_runs(pair, known.values(), folder)
    return read_runs(pair, folder)


def counted(pair: str, row: str, run: RunFolder, commit: str) -> Run | None:
    """The line of a run; None if it is not finished."""
    result = run.result
    if result is None:
        return None
    if result.last_test is None or result.last_val is None or result.cpu_seconds is None:
        raise RunError(f"{run.path} has no test accuracy, validation accuracy or processor time; train it again")
    numbers = {"val": round(result.last_val, 4), "test": round(result.last_test, 4), "parameters": result.parameters}
    times = {"cpu_seconds": round(result.cpu_seconds), "seconds": round(result.seconds)}
    return Run(pair, row, run.recipe.train.seed, commit, result.epochs, **numbers, **times)


def newer(before: Any, found: Any) -> Any:
    """The line of a run after it was collected again: if no number changed, the one before, with its commit."""
    return before if before is not None and replace(found, commit=before.commit) == before else found


def check_recipe(run: RunFolder, file: Path, row: str, settings: Sequence[str]) -> None:
    """Refuse a run whose recipe is not that of the row in the recipe file."""
    expected = resolve(file, method=row, settings=settings)
    if changed := [key for key in _changed(run.recipe, expected) if key not in CIRCUMSTANCES]:
        raise RunError(f"{run.path} is not a run of the row {row}: it differs from {file.name} in {', '.join(changed)}")


def collect_choices(pair: str, runs: Sequence[Path], folder: Path = DATA) -> list[Choice]:
    """Add finished runs that choose settings to the CSV file; returns all its runs."""
    known = {(choice.pair, choice.run): choice for choice in read_choices(folder)}
    titles = {title: row for row, title in reversed(all_rows_of(pair).items())}
    for path in runs:
        recipe = resolve(RunFolder(path).recipe_file)  # recipes of earlier commits lack keys; they have the defaults
        title = recipe.title if recipe.methods else "CE"
        if title not in titles:
            raise RunError(f"{path}: its title {title!r} is no row of {pair}.toml and no method; name a run of that recipe")
        found = choice_of(pair, titles[title], path.name, RunFolder(path), recipe)
        if found is not None:
            known[pair, path.name] = found
    write_choices(known.values(), folder)
    return read_choices(folder)


def collect_validated(study: str, runs: Path, folder: Path = DATA) -> list[Choice]:
    """Add the finished runs in RUNS/ROW/seed-N to the CSV file of a study on validation; returns all its runs."""
    known = {choice.run: choice for choice in read_choices(folder, study)}
    for row in rows_of(study):
        for path in RunFolder.children(runs / row):
            run = RunFolder(path)
            check_recipe(run, recipe_file(study), row, ())
            name = f"{row}/{path.name}"
            found = choice_of(study, row, name, run, run.recipe)
            if found is not None:
                known[name] = found
    write_validated(study, known.values(), folder)
    return read_choices(folder, study)


def choice_of(pair: str, row: str, name: str, run: RunFolder, recipe: Recipe) -> Choice | None:
    """The line of a run that chooses a setting; None if it is not finished."""
    result = run.result
    if result is None or result.last_val is None:
        print(f"{run.path}: not finished, not collected")
        return None
    return Choice(
        pair=pair,
        run=name,
        row=row,
        weights=", ".join(f"{name}={_short(value)}" for name, value in recipe.weights.items() if name != "ce" or value != 1),
        lr=recipe.optim.lr,
        crop=recipe.data.crop,
        tau=_supervision(recipe, "tau"),
        K=_supervision(recipe, "K"),
        other=_other(recipe, resolve(recipe_file(pair), method=row)),
        epochs=result.epochs,
        seed=recipe.train.seed,
        perplexity=_health(run, "perplexity_T"),
        val=round(result.last_val, 4),
        matches=_health(run, "matches"),
        added=_health(run, "added"),
    )


def _changed(one: Recipe, other: Recipe) -> list[str]:
    return differences(one.model_dump(mode="json"), other.model_dump(mode="json"))


def _supervision(recipe: Recipe, key: str) -> str:
    """A setting of the supervision at the penultimate site; empty if there is none."""
    values = [value for path, value in leaves(recipe.methods) if path[-3:] == ("penultimate", "supervision", key)]
    return _short(values[0]) if values else ""


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _other(recipe: Recipe, row: Recipe) -> str:
    """Settings that differ from the row of the recipe file and have no column."""
    values = {dotted(path): value for path, value in leaves(recipe.model_dump(exclude_none=True))}
    skipped = CIRCUMSTANCES | SHOWN
    changed = [key for key in _changed(recipe, row) if key not in skipped and not key.startswith("weights.")]
    changed = [key for key in changed if not re.search(r"penultimate\.supervision\.(K|tau)$", key)]
    return ", ".join(f"{key}={as_toml(values[key])}" for key in changed if key in values)


def _health(run: RunFolder, name: str) -> float | None:
    """A health value of the penultimate site in the last epoch."""
    rows = run.rows()
    found = rows[-1].get("health", {}).get("penultimate", {}).get(name) if rows else None
    return None if found is None else round(found, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the results of run folders into docs/evidence.")
    parser.add_argument("pair", choices=[*PAIRS, PRESETS, SWEEPS, FRACTIONS])
    parser.add_argument("runs", type=Path, nargs="+", help="folder with ROW/seed-N; with --choices, run folders")
    parser.add_argument("--commit", help="commit of the letkd that trained the runs")
    parser.add_argument("--choices", action="store_true", help="the runs choose settings and are not counted")
    given = parser.parse_args()
    if given.choices:
        print(f"{DATA / 'choices.csv'}: {len(collect_choices(given.pair, given.runs))} runs")
        return 0
    if given.pair in (SWEEPS, FRACTIONS) and len(given.runs) == 1:
        print(f"{DATA / given.pair}.csv: {len(collect_validated(given.pair, given.runs[0]))} runs")
        return 0
    if given.commit is None or len(given.runs) != 1:
        parser.error("name one folder of counted runs, and --commit")
    print(f"{DATA / given.pair}.csv: {len(collect(given.pair, given.runs[0], given.commit))} runs")
    return 0


if __name__ == "__main__":
    command(main)
