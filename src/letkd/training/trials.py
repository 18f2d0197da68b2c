"""Several seeds of one recipe, and several methods side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from letkd.errors import LetkdError, RecipeError, RunError, UnsupportedPair
from letkd.files import refuse_link
from letkd.methods import METHODS
from letkd.methods.base import Method
from letkd.progress import say
from letkd.recipes import Recipe, resolve, resolve_with_sources, scaling
from letkd.runs.folder import RunFolder
from letkd.runs.records import Note, Result
from letkd.runs.results import Row
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
    """The recipe with n seeds, each in its own `seed-…` folder; finished ones are not run again.

    Args:
        supervision: folder of fitted supervisions; `folder/supervision` where not given.
        jobs: seeds trained at once, each in a process of its own; one after the other where it is 1.
        save_minutes, force, log: as for `train`.
        launcher: runs the seeds, instead of `jobs` processes here.
    """
    shared = Path(supervision or RunFolder(folder).supervision)
    runs = _seeds(recipe, Path(folder), n)
    for _, path in runs:
        refuse_link(path)
    left = [(trial, path) for trial, path in runs if RunFolder(path, trial).result is None]
    if launcher is None and jobs > 1 and len(left) > 1:
        launcher = Local(jobs)
    if launcher is not None and left:
        _launched(launcher, [FitTask((recipe,), shared)])  # once, for all of them
        outcomes = _launched(launcher, [TrainTask(trial, path, shared, save_minutes, force, log) for trial, path in left])
        if failed := {label: outcome for label, outcome in outcomes.items() if outcome.state != "done"}:
            why = "; ".join(dict.fromkeys(outcome.sentence for outcome in failed.values()))
            raise RunError(f"{', '.join(failed)} failed, the others ended: {why}")
    how = {"save_minutes": save_minutes, "force": force, "log": log}
    return [train(trial, path, supervision=shared, **how) for trial, path in runs]


def _seeds(recipe: Recipe, folder: Path, n: int) -> list[tuple[Recipe, Path]]:
    """The recipe with n seeds, and the folder of each."""
    first = recipe.train.seed
    if first + n > 2**32:
        raise RecipeError(f"{n} seeds from {first} on: seeds are below 2^32; begin with a smaller one")
    trials = [_with(recipe, seed=first + k) for k in range(n)]
    return [(trial, folder / f"seed-{trial.train.seed}") for trial in trials]


def _launched(launcher: Launcher, tasks: Sequence[Task]) -> dict[str, Outcome]:
    """What became of each task, by its label."""
    return {tasks[k].label: outcome for k, outcome in launcher.run(tasks)}


@dataclass(frozen=True)
class Variant:
    """A row of a comparison that is a method with settings of its own.

    Args:
        name: of its folder.
        settings: `key=value`, before those that hold for all rows.
        title: of the row; the recipe's where it has none.
    """

    name: str
    method: str
    settings: tuple[str, ...] = ()
    title: str = ""


def compare(
    pair: str,
    methods: Sequence[str | Variant],
    folder: str | Path,
    *,
    trials: int,
    preset: str | None = None,
    settings: Sequence[str] = (),
    teacher_weights: str | Path | None = None,
    quick: bool = False,
    launcher: Launcher | None = None,
    log: tuple[str, ...] | None = None,
) -> list[Row]:
    """The pair's student by each method, on the same data, from the same teacher and the same fitted supervision.

    Args:
        pair: of the package, or a TOML file of the user's own.
        methods: names of methods or of the file's own rows, or variants of them.
        preset: settings of training, for all rows and the teacher's training; see `resolve`.
        teacher_weights: a trained teacher; if omitted, the file's, and if it names none, one is trained first.
        quick: shrink every recipe to a smoke run, the teacher's too.
        launcher: runs methods and seeds at once; one after the other in this process if omitted.
        log: as for `train`.

    A method that cannot serve the pair gets a row without numbers; one that fails is reported, and the rest go on. Why it has
    no numbers is kept as a note in its folder, for reports.
    """
    folder = Path(folder)
    rows = []
    variants = [method if isinstance(method, Variant) else Variant(method, method) for method in methods]
    recipes, lines = {}, set()
    for variant in variants:  # wrong names before any work
        refuse_link(folder / variant.name)
        values = [*variant.settings, *settings]
        recipes[variant.name], sources = resolve_with_sources(
            pair, method=variant.method, preset=preset, settings=values, quick=quick
        )
        lines.add(scaling(recipes[variant.name], sources))
    for line in sorted(lines - {None}):
        say(line)
    if teacher_weights is None:
        teacher_weights = next((r.teacher.weights for r in recipes.values() if r.teacher and r.teacher.weights), None)
    if teacher_weights is None and (not recipes or any(recipe.teacher for recipe in recipes.values())):
        teacher = _with(resolve(pair, method="teacher", preset=preset, settings=settings, quick=quick), cache_views=None)
        say(f"training the teacher of {pair}")
        own = RunFolder(folder / "teacher")
        refuse_link(own.path)
        rows.append(Row(teacher.title, [_alone(teacher, own.path, launcher, log)], name="teacher"))
        teacher_weights = own.student
    if teacher_weights is not None:
        weights = {"teacher.weights": str(teacher_weights)}
        for variant in variants:
            values = [*variant.settings, *settings]
            recipes[variant.name] = resolve(
                pair, method=variant.method, preset=preset, overrides=weights, settings=values, quick=quick
            )
    recipes = {name: _as_cached(name, recipe) for name, recipe in recipes.items()}
    shared = RunFolder(folder).supervision
    notes = {} if launcher is None else _at_once(launcher, recipes, folder, trials, shared, log)
    for k, variant in enumerate(variants, start=1):
        recipe = recipes[variant.name]
        title, path = variant.title or recipe.title, folder / variant.name
        if launcher is None:
            say(f"{title} ({k} of {len(variants)}): {trials} seeds")
            results, note = _in_turn(recipe, path, trials, shared, log)
        else:
            note = notes[variant.name]
            found = [] if note else [RunFolder(at, trial).result for trial, at in _seeds(recipe, path, trials)]
            results = [result for result in found if result is not None]
        RunFolder(path).keep_note(Note(_column(pair, recipe), variant.method, title, note))
        if note:
            say(f"{title} {note}")
        seeds = [trial.train.seed for trial, _ in _seeds(recipe, path, trials)]
        rows.append(Row(title, results, note, variant.name, seeds))
    return rows


def _with(recipe: Recipe, **train: object) -> Recipe:
    """The recipe with other values in `train`."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})


