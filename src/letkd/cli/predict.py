"""`letkd predict`: classify images with an exported file."""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from letkd.cli import options as o
from letkd.progress import UNSAFE, plain, show

if TYPE_CHECKING:
    from letkd.deploy.predict import Prediction


def predict(
    model: Annotated[
        Path,
        typer.Argument(help="Exported .onnx file, student.safetensors file, or with --trust a .pt2 file.", show_default=False),
    ],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders with images.", show_default=False)],
    top: Annotated[int, typer.Option(min=1, help="Number of classes per image.")] = 5,
    form: Annotated[Literal["table", "csv", "json"], typer.Option("--format", help="Output format.")] = "table",
    student: Annotated[str | None, typer.Option(help="Network, if it is not in the zoo.", show_default=False)] = None,
    trust: o.TrustFile = False,
    timeout: o.Timeout = 600.0,
) -> None:
    """Classify images and print class probabilities. Unreadable images are reported and skipped."""
    from letkd.deploy.predict import find_images
    from letkd.deploy.predict import predict as run
    from letkd.deploy.runners import open_model
    from letkd.errors import DataError

    runner = open_model(model, student=student, trust=trust, seconds=timeout)
    paths = find_images(images)
    unread = []

    def readable() -> "Iterator[Prediction]":
        for prediction in run(runner, paths, top=top):
            if prediction.error:
                unread.append(prediction)
                print(f"letkd: {plain(prediction.error)}", file=sys.stderr)
            else:
                yield prediction

    PRINTERS[form](readable())
    if unread:
        raise DataError(f"{len(unread)} of {len(paths)} images could not be read")


def _table(predictions: "Iterable[Prediction]") -> None:
    from rich.table import Table

    table = Table()
    table.add_column("image", overflow="fold")
    table.add_column("classes")
    for prediction in predictions:
        names = "  ".join(f"{name} {100 * probability:.1f} %" for name, probability in prediction.top)
        table.add_row(str(prediction.path), names)
    show(table)


def _csv(predictions: "Iterable[Prediction]") -> None:
    import csv

    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["image", "rank", "class", "probability"])
    for prediction in predictions:
        for rank, (name, probability) in enumerate(prediction.top, start=1):
            rows.writerow([plain(str(prediction.path)), rank, plain(name), f"{probability:.6f}"])


def _json(predictions: "Iterable[Prediction]") -> None:
    import json

    def line(prediction: "Prediction") -> str:
        classes = [{"class": name, "probability": round(probability, 6)} for name, probability in prediction.top]
        text = json.dumps({"image": str(prediction.path), "classes": classes}, ensure_ascii=False, allow_nan=False)
        return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)

    # Line by line, so that a folder of a million images does not fill the memory; the output is still one JSON array.
    print("[", end="")
    try:
        for number, prediction in enumerate(predictions):
            print(",\n " if number else "\n ", line(prediction), sep="", end="")
    finally:  # the output is valid JSON even if the model fails
        print("\n]")


PRINTERS: dict[str, Callable[[Iterable], None]] = {"table": _table, "csv": _csv, "json": _json}
