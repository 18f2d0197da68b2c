"""Run folders for a report: found, read, and grouped into rows (methods) and columns (pairs) of the tables."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from letkd.errors import LetkdError, RecipeError, RunError
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

_SAME_ROW = {"train.seed", "train.validate_every", "data.root", "data.workers"}  # may differ between the runs of a row
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
        note: why a comparison lacks runs of it; empty otherwise.
        twin: number among the groups whose names give the same key.
    """

    title: str
    pair: str
    method: str | None
    runs: Sequence[Run]
    changed: Sequence[str] = ()
    note: str = ""
    twin: int = 0

    @property
    def results(self) -> list[Result]:
        return [run.result for run in self.runs if run.result is not None]

    @property
    def key(self) -> str:
        """Name for files and for the page; no two groups have the same."""
        text = f"{self.pair} {self.title}".lower()
        name = "-".join("".join(c if c.isalnum() else " " for c in text).split())
        return f"{name}--{self.twin + 1}" if self.twin else name

    @property
    def names(self) -> set[str]:
        """Names of the row: its title, its method, and the folder of its seeds."""
        folders = {run.path.parent.name for run in self.runs if run.path.name == f"seed-{run.recipe.train.seed}"}
        return {self.title, *folders, *([] if self.method is None else [self.method])}

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
    teachers = {
        run.recipe.teacher.weights: run.inputs["teacher"] for run in runs if run.recipe.teacher and "teacher" in run.inputs
    }
    for run in runs:
        by_recipe.setdefault(_key(run, teachers), []).append(run)
    alike = [part for same in by_recipe.values() for part in _with_same_inputs(same)]
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
    groups = _with_notes(paths, _with_own_titles(_with_own_images(groups)), note)
    if not groups:
        raise RunError(f"no run to report on: {'; '.join(messages[:2])}")
    return _with_own_keys(sorted(groups, key=lambda group: (group.pair, table_position(group.method), group.title)))


def _with_own_keys(groups: Sequence[Group]) -> list[Group]:
    keys = [group.key for group in groups]
    return [replace(group, twin=keys[:k].count(group.key)) for k, group in enumerate(groups)]


def _key(run: Run, teachers: Mapping[str | None, str]) -> str:
    """What the runs of a row have in common; a teacher counts by its fingerprint, if known by file, and otherwise by file."""
    values = {key: value for key, value in _values(run.recipe).items() if key not in _SAME_ROW}
    if run.recipe.teacher is not None and (weights := run.recipe.teacher.weights) is not None:
        values["teacher.weights"] = run.inputs.get("teacher") or teachers.get(weights, weights)
    return json.dumps(dict(sorted(values.items())))


INPUTS = ("training images", "test images", "teacher")


def _with_same_inputs(runs: Sequence[Run]) -> list[list[Run]]:
    """Split runs of one recipe by their images and teacher; runs whose inputs are unknown join the first."""
    parts: dict[tuple[str, ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: not run.inputs):
        inputs = tuple(run.inputs.get(name, "") for name in INPUTS)
        parts.setdefault(inputs if run.inputs else next(iter(parts), inputs), []).append(run)
    return list(parts.values())


def _with_own_images(groups: list[Group]) -> list[Group]:
    """Columns of one data set only: a column whose rows have different images, as folders of images do, becomes one per data set."""
    roots: dict[str, dict[str, str]] = {}
    for group in groups:
        if images := _images(group):
            roots.setdefault(group.pair, {}).setdefault(images, group.runs[0].recipe.data.root or "default root")
    for found in roots.values():
        names = list(found.values())
        found.update({images: f"{root}, images {images[:6]}" for images, root in found.items() if names.count(root) > 1})
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
    pair, found = list_pairs()[0], {}
    for method in list_methods():
        try:
            found[resolve(pair, method=method).title] = method
        except RecipeError as error:  # a plugin's recipe with a wrong key
            say(f"{method} is left out of the report: {error}")
    return found


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
    """Append the differing settings, or else inputs, to the titles of rows that have the same title on the same pair."""
    alike: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        alike.setdefault((group.pair, group.title), []).append(group)
    named = []
    for same in alike.values():
        values = [_values(group.runs[0].recipe) for group in same]
        keys = sorted({key for one in values for key in one})
        differing = [key for key in keys if key not in _SAME_ROW and len({one.get(key) for one in values}) > 1]
        inputs = [group.runs[0].inputs for group in same]
        other = [name for name in INPUTS if len({one.get(name) for one in inputs}) > 1] if not differing else []
        for group, own, read in zip(same, values, inputs, strict=True):
            shown = [f"{key.split('.', 1)[-1]} {own.get(key, 'not set')}" for key in differing]
            what = ", ".join(shown + [f"{name} {read.get(name, 'unknown')[:6]}" for name in other])
            named.append(replace(group, title=f"{group.title} ({what})" if what else group.title))
    return named


def _with_notes(paths: Sequence[str | Path], groups: list[Group], tell: Tell) -> list[Group]:
    """The groups with the notes of a comparison on missing runs; a row of which no run is there is added."""
    found = list(groups)
    for folder in dict.fromkeys(folder.resolve() for path in paths for folder in RunFolder.noted_below(Path(path))):
        note: Note | None = _attempt(lambda folder=folder: RunFolder(folder).note, tell)
        if note is None:
            continue
        own = [k for k, group in enumerate(found) if any(run.path.resolve().parent == folder for run in group.runs)]
        if own:
            found[own[0]] = replace(found[own[0]], note=note.note)
        elif not any((note.pair, note.method) == (group.pair, group.method) for group in found):
            found.append(Group(note.title, note.pair, note.method, [], note=note.note))
    return found
