"""`letkd taps`: the modules of a network and the proposed taps."""

from typing import Annotated

import typer

from letkd.cli import options as o


def taps(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=o.MODEL, show_default=False)],
    size: Annotated[
        str | None,
        typer.Option("--input", metavar="3xHxW", help="Input shape.", show_default="the network's own, or 3x224x224"),
    ] = None,
    num_classes: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of classes.")] = 100,
) -> None:
    """Show every module of a network with its output shape, and propose taps for --student-tap and --teacher-tap.

    transformers networks are built from a configuration class or folder; nothing is downloaded.
    """
    image = None if size is None else o.image_size(size)

    from rich.console import Console

    from letkd.models import create_model
    from letkd.report.tap_table import as_rich, inspect_taps

    found = inspect_taps(create_model(model, num_classes=num_classes), image)
    console = Console()
    console.print(as_rich(found, model), soft_wrap=True)
    print()
    if found.trouble:
        print(f"no proposal{' for maps' if found.proposed else ''}: {found.trouble}")
    if not found.proposed:
        return
    if not found.own:
        print("`letkd train` uses these taps by default:")
    proposed = " ".join(f"--tap {role}={tap}" for role, tap in found.proposed.items())
    print(f"as student: letkd train … --student {model} {proposed}")
    print(f"as teacher: letkd train … --teacher {model} --teacher-weights FILE {proposed.replace('--tap', '--teacher-tap')}")
