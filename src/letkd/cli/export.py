"""`letkd export`: the student alone, as a file that runs elsewhere."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from letkd.cli import options as o


def export(
    what: Annotated[Path, typer.Argument(help="A finished run's folder, or a student.safetensors file.", show_default=False)],
    to: Annotated[
        Literal["safetensors", "torch-export", "onnx"], typer.Option(help="The file's format.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(help="The file.", show_default="beside the student")] = None,
    takes: Annotated[
        Literal["uint8", "normalised"] | None,
        typer.Option(
            "--input",
            help="What the model is fed: images as they are (0 to 255), or normalised ones.",
            show_default="uint8, where mean and std are known",
        ),
    ] = None,
    fold: Annotated[bool, typer.Option("--fold/--no-fold", help="Fold BN and the KD layers' constants into their kernels.")] = True,
    size: Annotated[int | None, typer.Option(min=1, help="Height and width of the images.", show_default="those trained on")] = None,
    student: Annotated[str | None, typer.Option(help="The network, where it is not of the zoo.", show_default=False)] = None,
    data: o.Data = None,
    root: o.Root = None,
) -> None:
    """Export a trained student: no teacher, no taps; torch-export and ONNX files run without letkd. Checked before it is written."""
    from letkd.deploy.ship import ship
    from letkd.deploy.source import open_source

    source = open_source(what, student=student, data=data, root=root, size=None if size is None else (size, size))
    shipment = ship(source, to, out, fold=fold, takes=takes)
    for name, difference in shipment.differences.items():
        print(
            f"max difference to the student on {difference.n} {name} images: {difference.largest:.2g} "
            f"(largest logit {difference.logit:.3g}; same first class on {difference.agreeing})"
        )
    facts = shipment.facts
    print(f"input: {facts.input} [{', '.join(_axes(facts.dynamic, facts.size))}]")
    if shipment.folded:
        print(f"folded: {shipment.folded} BNs into convolutions")
    print(f"exported: {shipment.path} ({shipment.path.stat().st_size / 1e6:.2f} MB)")


def _axes(dynamic: tuple[str, ...], size: tuple[int, int] | None) -> list[str]:
    height, width = size or ("height", "width")
    return [
        "batch" if "batch" in dynamic else "1",
        "3",
        "height" if "height" in dynamic else str(height),
        "width" if "width" in dynamic else str(width),
    ]
