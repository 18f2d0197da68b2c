"""Run folders for a report: found, read, and grouped into rows (methods) and columns (pairs) of the tables."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from letkd.errors import LetkdError, RunError
from letkd.files import must_be_utf8
from letkd.progress import say
from letkd.recipes import Recipe, list_methods, list_pairs, resolve
from letkd.recipes.tables import as_toml, dotted, leaves
from letkd.report.paper import PaperResult, paper_result, table_position
from letkd.runs.folder import RunFolder, Tell
from letkd.runs.records import Note, Result
from letkd.runs.study_file import is_trial
from letkd.training.inputs import read_inputs

What = TypeVar("What")
Pair = tuple[str, str, str]  # data, teacher and student

_SAME_ROW = {"train.seed", "train.validate_every", "data.root"}  # may differ between the runs of a row
# Keys that may differ from a cell's recipe in the same experiment: also paths of files and the title.
_CIRCUMSTANCES = {*_SAME_ROW, "teacher.weights", "student.weights", "title"}


@dataclass(frozen=True, eq=False)
class Run:
    """A snapshot of one run.

    Args:
        result: None if the run is not finished.
        rows: rows of its log, one per epoch.
        inputs: fingerprints of its images; empty if unknown.
    """

    path: Path
    recipe: Recipe
    result: Result | None
    rows: list[dict[str, Any]]
    inputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in their seed: one method on one pair.

    Args:
        title: name of the row.
        pair: name of the column; `data/teacher-student` if there is such a recipe.
        method: name of the method's recipe; None for a custom recipe.
        changed: keys and values that differ from the recipe of the cell.
        note: why a comparison has no runs for it; empty otherwise.
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
        """Name for files and for the page."""
        text = f"{self.pair} {self.title}".lower()
        return "-".join("".join(c if c.isalnum() else " " for c in text).split())

    @property
    def paper(self) -> PaperResult | None:
        return None if self.method is None else paper_result(f"{self.pair}/{self.method}")


def find_runs(paths: Iterable[str | Path], *, tell: Tell = say) -> list[Run]:
    """All runs in these folders and their sub-folders, without duplicates.

    Args:
        tell: called with a message for each damaged run, or part of a run, that is skipped.
    """
    found: dict[Path, Run | None] = {}
    for path in map(Path, paths):
        if not must_be_utf8(path).is_dir():
            raise RunError(f"{path} is not a folder; name a run folder, or a folder that contains runs")
        folders = [folder for folder in RunFolder.below(path) if not is_trial(folder)]
        if not folders and not RunFolder.noted_below(path):
            raise RunError(
                f"{path} contains no run: there is no {RunFolder.RECIPE} in it or its sub-folders; name the folder given as `out=`"
            )
        for folder in folders:
            if folder.resolve() not in found:
                found[folder.resolve()] = _attempt(lambda folder=folder: read_run(folder, tell=tell), tell)
    return [run for run in found.values() if run is not None]


def read_run(path: Path, *, tell: Tell = say) -> Run:
    """Read a run from disk; a damaged result counts as missing."""
    folder = RunFolder(path)
    return Run(
        folder.path, folder.recipe, _attempt(lambda: folder.result, tell), folder.rows(tell=tell), read_inputs(folder) or {}
    )


def _attempt(read: Callable[[], What], tell: Tell) -> What | None:
    try:
        return read()
    except LetkdError as error:
        tell(f"{str(error).splitlines()[0]}; the report skips it")
        return None


def find_groups(paths: Sequence[str | Path], *, tell: Tell = say) -> list[Group]:
    """The runs in these folders as rows: pairs sorted by name, methods in the paper's order.

    Args:
        tell: as for `find_runs`.
    """
    messages: list[str] = []

    def note(line: str) -> None:
        messages.append(line)
        tell(line)

    runs = find_runs(paths, tell=note)
    by_recipe: dict[str, list[Run]] = {}
    for run in runs:
        by_recipe.setdefault(_key(run.recipe), []).append(run)
    alike = [part for same in by_recipe.values() for part in _with_same_images(same)]
    recipes = [same[0].recipe for same in alike]
    known = _known_pairs() | _own_pairs(recipes)
    certain = {pairs[0] for recipe in recipes if len(pairs := _pairs_of(recipe, known)) == 1}
    groups: list[Group] = []
    for same in alike:
        recipe = same[0].recipe
        method = _method_of(recipe)
        pairs = _pairs_of(recipe, known)
        for pair in [name for name in pairs if name in certain] or pairs[:1]:
            title = recipe.title or "own recipe"
            runs_by_seed = sorted(same, key=lambda run: run.recipe.train.seed)
            groups.append(Group(title, pair, method, runs_by_seed, _changed(recipe, pair, method)))
    groups = _with_own_titles(_with_own_images(groups))
    groups += _without_runs(paths, groups, note)
    if not groups:
        raise RunError(f"no run to report on: {'; '.join(messages[:2])}")
    return sorted(groups, key=lambda group: (group.pair, table_position(group.method), group.title))


def _key(recipe: Recipe) -> str:
    values = _values(recipe)
    return json.dumps({key: values[key] for key in sorted(values) if key not in _SAME_ROW})


def _with_same_images(runs: Sequence[Run]) -> list[list[Run]]:
    """Split runs of one recipe by their training and test images; runs whose images are unknown join the first."""
    parts: dict[tuple[str, ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: not run.inputs):
        images = tuple(run.inputs.get(name, "") for name in ("training images", "test images"))
        parts.setdefault(images if run.inputs else next(iter(parts), images), []).append(run)
    return list(parts.values())


def _with_own_images(groups: list[Group]) -> list[Group]:
    """Columns of one data set only: a column whose rows have different images, as folders of images do, becomes one per root."""
    roots: dict[str, dict[str, str]] = {}
    for group in groups:
        if images := _images(group):
            roots.setdefault(group.pair, {}).setdefault(images, group.runs[0].recipe.data.root or "default root")
    return [
        replace(group, pair=f"{group.pair}, {found[images]}")
        if (images := _images(group)) and len(found := roots[group.pair]) > 1
        else group
        for group in groups
    ]


def _images(group: Group) -> str:
    """Fingerprint of a group's test images, or of its training images if it has no test images; empty if unknown."""
    result = group.runs[0].result
    name = "training images" if result is not None and result.last_test is None else "test images"
    return next((run.inputs[name] for run in group.runs if name in run.inputs), "")


