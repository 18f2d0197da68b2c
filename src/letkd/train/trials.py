"""Several seeds of one recipe, and several methods side by side."""

from collections.abc import Sequence
from pathlib import Path

from letkd.progress import say
from letkd.recipes import Recipe, resolve
from letkd.report.tables import Row
from letkd.train.loop import train
from letkd.train.runs import Result


def run_trials(recipe: Recipe, folder: str | Path, n: int, *, supervision: str | Path | None = None) -> list[Result]:
    """The recipe with n seeds in turn, each in its own `seed-…` folder; finished ones are not run again."""
    results = []
    for seed in range(recipe.train.seed, recipe.train.seed + n):
        trial = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})
        results.append(train(trial, Path(folder) / f"seed-{seed}", supervision=supervision or Path(folder) / "supervision"))
    return results


def compare(pair: str, methods: Sequence[str], folder: str | Path, *, trials: int, settings: Sequence[str] = ()) -> list[Row]:
    """Train the pair's teacher once, then its student by each method, on the same data and the same fitted supervision."""
    folder = Path(folder)
    say(f"training the teacher of {pair}")
    teacher = resolve(pair, method="teacher", settings=settings)
    rows = [Row(teacher.title, [train(teacher, folder / "teacher")])]
    weights = {"teacher.weights": str(folder / "teacher" / "student.safetensors")}
    for method in methods:
        recipe = resolve(pair, method=method, overrides=weights, settings=settings)
        say(f"{recipe.title}: {trials} seeds")
        rows.append(Row(recipe.title, run_trials(recipe, folder / method, trials, supervision=folder / "supervision")))
    return rows
