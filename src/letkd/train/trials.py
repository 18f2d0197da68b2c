"""Several seeds of one recipe, and several methods side by side."""

from collections.abc import Sequence
from pathlib import Path

from letkd.errors import LetkdError, RecipeError, UnsupportedPair
from letkd.progress import say
from letkd.recipes import Recipe, resolve
from letkd.report.tables import Row
from letkd.train.build import build_distiller, fit, read_data
from letkd.train.loop import train
from letkd.train.runs import Result, RunFolder
from letkd.train.spread import spread


def run_trials(
    recipe: Recipe,
    folder: str | Path,
    n: int,
    *,
    supervision: str | Path | None = None,
    jobs: int = 1,
    save_minutes: float = 15.0,
) -> list[Result]:
    """The recipe with n seeds, each in its own `seed-…` folder; finished ones are not run again.

    Args:
        supervision: folder of fitted supervisions; `folder/supervision` where not given.
        jobs: seeds trained at once, each in a process of its own; one after the other where it is 1.
        save_minutes: as for `train`.
    """
    shared = Path(supervision or Path(folder) / "supervision")
    runs = []
    if recipe.train.seed + n > 2**32:
        raise RecipeError(f"{n} seeds from {recipe.train.seed} on: seeds are below 2^32; begin with a smaller one")
    for seed in range(recipe.train.seed, recipe.train.seed + n):
        trial = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})
        runs.append((trial, Path(folder) / f"seed-{seed}", shared))
    left = [run for run in runs if RunFolder(run[1], run[0]).result is None]
    if jobs > 1 and len(left) > 1:
        data = read_data(recipe)
        fit(build_distiller(recipe, data), recipe, data, shared)  # once, for all of them
        spread(left, jobs)
    return [train(trial, path, supervision=shared, save_minutes=save_minutes) for trial, path, _ in runs]


def compare(
    pair: str,
    methods: Sequence[str],
    folder: str | Path,
    *,
    trials: int,
    settings: Sequence[str] = (),
    teacher_weights: str | Path | None = None,
    quick: bool = False,
) -> list[Row]:
    """The pair's student by each method, on the same data, from the same teacher and the same fitted supervision.

    Args:
        teacher_weights: a trained teacher; where there is none, it is trained first.
        quick: shrink every recipe to a smoke run, the teacher's too.

    A method that cannot serve the pair gets a row without numbers; one that fails is reported, and the rest go on.
    """
    folder = Path(folder)
    rows = []
    recipes = {
        method: resolve(pair, method=method, settings=settings, quick=quick) for method in methods
    }  # wrong names before any work
    if teacher_weights is None:
        teacher = resolve(pair, method="teacher", settings=settings, quick=quick)
        say(f"training the teacher of {pair}")
        rows.append(Row(teacher.title, [train(teacher, folder / "teacher")]))
        teacher_weights = folder / "teacher" / "student.safetensors"
    for k, (method, recipe) in enumerate(recipes.items(), start=1):
        weights = {"teacher.weights": str(teacher_weights)}
        recipe = resolve(pair, method=method, overrides=weights, settings=settings, quick=quick)
        say(f"{recipe.title} ({k} of {len(recipes)}): {trials} seeds")
        results, note = [], ""
        try:
            results = run_trials(recipe, folder / method, trials, supervision=folder / "supervision")
        except UnsupportedPair as error:
            note = f"does not serve this pair: {error}"
        except (LetkdError, RuntimeError, ArithmeticError, ValueError, TypeError, LookupError) as error:
            note = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if note:
            say(f"{recipe.title} {note}")
        rows.append(Row(recipe.title, results, note))
    return rows
