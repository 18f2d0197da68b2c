"""`letkd fit`: fit the teacher's supervision without training."""

from typing import Annotated

import typer

from letkd.cli import options as o
from letkd.cli.recipe_options import RecipeOptions, with_recipe_options


@with_recipe_options
def fit(
    chosen: RecipeOptions,
    preset: o.Preset = None,
    out: o.Out = None,
    force: Annotated[bool, typer.Option("--force", help="Fit even if a matching fitted file exists.")] = False,
) -> None:
    """Fit the teacher's supervision (Alg. 1 and 2) and save it. A matching file that exists is reused."""
    recipe = chosen.resolve(preset=preset)
    from letkd.files import refuse_links, tidy
    from letkd.runs.folder import RunFolder
    from letkd.training import build

    folder = RunFolder(o.run_folder(out, chosen.cell, recipe)).supervision

    images = build.read_data(recipe)
    distiller = build.build_distiller(recipe, images)
    if not any(fitting.part.fitted_buffers for fitting in distiller.fittings().values()):
        print(f"{recipe.title or 'this recipe'} has nothing to fit")
        return
    refuse_links(folder)
    tidy(folder)
    build.fit(distiller, recipe, images, folder, force=force)
    print(f"fitted supervision: {folder}")
