"""`letkd models`: the networks of the zoo with their sizes and costs."""

from typing import Annotated

import typer

from letkd.cli import options as o


def models(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Networks to list; all if omitted.", show_default=False)
    ] = None,
    size: Annotated[
        str | None, typer.Option("--input", metavar="HxW", help="Image size.", show_default="each network's own")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Number of classes.", show_default="100, for ImageNet 1000")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the networks of the zoo: parameters, MACs per image, and shapes of the feature maps that methods read."""
    image = None if size is None else o.image_size(size)

    from rich.console import Console

    from letkd.progress import bar
    from letkd.report.model_cards import as_json, as_rich, cards

    with bar("reading the networks", None):
        found = cards(names or (), size=None if image is None else image[1:], num_classes=num_classes)
    if json:
        from json import dumps

        print(dumps(as_json(found), indent=1))
    else:
        table = as_rich(found)
        # Truncated cells are useless, so a narrow terminal gets long lines.
        console = Console()
        console.width = max(console.width, Console(width=1000).measure(table).maximum)
        console.print(table)
