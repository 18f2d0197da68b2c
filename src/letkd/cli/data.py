"""`letkd data`: download and check data sets."""

from pathlib import Path
from typing import Annotated

import typer

from letkd.cli import options as o
from letkd.errors import DataError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
SHOWN = 20


@app.callback()
def data() -> None:
    """Download and check data sets."""


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100 or tiny-imagenet.", show_default=False)],
    root: Annotated[Path, typer.Option(help="Folder to store it in; pass the same folder as --root when training.")] = Path(
        "data"
    ),
) -> None:
    """Download a data set from its authors, check it and unpack it. Run the same command again to resume an interrupted download."""
    from letkd.data.get import get_data

    home = get_data(name, root.expanduser())
    print(f"{name} is in {home}: train with --data {name} --root {root}")


@app.command("check")
def check(
    name: Annotated[
        str,
        typer.Argument(
            help="digits, cifar10, cifar100, tiny-imagenet, imagenet, folder for your own image tree, or images for images "
            "without classes.",
            show_default=False,
        ),
    ],
    root: Annotated[Path | None, typer.Option(help="Folder with its files.", show_default=False)] = None,
    workers: Annotated[int, typer.Option(min=0, max=256, help="Processes that decode image files.")] = 4,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIDE|HxW",
            help="Image size, as data.size: report what networks receive at this size.",
            show_default="the data set's",
        ),
    ] = None,
    resize: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Shorter side before cropping, as data.resize.",
            show_default="8/7 of the size, or none if files have the size",
        ),
    ] = None,
) -> None:
    """Read a whole data set and report its contents and any problems: missing, damaged or foreign files, counts, checksums."""
    from rich.table import Table
    from rich.text import Text

    from letkd.data.base import Reading
    from letkd.data.check import check_data, views
    from letkd.data.pictures import printable
    from letkd.progress import plain, show

    reading = Reading(size=o.size(size), resize=resize)
    parts = check_data(name, None if root is None else root.expanduser(), workers=workers)
    table = Table(title=Text(name + (f" in {printable(root)}" if root else "")), title_justify="left")
    for column in ("split", "images", "classes", "sizes", "passed over", "wrong"):
        table.add_column(column, justify="left" if column in ("split", "sizes") else "right")
    for part in parts:
        table.add_row(
            part.name,
            f"{part.images:,}",
            f"{part.classes:,}",
            _sizes(part.sizes),
            f"{part.ignored:,}",
            f"{len(part.wrong):,}",
        )
    show(table)
    if view := views(name, parts, reading):
        print(plain(view))
    wrong = [sentence for part in parts for sentence in part.wrong]
    for sentence in wrong[:SHOWN]:
        print(plain(sentence))
    if len(wrong) > SHOWN:
        print(f"… and {len(wrong) - SHOWN:,} more")
    if wrong:
        raise DataError(f"{name}: {len(wrong):,} problem(s), listed above")


def _sizes(sizes: dict[tuple[int, int], int]) -> str:
    """A single size as it is; several sizes as the range of each side."""
    if len(sizes) == 1:
        ((w, h),) = sizes
        return f"{w}x{h}"
    ranges = [f"{min(side)} to {max(side)}" for side in zip(*sizes, strict=True)]
    return " x ".join(ranges)
