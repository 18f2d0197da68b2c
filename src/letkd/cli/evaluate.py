"""`letkd eval`: accuracy of a trained student, or of any network with given weights."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from letkd.cli import options as o
from letkd.errors import RecipeError


def evaluate(
    what: Annotated[
        str,
        typer.Argument(
            help="Run folder, student.safetensors or .onnx file (.pt2 with --trust); with --weights, the name of a network.",
            show_default=False,
        ),
    ],
    weights: Annotated[
        Path | None, typer.Option(help="The network's weights (safetensors or .pth).", show_default=False)
    ] = None,
    data: o.Data = None,
    root: o.Root = None,
    student: Annotated[
        str | None,
        typer.Option(help="Network, if the file holds only weights or the network is not in the zoo.", show_default=False),
    ] = None,
    split: Annotated[Literal["test", "val", "train"], typer.Option(help="Split to evaluate on.")] = "test",
    mean: Annotated[
        str | None,
        typer.Option(
            metavar="R,G,B",
            help="Mean that the network's input is normalised with.",
            show_default="the weights' own, then the data set's",
        ),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(
            metavar="R,G,B",
            help="Standard deviation that the input is normalised with.",
            show_default="the weights' own, then the data set's",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIDE|HxW",
            help="Size to scale and crop image files to.",
            show_default="the weights' own, then the network's",
        ),
    ] = None,
    trust: o.TrustFile = False,
    timeout: o.Timeout = 600.0,
) -> None:
    """Evaluate a student on a split of its data set, or of another data set with the same classes. To evaluate any network: `letkd
    eval resnet56_a --weights resnet56.safetensors --data cifar10 --root FOLDER`.
    """
    from rich.table import Table
    from rich.text import Text

    from letkd.progress import show
    from letkd.training.students import evaluate_network, evaluate_student

    view = {"mean": o.numbers(mean, "--mean"), "std": o.numbers(std, "--std"), "size": o.size(size)}
    if weights is not None:
        if student is not None:
            raise RecipeError(f"{what!r} and --student {student!r} both name a network; name one")
        accuracy = evaluate_network(what, weights, data=data, root=root, split=split, **view)
    elif Path(what).suffix in (".onnx", ".pt2"):
        from letkd.deploy.accuracy import evaluate_file

        if given := [name for name, value in {**view, "student": student}.items() if value is not None]:
            raise RecipeError(f"{what} has a network, a normalisation and a size of its own; leave --{given[0]} out")
        accuracy = evaluate_file(Path(what), data=data, root=root, split=split, trust=trust, seconds=timeout)
    else:
        accuracy = evaluate_student(Path(what), data=data, root=root, split=split, student=student, **view)
    table = Table(title=Text(what), title_justify="left")
    for name in ("split", "top-1 (%)", "top-5 (%)", "loss", "images"):
        table.add_column(name, justify="right")
    table.add_row(split, f"{accuracy.top1:.2f}", f"{accuracy.top5:.2f}", f"{accuracy.loss:.4f}", f"{accuracy.n:,}")
    show(table)
