"""The options that choose a recipe, shared by the commands that train or fit one."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from letkd.cli import options as o
from letkd.errors import RecipeError

if TYPE_CHECKING:
    from letkd.recipes import Recipe


@dataclass(frozen=True)
class RecipeOptions:
    """Cell, data, networks and settings, as given on the command line. Each field is an option; see `with_recipe_options`."""

    cell: o.Cell = None
    method: o.Method = None
    data: o.Data = None
    root: o.Root = None
    teacher: o.Teacher = None
    teacher_weights: o.TeacherWeights = None
    teacher_tap: o.TeacherTap = None
    student: o.Student = None
    student_tap: o.StudentTap = None
    settings: o.Settings = None
    trust: o.Trust = False

    @property
    def values(self) -> dict[str, Any]:
        """What is given, by dotted key of the recipe."""
        values = {
            "data.name": self.data,
            "data.root": _text(self.root),
            "teacher.model": self.teacher,
            "teacher.weights": _text(self.teacher_weights),
            "teacher.taps": dict(_pair(text, "--teacher-tap") for text in self.teacher_tap or []) or None,
            "student.model": self.student,
            "student.taps": dict(_pair(text, "--student-tap") for text in self.student_tap or []) or None,
        }
        return {key: value for key, value in values.items() if value is not None}

    def resolve(
        self,
        more_settings: Sequence[str] = (),
        *,
        preset: str | None = None,
        student_weights: Path | None = None,
        quick: bool = False,
        tell: bool = True,
        **more: Any,
    ) -> "Recipe":
        """The recipe that the command line describes.

        Args:
            more_settings: `key=value` strings, applied after the user's own.
            tell: log which settings were derived from others.
            more: values by dotted key; None for those that are not given.
        """
        from letkd.progress import say
        from letkd.recipes import derived_values, resolve_with_sources

        more = {"student.weights": _text(student_weights), **more}
        given = self.values | {key: value for key, value in more.items() if value is not None}
        settings = [*(self.settings or []), *more_settings]
        if self.cell is None and not (given or settings):
            raise RecipeError(
                "nothing was named; name a cell, such as digits/tiny/letkd-1, your own TOML file, or --data and --student"
            )
        if self._row == "teacher" and (named := [key for key in (*given, *settings) if key.startswith("student.")]):
            raise RecipeError(
                f"the row teacher trains the teacher's network, so {named[0].partition('=')[0]} has no effect; name the network with "
                "--teacher, or train it with --method ce and --student"
            )
        recipe, sources = resolve_with_sources(
            self.cell, method=self.method, preset=preset, overrides=given, settings=settings, quick=quick
        )
        if not self.trust:
            refuse_code(self.cell, recipe, sources)
        lines = derived_values(recipe, sources)
        if recipe.teacher is not None and not recipe.methods and self._row is None:
            lines.append(
                "no method is named, so the student trains alone, without the teacher; name one with --method, such as kd"
            )
        for line in lines if tell else []:
            say(line)
        return recipe

    @property
    def _row(self) -> str | None:
        """The row that is named, by --method or in the cell."""
        if self.method is None and self.cell is not None and not self.cell.endswith(".toml") and self.cell.count("/") > 1:
            return self.cell.rpartition("/")[2]
        return self.method


def with_recipe_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every field of `RecipeOptions` as an option, in place of its parameter `chosen`."""
    fields = inspect.signature(RecipeOptions).parameters
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, own in inspect.signature(command).parameters.items()
        for parameter in (fields.values() if name == "chosen" else [own])
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        chosen = RecipeOptions(**{name: given.pop(name) for name in fields})
        command(chosen=chosen, **given)

    # Typer reads the options from these two attributes.
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def refuse_code(cell: str | None, recipe: "Recipe", sources: dict[str, str]) -> None:
    """Stop if a recipe file, not the command line, names code that would run."""
    networks = {"student.model": recipe.student, "teacher.model": recipe.teacher}
    by_file = {key for key, source in sources.items() if source == cell or source.startswith(f"{cell}, rows.")}
    named = [table.model for key, table in networks.items() if table is not None and key in by_file and ":" in table.model]
    if not named:
        return
    from letkd.models.base import is_code

    if code := [name for name in named if is_code(name)]:
        raise RecipeError(
            f"{cell} names code that would run on this machine: {', '.join(dict.fromkeys(code))}; read it and add --trust if you trust "
            "it, or name the network on the command line"
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _pair(text: str, option: str) -> tuple[str, str]:
    role, equals, path = text.partition("=")
    if not (role and equals and path):
        raise RecipeError(f"{option} {text!r}: write role=module.path, as in penultimate=layer3")
    return role, path
