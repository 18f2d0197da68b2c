"""`letkd compare`: compare several methods on the same student."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from letkd.cli import options as o
from letkd.cli.recipe_options import RecipeOptions, refuse_code
from letkd.cli.threads import tell_if_busy
from letkd.errors import RecipeError, RunError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from letkd.training.launchers import Launcher
    from letkd.training.trials import Variant


def compare(
    pair: Annotated[
        str | None,
        typer.Argument(help="Pair, such as digits/tiny, or your own TOML file.", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data set, as for `letkd train`. Without PAIR and --student: its first pair.", show_default=False),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated methods, rows defined in your file, or groups: paper, modern, all.",
            show_default="your file's rows, or all",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="ROW", help="Row to compare the other rows with, seed by seed.", show_default="the first student"),
    ] = None,
    seed: o.FirstSeed = None,
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Seeds per method, starting at --seed.")] = 3,
    jobs: o.Jobs = 1,
    launcher: o.LauncherSpec = None,
    cache: o.Cache = False,
    log: o.Log = None,
    root: o.Root = None,
    teacher: o.Teacher = None,
    teacher_weights: o.TeacherWeights = None,
    teacher_tap: o.TeacherTap = None,
    student: o.Student = None,
    student_tap: o.StudentTap = None,
    preset: o.Preset = None,
    settings: o.Settings = None,
    trust: o.Trust = False,
    quick: o.Quick = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs.", show_default="runs/compare-<pair>")] = None,
) -> None:
    """Train the same student with several methods and print one table. Run the same command again to resume."""
    from letkd.recipes import list_pairs, resolve_with_sources
    from letkd.training.trackers import parse_trackers

    if pair is None and student is None:
        if data is None:
            raise RecipeError(
                f"no pair is named; give one of {', '.join(list_pairs())}, your own TOML file, or --data, --student and --teacher"
            )
        pair, data = o.first_pair(data), None
    networks = RecipeOptions(
        cell=pair, data=data, root=root, teacher=teacher, teacher_tap=teacher_tap, student=student, student_tap=student_tap
    )
    rows = _rows(pair, methods)
    if against is not None and against not in rows:
        raise RecipeError(f"--against {against!r} is not a row of this comparison; nearest: {nearest(against, rows)}")
    name = _folder_name(pair, data, student)
    folder = out or Path("runs") / f"compare-{name}{f'-{preset}' if preset else ''}{'-quick' if quick else ''}"
    if jobs > 1 or launcher is not None:
        from letkd.training.fabric import need_one_process

        need_one_process("letkd compare --jobs")
    values = [f"train.cache_views={o.CACHE_VIEWS}"] if cache else []
    values += settings or []
    for method in rows:
        recipe, sources = resolve_with_sources(
            pair, method=method, preset=preset, overrides=networks.values, settings=values, quick=quick
        )
        if recipe.methods and recipe.teacher is None:
            raise RecipeError(
                f"{method} needs a teacher, but none is named; name one with --teacher MODEL, or in your file's [teacher]"
            )
        if not trust:
            refuse_code(pair, recipe, sources)
    show(
        pair,
        rows,
        folder,
        trials=trials,
        seed=seed,
        preset=preset,
        overrides=networks.values,
        settings=values,
        quick=quick,
        teacher_weights=teacher_weights,
        title=f"{pair or student}: one student, side by side",
        against=against or next((row for row in rows if row != "teacher"), None),
        launcher=o.launcher(launcher, jobs, folder),
        log=parse_trackers(log),
    )


def _folder_name(pair: str | None, data: str | None, student: str | None) -> str:
    if pair is None:
        return "".join(c if c.isalnum() or c in "-_." else "-" for c in f"{data}-{student}")
    return Path(pair).stem if pair.endswith(".toml") else pair.replace("/", "-")


def _rows(pair: str | None, methods: str | None) -> list[str]:
    """The rows to compare, without duplicates."""
    from letkd.recipes import list_rows, resolve
    from letkd.report.paper import named_methods

    own = []
    if pair is not None and pair.endswith(".toml"):
        own = list_rows(pair)
        if odd := [row for row in own if not re.fullmatch(r"\w[\w.+-]*", row)]:
            raise RecipeError(
                f"{pair}: the row name {odd[0]!r} cannot be used as a folder name; use letters, digits, dots and dashes"
            )
        if found := resolve(pair, method="ce").methods:
            raise RecipeError(
                f"{pair} has a top-level [methods] table ({', '.join(found)}), which would apply to every row; move it into a "
                "[rows.NAME] table"
            )
    if methods is None and own:
        return own
    named = named_methods(methods or "all")
    return list(dict.fromkeys([*named, *own])) if methods in (None, "all") else named


def show(
    pair: str | None,
    methods: "Sequence[str | Variant]",
    folder: Path,
    *,
    trials: int,
    settings: list[str],
    teacher_weights: Path | None,
    title: str,
    seed: int | None = None,
    preset: str | None = None,
    overrides: "Mapping[str, Any] | None" = None,
    quick: bool = False,
    against: str | None = None,
    launcher: "Launcher | None" = None,
    log: tuple[str, ...] | None = None,
) -> None:
    """Run the comparison, print the table and save it as `table.md` in the folder of the runs."""

    from letkd.files import write_whole
    from letkd.progress import show
    from letkd.report.results_table import as_markdown, as_rich
    from letkd.training.trials import compare as run

    tell_if_busy()
    rows = run(
        pair,
        methods,
        folder,
        trials=trials,
        seed=seed,
        preset=preset,
        overrides=overrides,
        settings=settings,
        teacher_weights=teacher_weights,
        quick=quick,
        launcher=launcher,
        log=log,
    )
    write_whole(folder / "table.md", as_markdown(rows, against).encode())
    show(as_rich(rows, title, against))
    print(f"run folder: {folder}")
    if failed := [row.title for row in rows if row.failed]:
        raise RunError(
            f"{len(failed)} of {len(rows)} rows failed ({', '.join(failed)}); to retry them, run the same command again"
        )
