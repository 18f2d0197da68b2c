"""Several seeds of one recipe, and comparisons of methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from letkd.errors import LetkdError, RecipeError, RunError, UnsupportedPair
from letkd.files import refuse_link
from letkd.methods import METHODS
from letkd.methods.base import Method
from letkd.models.pretrained import OWN
from letkd.models.weights import read_state_dict
from letkd.progress import say
from letkd.recipes import Recipe, derived_values, resolve, resolve_with_sources
from letkd.runs.folder import RunFolder
from letkd.runs.records import Note, Result
from letkd.runs.results import FAILED, Row
from letkd.training.launchers import FitTask, Launcher, Local, Outcome, Task, TrainTask
from letkd.training.loop import train


def run_trials(
    recipe: Recipe,
    folder: str | Path,
    n: int,
    *,
    supervision: str | Path | None = None,
    jobs: int = 1,
    save_minutes: float = 15.0,
    force: bool = False,
    log: tuple[str, ...] | None = None,
    launcher: Launcher | None = None,
) -> list[Result]:
    """Train a recipe with n seeds, each in its own `seed-…` folder; finished runs are not repeated.

    Args:
        supervision: folder of fitted supervisions; default: `folder/supervision`.
        jobs: number of seeds trained in parallel, each in its own process; 1: one after the other.
        save_minutes, force, log: as for `train`.
        launcher: runs the seeds instead of `jobs` local processes.
    """
    shared = Path(supervision or RunFolder(folder).supervision)
    runs = _seeds(recipe, Path(folder), n)
    for _, path in runs:
        refuse_link(path)
    unfinished = [(trial, path) for trial, path in runs if RunFolder(path, trial).result is None]
    if launcher is None and jobs > 1 and len(unfinished) > 1:
        launcher = Local(jobs)
    if launcher is not None and unfinished:
        _run_tasks(launcher, [FitTask((recipe,), shared)])  # once, for all seeds
        outcomes = _run_tasks(
            launcher, [TrainTask(trial, path, shared, save_minutes, force, log) for trial, path in unfinished]
        )
        if failed := {label: outcome for label, outcome in outcomes.items() if outcome.state != "done"}:
            why = "; ".join(dict.fromkeys(outcome.sentence for outcome in failed.values()))
            raise RunError(f"{', '.join(failed)} failed, the other runs finished: {why}")
    options = {"save_minutes": save_minutes, "force": force, "log": log}
    return [train(trial, path, supervision=shared, **options) for trial, path in runs]


def _seeds(recipe: Recipe, folder: Path, n: int) -> list[tuple[Recipe, Path]]:
    """The recipe with n seeds, and the folder of each."""
    first = recipe.train.seed
    if first + n > 2**32:
        raise RecipeError(f"{n} seeds from {first} on: seeds must be below 2^32; start with a smaller one")
    trials = [_with_train(recipe, seed=first + k) for k in range(n)]
    return [(trial, folder / f"seed-{trial.train.seed}") for trial in trials]


def _run_tasks(launcher: Launcher, tasks: Sequence[Task]) -> dict[str, Outcome]:
    """Run tasks; returns the outcome of each by its label."""
    return {tasks[k].label: outcome for k, outcome in launcher.run(tasks)}


@dataclass(frozen=True)
class Variant:
    """A row of a comparison: a method with its own settings.

    Args:
        name: name of its folder.
        settings: `key=value`, applied before the settings for all rows.
        title: title of the row; default: the recipe's.
    """

    name: str
    method: str
    settings: tuple[str, ...] = ()
    title: str = ""


def compare(
    pair: str | None,
    methods: Sequence[str | Variant],
    folder: str | Path,
    *,
    trials: int,
    seed: int | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    teacher_weights: str | Path | None = None,
    quick: bool = False,
    launcher: Launcher | None = None,
    log: tuple[str, ...] | None = None,
) -> list[Row]:
    """Train the pair's student with each method, on the same data, with the same teacher and fitted supervision.

    Args:
        pair: a built-in pair, or a user's TOML file; None if `overrides` name the networks and the data.
        methods: names of methods or of rows in the file, or variants of them.
        seed: first seed of every row; default: the recipe's. It does not apply to the teacher.
        preset, overrides, settings: for all rows and for the teacher; see `resolve`.
        teacher_weights: a trained teacher for all rows; default: that of each row in the file. If a row has none, the teacher is
            trained first, once.
        quick: shrink every recipe, including the teacher's, to a smoke run.
        launcher: runs methods and seeds in parallel; default: one after the other in this process.
        log: as for `train`.

    A method that does not support the pair gets a row without numbers. A failure, also of one seed, is reported, and the other methods
    run. The reason is written as a note into the method's folder, for reports.
    """
    folder = Path(folder)
    rows = []
    variants = [method if isinstance(method, Variant) else Variant(method, method) for method in methods]
    common = dict(overrides or {})
    recipes, lines = {}, set()
    for variant in variants:  # wrong names before any work
        refuse_link(folder / variant.name)
        values = [*variant.settings, *settings]
        recipes[variant.name], sources = resolve_with_sources(
            pair, method=variant.method, preset=preset, overrides=common, settings=values, quick=quick
        )
        if recipes[variant.name].train.time is not None:
            raise RecipeError(f"{variant.name} has train.time, which only `letkd train --time` plans; set train.epochs instead")
        lines.update(derived_values(recipes[variant.name], sources))
    for line in sorted(lines):
        say(line)
    if teacher_weights is not None and str(teacher_weights) != OWN and not Path(teacher_weights).is_dir():
        read_state_dict(teacher_weights)  # refuses a missing or damaged file before any work
    taught = list(variants)  # the rows that get these weights of the teacher
    if teacher_weights is None:
        taught = [v for v in variants if (teacher := recipes[v.name].teacher) is not None and teacher.weights is None]
    if teacher_weights is None and (taught or not variants):
        teacher = resolve(pair, method="teacher", preset=preset, overrides=common, settings=settings, quick=quick)
        teacher = _with_train(teacher, cache_views=None)
        say(f"training the teacher, {teacher.student.model}")
        teacher_run = RunFolder(folder / "teacher")
        refuse_link(teacher_run.path)
        rows.append(Row(teacher.title, [_train_one(teacher, teacher_run.path, launcher, log)], name="teacher"))
        teacher_weights = teacher_run.student
        variants = [variant for variant in variants if variant.name != "teacher"]  # this is its row
        recipes.pop("teacher", None)
    if teacher_weights is not None:
        weights = {**common, "teacher.weights": str(teacher_weights)}
        for variant in taught:
            values = [*variant.settings, *settings]
            recipes[variant.name] = resolve(
                pair, method=variant.method, preset=preset, overrides=weights, settings=values, quick=quick
            )
    recipes = {name: _adapt_to_cache(name, recipe) for name, recipe in recipes.items()}
    if seed is not None:
        recipes = {name: _with_train(recipe, seed=seed) for name, recipe in recipes.items()}
    shared = RunFolder(folder).supervision
    notes = {} if launcher is None else _run_in_parallel(launcher, recipes, folder, trials, shared, log)
    titles = [variant.title or recipes[variant.name].title for variant in variants]
    for k, variant in enumerate(variants, start=1):
        recipe, title, path = recipes[variant.name], titles[k - 1], folder / variant.name
        if titles.count(title) > 1:
            title = f"{title} ({variant.name})"
        if launcher is None:
            say(f"{title} ({k} of {len(variants)}): {trials} {'seed' if trials == 1 else 'seeds'}")
            note = _run_in_sequence(recipe, path, trials, shared, log)
        else:
            note = notes[variant.name]
        results = _finished(recipe, path, trials)
        RunFolder(path).keep_note(Note(_column(pair, recipe), variant.method, title, note))
        if note:
            say(f"{title} {note}")
        rows.append(Row(title, list(results.values()), note, variant.name, list(results)))
    return rows


def _with_train(recipe: Recipe, **train: object) -> Recipe:
    """The recipe with other values in `train`."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})


