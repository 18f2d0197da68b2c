"""`letkd models`: the networks of the zoo, in figures."""

from typing import Annotated

import typer

from letkd.cli import options as o


def models(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="All where none is named.", show_default=False)
    ] = None,
    size: Annotated[
        str | None, typer.Option("--input", metavar="HxW", help="Images of another size.", show_default="each network's own")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Logits.", show_default="100, for ImageNet 1000")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the networks of the zoo: parameters, MACs for one image, maps at the places that methods read."""
    image = None if size is None else o.image_size(size)

    from rich.console import Console

    from letkd.progress import bar
    from letkd.report.model_cards import as_json, as_rich, cards

    with bar("looking at the networks", None):
        found = cards(names or (), size=None if image is None else image[1:], num_classes=num_classes)
    if json:
        from json import dumps

        print(dumps(as_json(found), indent=1))
    else:
        table = as_rich(found)
        # A cell that is cut says nothing, so a narrow terminal gets long lines.
        console = Console()
        console.width = max(console.width, Console(width=1000).measure(table).maximum)
        console.print(table)
