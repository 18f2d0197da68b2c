"""`letkd search`: search for the values that are best on the validation split."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from letkd.cli import options as o
from letkd.cli.recipe_options import RecipeOptions, with_recipe_options
from letkd.cli.threads import tell_if_busy


@with_recipe_options
def search(
    *,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=RANGE",
            help="Range of a value: optim.lr=log:0.01..0.3, KEY=LOW..HIGH (integers if both are integers) or KEY=A|B|C; repeatable.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="Total number of trials, over all processes.")] = 40,
    final_trials: Annotated[
        int, typer.Option(min=1, max=10_000, help="Seeds for the final runs of the best recipe, evaluated on the test split.")
    ] = 3,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL|FILE",
            help="Storage of the study: postgresql://…, mysql://…, sqlite:///FILE, or a journal file.",
            show_default="<out>/study.journal",
        ),
    ] = None,
    study: Annotated[
        str | None, typer.Option(help="Name of the study in the storage.", show_default="the name of --out")
    ] = None,
    sampler: Annotated[Literal["tpe", "random"], typer.Option(help="How values are sampled.")] = "tpe",
    pruner: Annotated[Literal["halving", "none"], typer.Option(help="How trials are stopped early.")] = "halving",
    search_seed: Annotated[int, typer.Option(min=0, help="Seed of the sampler.")] = 0,
    jobs: o.Jobs = 1,
    launcher: o.LauncherSpec = None,
    cache: o.Cache = False,
    log: o.Log = None,
    chosen: RecipeOptions,
    student_weights: o.StudentWeights = None,
    preset: o.Preset = None,
    quick: o.Quick = False,
    out: Annotated[Path | None, typer.Option(help="Search folder.", show_default="runs/search-<cell>")] = None,
) -> None:
    """Search for a recipe's best values on the validation split, then evaluate the best recipe on the test split.

    Several processes can run the same command on one folder and share the trials. Run the same command again to resume.
    """
    from letkd.search.space import parse_ranges
    from letkd.search.storage import need_optuna
    from letkd.search.study import Search, finish, run_search
    from letkd.training.fabric import need_one_process
    from letkd.training.trackers import parse_trackers

    need_one_process("letkd search")
    ranges = parse_ranges(over or [])
    need_optuna()
    make = partial(
        chosen.resolve,
        preset=preset,
        student_weights=student_weights,
        quick=quick,
        tell=False,
        **{"train.cache_views": o.CACHE_VIEWS if cache else None},
    )
    recipe = make([], tell=True)
    default = o.run_folder(None, chosen.cell, recipe, quick=quick)
    folder = out or default.with_name(f"search-{default.name}")
    given = Search(
        make,
        ranges,
        trials,
        folder,
        storage or str(folder / "study.journal"),
        study or folder.name,
        search_seed,
        sampler,
        pruner,
        log=parse_trackers(log),
    )
    tasks = o.launcher(launcher, jobs, folder)
    given.check()
    tell_if_busy()
    run_search(given, tasks)
    winner = finish(given, final_trials, tasks)

    from letkd.progress import show
    from letkd.report.results_table import as_rich
    from letkd.runs.results import Row

    values = ", ".join(f"{key} = {value}" for key, value in winner.record.params.items())
    title = f"best of {trials} trials: {values} ({winner.record.value:.2f} % on validation)"
    show(as_rich([Row(winner.recipe.title or "own recipe", winner.results)], title))
    print(f"recipe: {folder / 'best.toml'}\ntrials: {folder / 'table.md'}\nreport: letkd report {folder}")