def _adapt_to_cache(name: str, recipe: Recipe) -> Recipe:
    """The recipe without the cache if its methods cannot use it: the teacher then runs at every step, on the same views."""
    methods = [METHODS[method] for method in recipe.methods if method in METHODS]  # an unknown one is reported by its run
    if not (recipe.train.cache_views and recipe.train.cache_teacher):
        return recipe
    if any(method.two_views for method in methods):
        say(f"{name}: needs two views of every image, but the cache has one; new views are drawn, without the cache")
        return _with_train(recipe, cache_views=None)
    if any(method.lessons is Method.lessons for method in methods):
        say(f"{name}: cannot use the cache; the teacher runs at every step, on the same views")
        return _with_train(recipe, cache_teacher=False)
    return recipe


def _train_one(recipe: Recipe, folder: Path, launcher: Launcher | None, log: tuple[str, ...] | None) -> Result:
    """Train a single run that the other runs need."""
    if launcher is not None and RunFolder(folder, recipe).result is None:
        for outcome in _run_tasks(launcher, [TrainTask(recipe, folder, log=log)]).values():
            if outcome.state != "done":
                raise RunError(f"{folder} {outcome.state}: {outcome.sentence}")
    return train(recipe, folder, log=log)


def _finished(recipe: Recipe, folder: Path, trials: int) -> dict[int, Result]:
    """The results of the finished seeds of a row; none if its folder holds another run."""
    try:
        found = {trial.train.seed: RunFolder(path, trial).result for trial, path in _seeds(recipe, folder, trials)}
    except LetkdError:
        return {}
    return {seed: result for seed, result in found.items() if result is not None}