def _values(recipe: Recipe) -> dict[str, Any]:
    return {dotted(path): as_toml(value) for path, value in leaves(recipe.model_dump(exclude_none=True))}


@cache
def _titles() -> dict[str, str]:
    pair = list_pairs()[0]
    return {resolve(pair, method=method).title: method for method in list_methods()}


@cache
def _known_pairs() -> dict[str, Pair]:
    """All pairs that have a recipe."""
    found = {}
    for name in list_pairs():
        recipe = resolve(name, method="ce")
        found[name] = (recipe.data.name, recipe.teacher.model if recipe.teacher else "", recipe.student.model)
    return found


def _method_of(recipe: Recipe) -> str | None:
    return _titles().get(recipe.title)


def _own_pairs(recipes: Iterable[Recipe]) -> dict[str, Pair]:
    """The pairs of these runs that have no recipe, named by their networks."""
    found: dict[str, Pair] = {}
    for recipe in recipes:
        if recipe.teacher is not None:
            pair = (recipe.data.name, recipe.teacher.model, recipe.student.model)
            if pair not in _known_pairs().values():
                found[f"{pair[0]}/{pair[1]}-{pair[2]}"] = pair
    return found


def _pairs_of(recipe: Recipe, known: Mapping[str, Pair]) -> list[str]:
    """The pairs that a run may belong to; several if the recipe does not name the teacher or the student of the pair."""
    data, network, teacher = recipe.data.name, recipe.student.model, recipe.teacher.model if recipe.teacher else None
    alone = _method_of(recipe) == "teacher"
    fits = [
        name
        for name, (images, big, small) in known.items()
        if images == data and (big == network if alone else small == network and teacher in (None, big))
    ]
    return fits or [f"{data}/{network}"]


def _changed(recipe: Recipe, pair: str, method: str | None) -> list[str]:
    """Settings that differ from the recipe of the run's cell, as `key = value`."""
    if method is None or pair not in _known_pairs():
        return []
    cell = _values(resolve(pair, method=method))
    own = _values(recipe)
    keys = [key for key in sorted(own.keys() | cell.keys()) if key not in _CIRCUMSTANCES and own.get(key) != cell.get(key)]
    return [f"{key} = {own.get(key, 'not set')}" for key in keys]


def _with_own_titles(groups: list[Group]) -> list[Group]:
    """Append the differing settings to the titles of rows that have the same title on the same pair."""
    alike: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        alike.setdefault((group.pair, group.title), []).append(group)
    named = []
    for same in alike.values():
        values = [_values(group.runs[0].recipe) for group in same]
        keys = sorted({key for one in values for key in one})
        differing = [key for key in keys if key not in _SAME_ROW and len({one.get(key) for one in values}) > 1]
        for group, own in zip(same, values, strict=True):
            what = ", ".join(f"{key.split('.', 1)[-1]} {own.get(key, 'not set')}" for key in differing)
            named.append(replace(group, title=f"{group.title} ({what})" if what else group.title))
    return named


def _without_runs(paths: Sequence[str | Path], groups: list[Group], tell: Tell) -> list[Group]:
    """Rows that a comparison could not run, with the reason."""
    found = {}
    for folder in (folder for path in paths for folder in RunFolder.noted_below(Path(path))):
        note: Note | None = _attempt(lambda folder=folder: RunFolder(folder).note, tell)
        if note is not None and not any((note.pair, note.method) == (other.pair, other.method) for other in groups):
            found[folder.resolve()] = Group(note.title, note.pair, note.method, [], note=note.note)
    return list(found.values())
