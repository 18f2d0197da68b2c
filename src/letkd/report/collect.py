"""Run folders as a report sees them: found on disk, read, and grouped into rows (a method) and columns (a pair) of the tables."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from letkd.errors import LetkdError, RunError
from letkd.files import must_be_utf8
from letkd.progress import say
from letkd.recipes import Recipe, list_methods, list_pairs, resolve
from letkd.recipes.tables import as_toml, dotted, leaves
from letkd.report.paper import PaperResult, paper_result, place
from letkd.runs.folder import RunFolder, Tell
from letkd.runs.records import Note, Result
from letkd.runs.study import is_trial

What = TypeVar("What")
Pair = tuple[str, str, str]  # data, teacher and student

# What may differ from a cell's recipe without making it another experiment: where files lie, and which trial it is.
_CIRCUMSTANCES = {"data.root", "teacher.weights", "student.weights", "train.seed", "title"}


@dataclass(frozen=True, eq=False)
class Run:
    """One run as it was when it was read. `result` is None while it is not finished; `rows` are those of its log, by epoch."""

    path: Path
    recipe: Recipe
    result: Result | None
    rows: list[dict[str, Any]]

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)


@dataclass(frozen=True, eq=False)
class Group:
    """The runs that differ in their seed alone: a method on a pair.

    Args:
        title: the row's name.
        pair: the column's name; `data/teacher-student` where there is such a recipe.
        method: the name of the method's recipe, None for one of the user's own.
        changed: keys, with their values, in which the recipe differs from that of its cell.
        note: why there are no runs, where a comparison said so.
    """

    title: str
    pair: str
    method: str | None
    runs: Sequence[Run]
    changed: Sequence[str] = ()
    note: str = ""

    @property
    def results(self) -> list[Result]:
        return [run.result for run in self.runs if run.result is not None]

    @property
    def key(self) -> str:
        """A name for files and for the page."""
        text = f"{self.pair} {self.title}".lower()
        return "-".join("".join(c if c.isalnum() else " " for c in text).split())

    @property
    def paper(self) -> PaperResult | None:
        return None if self.method is None else paper_result(f"{self.pair}/{self.method}")


def find_runs(paths: Iterable[str | Path], *, tell: Tell = say) -> list[Run]:
    """Every run in these folders or below them, each once.

    Args:
        tell: gets a line for each run, or part of one, that is damaged and left out.
    """
    found: dict[Path, Run | None] = {}
    for path in map(Path, paths):
        if not must_be_utf8(path).is_dir():
            raise RunError(f"{path} is no folder; name a run folder, or one with runs below it")
        folders = [folder for folder in RunFolder.below(path) if not is_trial(folder)]
        if not folders and not RunFolder.noted_below(path):
            raise RunError(
                f"{path} holds no run: there is no {RunFolder.RECIPE} in it or below; name the folder that `out=` named"
            )
        for folder in folders:
            if folder.resolve() not in found:
                found[folder.resolve()] = _attempt(lambda folder=folder: read_run(folder, tell=tell), tell)
    return [run for run in found.values() if run is not None]


def read_run(path: Path, *, tell: Tell = say) -> Run:
    """A run as it is on disk; a result that is damaged counts as none."""
    folder = RunFolder(path)
    return Run(folder.path, folder.recipe, _attempt(lambda: folder.result, tell), folder.rows(tell=tell))


def _attempt(read: Callable[[], What], tell: Tell) -> What | None:
    try:
        return read()
    except LetkdError as error:
        tell(f"{str(error).splitlines()[0]}; the report leaves it out")
        return None


def find_groups(paths: Sequence[str | Path], *, tell: Tell = say) -> list[Group]:
    """The runs below these folders as rows: pairs in the order of their names, methods in the paper's.

    Args:
        tell: as for `find_runs`.
    """
    told: list[str] = []

    def note(line: str) -> None:
        told.append(line)
        tell(line)

    runs = find_runs(paths, tell=note)
    by_recipe: dict[str, list[Run]] = {}
    for run in runs:
        by_recipe.setdefault(_key(run.recipe), []).append(run)
    recipes = [held[0].recipe for held in by_recipe.values()]
    known = _known_pairs() | _own_pairs(recipes)
    sure = {places[0] for recipe in recipes if len(places := _pairs_of(recipe, known)) == 1}
    groups: list[Group] = []
    for held in by_recipe.values():
        recipe = held[0].recipe
        method = _method_of(recipe)
        places = _pairs_of(recipe, known)
        for pair in [name for name in places if name in sure] or places[:1]:
            title = recipe.title or "own recipe"
            runs_by_seed = sorted(held, key=lambda run: run.recipe.train.seed)
            groups.append(Group(title, pair, method, runs_by_seed, _changed(recipe, pair, method)))
    groups = _with_own_titles(groups)
    groups += _without_runs(paths, groups, note)
    if not groups:
        raise RunError(f"there is no run to report on: {'; '.join(told[:2])}")
    return sorted(groups, key=lambda group: (group.pair, place(group.method), group.title))


def _key(recipe: Recipe) -> str:
    values = _values(recipe)
    return json.dumps({key: values[key] for key in sorted(values) if key not in ("train.seed", "data.root")})


def _values(recipe: Recipe) -> dict[str, Any]:
    return {dotted(path): as_toml(value) for path, value in leaves(recipe.model_dump(exclude_none=True))}


@cache
def _titles() -> dict[str, str]:
    pair = list_pairs()[0]
    return {resolve(pair, method=method).title: method for method in list_methods()}


@cache
def _known_pairs() -> dict[str, Pair]:
    """Every pair that has a recipe."""
    found = {}
    for name in list_pairs():
        recipe = resolve(name, method="ce")
        found[name] = (recipe.data.name, recipe.teacher.model if recipe.teacher else "", recipe.student.model)
    return found


def _method_of(recipe: Recipe) -> str | None:
    return _titles().get(recipe.title)


def _own_pairs(recipes: Iterable[Recipe]) -> dict[str, Pair]:
    """The pairs of these runs that have no recipe, each by its networks' names."""
    found: dict[str, Pair] = {}
    for recipe in recipes:
        if recipe.teacher is not None:
            pair = (recipe.data.name, recipe.teacher.model, recipe.student.model)
            if pair not in _known_pairs().values():
                found[f"{pair[0]}/{pair[1]}-{pair[2]}"] = pair
    return found