def _run_in_sequence(recipe: Recipe, folder: Path, trials: int, shared: Path, log: tuple[str, ...] | None) -> str:
    """Train the seeds of a row; returns why one of them has no result, or an empty string."""
    try:
        run_trials(recipe, folder, trials, supervision=shared, log=log)
    except UnsupportedPair as error:
        return _unsupported(str(error))
    except OSError:
        raise  # such as a full disk: not due to the row
    except Exception as error:
        return f"{FAILED}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _run_in_parallel(
    launcher: Launcher,
    recipes: Mapping[str, Recipe],
    folder: Path,
    trials: int,
    shared: Path,
    log: tuple[str, ...] | None,
) -> dict[str, str]:
    """Train all unfinished runs; returns for each row why it has no numbers, or an empty string.

    The first seed of all rows comes first, so that an interrupted comparison has about as many seeds in every row.
    """
    tasks: dict[str, list[TrainTask]] = {}
    notes: dict[str, str] = {}
    for name, recipe in recipes.items():
        try:
            runs = [(trial, at) for trial, at in _seeds(recipe, folder / name, trials) if RunFolder(at, trial).result is None]
        except LetkdError as error:  # the folder of this row holds another run, or a damaged one
            runs, notes[name] = [], f"{FAILED}: {type(error).__name__}: {str(error).splitlines()[0]}"
        tasks[name] = [TrainTask(trial, at, shared, log=log) for trial, at in runs]
    if with_fits := tuple(recipe for name, recipe in recipes.items() if recipe.methods and tasks[name]):
        _run_tasks(launcher, [FitTask(with_fits, shared)])
    by_seed = sorted((task for row_tasks in tasks.values() for task in row_tasks), key=lambda task: task.recipe.train.seed)
    outcomes = _run_tasks(launcher, by_seed)
    for name, row_tasks in tasks.items():
        bad = next((outcomes[task.label] for task in row_tasks if outcomes[task.label].state != "done"), None)
        if bad is not None:
            notes[name] = _unsupported(bad.sentence) if bad.state == "unsupported" else f"{FAILED}: {bad.sentence}"
    return dict.fromkeys(recipes, "") | notes


def _unsupported(why: str) -> str:
    return f"does not support this pair: {why}"


def _column(pair: str | None, recipe: Recipe) -> str:
    """The pair's name in reports."""
    if pair is not None and not pair.endswith(".toml"):
        return pair
    return f"{recipe.data.name}/{recipe.teacher.model}-{recipe.student.model}" if recipe.teacher else recipe.data.name