def _as_cached(name: str, recipe: Recipe) -> Recipe:
    """The recipe as its methods can use a cache: one that no cache serves runs the teacher at every step, on the same views."""
    methods = [METHODS[method] for method in recipe.methods]
    if not (recipe.train.cache_views and recipe.train.cache_teacher):
        return recipe
    if any(method.two_views for method in methods):
        say(f"{name}: it needs two views of every image, and fixed views are one; it gets fresh ones, without the cache")
        return _with(recipe, cache_views=None)
    if any(method.lessons is Method.lessons for method in methods):
        say(f"{name}: no cache serves it; the teacher runs at every step, on the same views")
        return _with(recipe, cache_teacher=False)
    return recipe


def _alone(recipe: Recipe, folder: Path, launcher: Launcher | None, log: tuple[str, ...] | None) -> Result:
    """One run that the others need."""
    if launcher is not None and RunFolder(folder, recipe).result is None:
        for outcome in _launched(launcher, [TrainTask(recipe, folder, log=log)]).values():
            if outcome.state != "done":
                raise RunError(f"{folder} {outcome.state}: {outcome.sentence}")
    return train(recipe, folder, log=log)


def _in_turn(recipe: Recipe, folder: Path, trials: int, shared: Path, log: tuple[str, ...] | None) -> tuple[list[Result], str]:
    """The results of a row, or why it has none."""
    try:
        return run_trials(recipe, folder, trials, supervision=shared, log=log), ""
    except UnsupportedPair as error:
        return [], _unserved(str(error))
    except (LetkdError, RuntimeError, ArithmeticError, ValueError, TypeError, LookupError) as error:
        return [], f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _at_once(
    launcher: Launcher,
    recipes: Mapping[str, Recipe],
    folder: Path,
    trials: int,
    shared: Path,
    log: tuple[str, ...] | None,
) -> dict[str, str]:
    """Train all seeds of all rows that are not finished; gives for each row why it has no numbers, or nothing."""
    tasks: dict[str, list[TrainTask]] = {}
    for name, recipe in recipes.items():
        runs = _seeds(recipe, folder / name, trials)
        tasks[name] = [TrainTask(trial, at, shared, log=log) for trial, at in runs if RunFolder(at, trial).result is None]
    if with_fits := tuple(recipe for name, recipe in recipes.items() if recipe.methods and tasks[name]):
        _launched(launcher, [FitTask(with_fits, shared)])
    outcomes = _launched(launcher, [task for held in tasks.values() for task in held])
    notes = {}
    for name, held in tasks.items():
        bad = next((outcomes[task.label] for task in held if outcomes[task.label].state != "done"), None)
        notes[name] = (
            "" if bad is None else _unserved(bad.sentence) if bad.state == "unsupported" else f"failed: {bad.sentence}"
        )
    return notes


def _unserved(why: str) -> str:
    return f"does not serve this pair: {why}"


def _column(pair: str, recipe: Recipe) -> str:
    """The pair's name in reports."""
    if not pair.endswith(".toml"):
        return pair
    return f"{recipe.data.name}/{recipe.teacher.model}-{recipe.student.model}" if recipe.teacher else recipe.data.name
