"""`letkd train`: train one recipe with one or several seeds."""

from functools import partial
from typing import Annotated

import typer

from letkd.cli import options as o
from letkd.cli.recipe_options import RecipeOptions, with_recipe_options
from letkd.cli.threads import tell_if_busy
from letkd.errors import RecipeError


@with_recipe_options
def train(
    chosen: RecipeOptions,
    student_weights: o.StudentWeights = None,
    freeze: o.Freeze = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Number of epochs; a larger number extends a finished run.", show_default="the recipe's"),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Train as many epochs as fit into this time per run, e.g. 20min; the speed is measured first.",
            show_default=False,
        ),
    ] = None,
    seed: o.FirstSeed = None,
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Number of seeds, starting at --seed.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Number of seeds in parallel, each in its own process.")] = 1,
    probe: o.Probe = None,
    preset: o.Preset = None,
    quick: o.Quick = False,
    out: o.Out = None,
    supervision: o.Supervision = None,
    save_every: Annotated[float, typer.Option(min=0, metavar="MINUTES", help="Interval between saves within an epoch.")] = 15.0,
    force: Annotated[
        bool, typer.Option("--force", help="Resume a run even if its teacher or images have changed since its start.")
    ] = False,
    cache: o.Cache = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Use only deterministic algorithms; for GPUs.")
    ] = False,
    log: o.Log = None,
) -> None:
    """Train a student (or, with `--method ce`, any network without a teacher). Run the same command again to resume."""
    if time is not None and epochs is not None:
        raise RecipeError(
            f"--time {time} and --epochs {epochs}: the time determines the number of epochs; give only one of them"
        )
    resolved = partial(chosen.resolve, preset=preset, student_weights=student_weights, quick=quick)
    given = {
        "student.freeze": freeze or None,
        "probe.name": None if probe is None else probe.partition("=")[0],
        "probe.root": None if probe is None else probe.partition("=")[2] or None,
        "train.epochs": epochs,
        "train.time": o.duration(time),
        "train.seed": seed,
        "train.cache_views": o.CACHE_VIEWS if cache else None,
        "train.deterministic": deterministic or None,
    }
    recipe = resolved(**given)
    if jobs > 1:
        from letkd.training.fabric import need_one_process

        need_one_process("letkd train --jobs")
    tell_if_busy()
    folder = o.run_folder(out, chosen.cell, recipe, quick=quick)
    if recipe.train.time is not None:
        from letkd.training.budget import plan

        planned = plan(recipe, folder, supervision=supervision, at_once=min(jobs, trials))
        recipe = resolved(**given | planned)
        if recipe.train.epochs != planned["train.epochs"]:
            raise RecipeError(f"--set train.epochs={recipe.train.epochs} and --time {time}: give only one of them")

    from letkd.distributed.processes import rank
    from letkd.progress import show
    from letkd.report.results_table import as_rich, without_labels
    from letkd.runs.results import Row
    from letkd.training.loop import train as run
    from letkd.training.trackers import parse_trackers
    from letkd.training.trials import run_trials

    how = {"supervision": supervision, "save_minutes": save_every, "force": force, "log": parse_trackers(log)}
    if trials == 1:
        results = [run(recipe, folder, **how)]
    else:
        results = run_trials(recipe, folder, trials, jobs=jobs, **how)
    if rank():
        return
    show(as_rich([Row(recipe.title or "own recipe", results)], f"{recipe.student.model} on {recipe.data.name}"))
    for line in without_labels(results):
        print(line)
    print(f"run folder: {folder}")
