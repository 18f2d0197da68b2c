"""Several seeds of one recipe, and several methods side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from letkd.errors import LetkdError, RecipeError, UnsupportedPair
from letkd.files import refuse_link
from letkd.progress import say
from letkd.recipes import Recipe, resolve, resolve_with_sources, scaling
from letkd.runs.folder import RunFolder
from letkd.runs.records import Note, Result
from letkd.runs.results import Row
from letkd.train.build import build_distiller, fit, read_data
from letkd.train.loop import train
from letkd.train.spread import spread


def run_trials(
    recipe: Recipe,
    folder: str | Path,
    n: int,
    *,
    supervision: str | Path | None = None,
    jobs: int = 1,
    save_minutes: float = 15.0,
    force: bool = False,
) -> list[Result]:
    """The recipe with n seeds, each in its own `seed-…` folder; finished ones are not run again.

    Args:
        supervision: folder of fitted supervisions; `folder/supervision` where not given.
        jobs: seeds trained at once, each in a process of its own; one after the other where it is 1.
        save_minutes, force: as for `train`.
    """
    shared = Path(supervision or RunFolder(folder).supervision)
    runs = []
    if recipe.train.seed + n > 2**32:
        raise RecipeError(f"{n} seeds from {recipe.train.seed} on: seeds are below 2^32; begin with a smaller one")
    for seed in range(recipe.train.seed, recipe.train.seed + n):
        trial = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})
        runs.append((trial, Path(folder) / f"seed-{seed}", shared))
        refuse_link(runs[-1][1])
    left = [run for run in runs if RunFolder(run[1], run[0]).result is None]
    if jobs > 1 and len(left) > 1:
        data = read_data(recipe)
        fit(build_distiller(recipe, data), recipe, data, shared)  # once, for all of them
        spread(left, jobs, save_minutes=save_minutes, force=force)
    return [train(trial, path, supervision=shared, save_minutes=save_minutes, force=force) for trial, path, _ in runs]


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
    settings: Sequence[str] = (),
    teacher_weights: str | Path | None = None,
    quick: bool = False,
) -> list[Row]:
    """The pair's student by each method, on the same data, from the same teacher and the same fitted supervision.

    Args:
        methods: names of methods, or variants of them.
        teacher_weights: a trained teacher; where there is none, it is trained first.
        quick: shrink every recipe to a smoke run, the teacher's too.

    A method that cannot serve the pair gets a row without numbers; one that fails is reported, and the rest go on. Why it has
    no numbers is kept as a note in its folder, for reports.
    """
    folder = Path(folder)
    rows = []
    variants = [method if isinstance(method, Variant) else Variant(method, method) for method in methods]
    lines = set()
    for variant in variants:  # wrong names before any work
        refuse_link(folder / variant.name)
        values = [*variant.settings, *settings]
        lines.add(scaling(*resolve_with_sources(pair, method=variant.method, settings=values, quick=quick)))
    for line in sorted(lines - {None}):
        say(line)
    if teacher_weights is None:
        teacher = resolve(pair, method="teacher", settings=settings, quick=quick)
        say(f"training the teacher of {pair}")
        own = RunFolder(folder / "teacher")
        refuse_link(own.path)
        rows.append(Row(teacher.title, [train(teacher, own.path)]))
        teacher_weights = own.student
    for k, variant in enumerate(variants, start=1):
        weights = {"teacher.weights": str(teacher_weights)}
        values = [*variant.settings, *settings]
        recipe = resolve(pair, method=variant.method, overrides=weights, settings=values, quick=quick)
        title = variant.title or recipe.title
        say(f"{title} ({k} of {len(variants)}): {trials} seeds")
        results, note = [], ""
        try:
            results = run_trials(recipe, folder / variant.name, trials, supervision=_supervision(folder, variant))
        except UnsupportedPair as error:
            note = f"does not serve this pair: {error}"
        except (LetkdError, RuntimeError, ArithmeticError, ValueError, TypeError, LookupError) as error:
            note = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        RunFolder(folder / variant.name).keep_note(Note(pair, variant.method, title, note))
        if note:
            say(f"{title} {note}")
        rows.append(Row(title, results, note))
    return rows


def _supervision(folder: Path, variant: Variant) -> Path:
    """Rows with settings of their own keep their fits apart: another K would be fitted anew in each turn."""
    return RunFolder(folder / variant.name if variant.settings else folder).supervision
