"""`letkd export`: write a student as a file that runs without its training code."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from letkd.cli import options as o
from letkd.errors import ExportError

if TYPE_CHECKING:
    from letkd.deploy.quantise import Quantised
    from letkd.deploy.source import Source
    from letkd.distiller.facts import Facts


def export(
    what: Annotated[Path, typer.Argument(help="Folder of a finished run, or a student.safetensors file.", show_default=False)],
    to: Annotated[
        Literal["safetensors", "torch-export", "onnx", "hub-folder"],
        typer.Option(
            help="File format; hub-folder: weights, config.json and model card for the Hugging Face Hub.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="File or folder to write.", show_default="next to the student")] = None,
    takes: Annotated[
        Literal["uint8", "normalised"] | None,
        typer.Option(
            "--input",
            help="Input of the model: raw images (0 to 255) or normalised ones.",
            show_default="uint8, if mean and std are known",
        ),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            metavar="unused|auto|K",
            help="Remove templates from the KD layers; unused: those that never fire; auto: as many as --tolerance allows; K: all but K.",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Percentage points of validation accuracy that --prune auto may lose.")
    ] = 0.1,
    int8: Annotated[
        bool,
        typer.Option("--int8", help="Quantise the ONNX file to INT8, calibrated on training images, and measure the effect."),
    ] = False,
    fold: Annotated[
        bool, typer.Option("--fold/--no-fold", help="Fold BN and the KD layers' constants into their kernels.")
    ] = True,
    opset: Annotated[
        int | None, typer.Option(min=1, help="Opset version of the ONNX file.", show_default="torch's choice")
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N|dynamic", help="Images per call.")] = "dynamic",
    size: Annotated[
        str | None,
        typer.Option(
            metavar="[HxW][,fixed|,dynamic]",
            help="Height and width of the images, and whether other sizes are accepted.",
            show_default="the training size; other sizes too if the network is fully convolutional",
        ),
    ] = None,
    student: Annotated[str | None, typer.Option(help="Network, if it is not in the zoo.", show_default=False)] = None,
    data: o.Data = None,
    root: o.Root = None,
    licence: Annotated[
        str | None,
        typer.Option("--license", help="For hub-folder: licence of the student, such as apache-2.0.", show_default="unknown"),
    ] = None,
) -> None:
    """Export a trained student without teacher and taps; torch-export and ONNX files run without letkd.

    The exported model is compared with the student before it is written.
    """
    side, any_size = o.sizes(size)
    graph = {"opset": opset, "batch": o.count_or(batch, "dynamic", "--batch"), "any_size": any_size}

    from letkd.deploy.ship import destination, ship
    from letkd.deploy.source import open_source

    source = open_source(what, student=student, data=data, root=root, size=side)
    if to == "hub-folder":
        from letkd.deploy.hub import write_hub_folder

        if int8 or takes == "uint8" or any(value is not None for value in graph.values()):
            raise ExportError(
                "--to hub-folder writes weights without a graph: omit --int8, --input, --opset, --batch and --size, or use --to onnx"
            )
        if prune is not None:
            source = _pruned(source, prune, tolerance)
        shipment = write_hub_folder(source, out, fold=fold, licence=licence)
    else:
        destination(source.path, to, out, int8=int8, **graph)  # rejects wrong options before any work is done
        if prune is not None:
            source = _pruned(source, prune, tolerance)
        shipment = ship(source, to, out, fold=fold, takes=takes, int8=int8, **graph)
    for name, difference in shipment.differences.items():
        print(
            f"max difference from the student on {difference.n} {name} images: {difference.largest:.2g} "
            f"(largest logit {difference.logit:.3g}; same top-1 class on {difference.agreeing})"
        )
    if shipment.quantised is not None:
        _print_int8(shipment.quantised)
    facts = shipment.facts
    print(f"input: {facts.input} [{', '.join(_axes(facts))}]")
    if shipment.folded:
        print(f"folded: {shipment.folded} BNs into convolutions")
    print(f"latency: {', '.join(f'{1000 * taken:.2f} ms per batch of {n}' for n, taken in shipment.seconds.items())}")
    files = list(shipment.path.iterdir()) if shipment.path.is_dir() else [shipment.path]
    print(f"exported: {shipment.path} ({sum(file.stat().st_size for file in files) / 1e6:.2f} MB)")


def _pruned(source: "Source", prune: str, tolerance: float) -> "Source":
    from letkd.deploy.shrink import shrink

    source, shrunk = shrink(source, prune, tolerance=tolerance)
    for layer in shrunk.layers:
        print(f"pruned {layer.path}: {layer.K} templates, {layer.never} never fired, {layer.kept} kept")
    for split, (before, after) in shrunk.accuracy.items():
        print(f"accuracy on {split}: {before:.2f} % before, {after:.2f} % after")
    _print_seconds(shrunk.seconds)
    return source


def _print_int8(quantised: "Quantised") -> None:
    if quantised.accuracy is not None:
        before, after = quantised.accuracy
        print(f"INT8, accuracy on test: {before:.2f} % before, {after:.2f} % after")
    _print_seconds(quantised.seconds)
    before, after = quantised.size
    print(f"INT8, size: {before / 1e6:.2f} MB before, {after / 1e6:.2f} MB after")


def _print_seconds(seconds: dict[int, tuple[float, float]]) -> None:
    for batch, (before, after) in seconds.items():
        print(
            f"time per batch of {batch}: {1000 * before:.2f} ms before, {1000 * after:.2f} ms after, ratio {after / before:.2f}"
        )


def _axes(facts: "Facts") -> list[str]:
    height, width = facts.size or ("height", "width")
    sizes = {"batch": facts.batch, "height": height, "width": width}
    batch, height, width = (axis if axis in facts.dynamic else str(size) for axis, size in sizes.items())
    return [batch, "3", height, width]