def _pairs_of(recipe: Recipe, known: Mapping[str, Pair]) -> list[str]:
    """The pairs that a run may be a cell of: several where the recipe does not say which teacher or student goes with it."""
    data, network, teacher = recipe.data.name, recipe.student.model, recipe.teacher.model if recipe.teacher else None
    alone = _method_of(recipe) == "teacher"
    fits = [
        name
        for name, (images, big, small) in known.items()
        if images == data and (big == network if alone else small == network and teacher in (None, big))
    ]
    return fits or [f"{data}/{network}"]


def _changed(recipe: Recipe, pair: str, method: str | None) -> list[str]:
    """What a run has other than its cell's recipe, as `key = value`."""
    if method is None or pair not in _known_pairs():
        return []
    cell = _values(resolve(pair, method=method))
    own = _values(recipe)
    keys = [key for key in sorted(own.keys() | cell.keys()) if key not in _CIRCUMSTANCES and own.get(key) != cell.get(key)]
    return [f"{key} = {own.get(key, 'not set')}" for key in keys]


def _with_own_titles(groups: list[Group]) -> list[Group]:
    """Rows of one name on one pair get what sets them apart behind it."""
    alike: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        alike.setdefault((group.pair, group.title), []).append(group)
    named = []
    for held in alike.values():
        values = [_values(group.runs[0].recipe) for group in held]
        keys = sorted({key for one in values for key in one})
        apart = [key for key in keys if key not in ("train.seed", "data.root") and len({one.get(key) for one in values}) > 1]
        for group, own in zip(held, values, strict=True):
            what = ", ".join(f"{key.split('.', 1)[-1]} {own.get(key, 'not set')}" for key in apart)
            named.append(replace(group, title=f"{group.title} ({what})" if what else group.title))
    return named


def _without_runs(paths: Sequence[str | Path], groups: list[Group], tell: Tell) -> list[Group]:
    """Rows for what a comparison could not run, and why."""
    found = {}
    for folder in (folder for path in paths for folder in RunFolder.noted_below(Path(path))):
        note: Note | None = _attempt(lambda folder=folder: RunFolder(folder).note, tell)
        if note is not None and not any((note.pair, note.method) == (other.pair, other.method) for other in groups):
            found[folder.resolve()] = Group(note.title, note.pair, note.method, [], note=note.note)
    return list(found.values())
