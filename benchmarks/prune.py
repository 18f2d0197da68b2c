"""Cost of a KD layer at inference, full, folded and pruned: accuracy, and time relative to the same network without it.

    python benchmarks/prune.py [RUN or student.safetensors] [--data cifar10 --root FOLDER] [--keep 1024,256,64] [--auto 0.1]
                               [--model resnet20] [--K 4096] [--batches 1,128] [--rounds 30] [--images 3000]

Without a run, the layer is untrained and only the times are meaningful. Every round runs one forward pass of every row in turn;
the table shows the fastest, in processor time, so run it with OMP_NUM_THREADS=1. All rows are in eval mode, with the backbone's
BNs folded.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import letkd
from letkd.data import Loader
from letkd.deploy.prune import folded_layers, prune_auto, prune_layer, prune_to
from letkd.deploy.shrink import hold_out
from letkd.deploy.source import open_source
from letkd.deploy.speed import interleaved
from letkd.layer import KDLayer
from letkd.layer.folded import fold_batch_norms, fold_student
from letkd.runs.evaluation import evaluate
from letkd.taps import replace_module


def fresh(model: str, K: int) -> nn.Module:
    """A network with a KD layer at its last map."""
    student = letkd.create_model(model, num_classes=100)
    tap = student.taps["penultimate"]
    letkd.graft(student, KDLayer(tap.channels, K), after=tap.path)
    return student.eval()


def without_layers(student: nn.Module) -> nn.Module:
    student = fold_student(student)
    for path in folded_layers(student):
        replace_module(student, path, nn.Identity())
    return student


def with_norms_folded(student: nn.Module, x: torch.Tensor) -> nn.Module:
    """Fold the backbone's BNs, so that the layer is compared with the fastest form of the network."""
    fold_batch_norms(student, torch.export.export(student, (x,)))
    return student


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--keep", default="1024,512,256,128,64")
    parser.add_argument(
        "--auto", type=float, help="also prune to the fewest templates within this many points of validation accuracy"
    )
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--K", type=int, default=4096)
    parser.add_argument("--batches", default="1,128")
    parser.add_argument("--images", type=int, default=10**9, help="at most so many of each split, for a quick look")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    keep = [int(K) for K in args.keep.split(",")]

    splits = {}
    if args.run is None:
        student, size = fresh(args.model, args.K), (32, 32)
        whole = fold_student(student)
        rows = {"layer, folded": whole}
        for K in keep:
            small = fold_student(student)
            for path in folded_layers(small):
                replace_module(small, path, prune_layer(whole.get_submodule(path), torch.arange(K)))
            rows[f"kept {K}"] = small
    else:
        source = open_source(args.run, data=args.data, root=args.root)
        if source.data is None:
            parser.error("the run's data is not there: name it with --data and --root")
        student, size = source.student, source.data.train.image_size
        loader = partial(Loader, batch_size=128, mean=source.data.mean, std=source.data.std)
        train, held, name = hold_out(source.data)
        train, held, test = (part.subset(torch.arange(min(args.images, len(part)))) for part in (train, held, source.data.test))
        splits = {name: loader(held), "test": loader(test)}
        whole = fold_student(student)
        rows = {"layer, folded": whole}
        rows |= {f"kept {K}": prune_to(whole, loader(train), K)[0] for K in keep}
        if args.auto is not None:
            small, layers = prune_auto(
                whole, loader(train), lambda other: evaluate(other, splits[name]).top1, tolerance=args.auto
            )
            rows[f"auto, kept {', '.join(str(layer.kept) for layer in layers)}"] = small
    rows = {"no layer": without_layers(student), "layer": student, **rows}

    accuracies = {row: [evaluate(model, part).top1 for part in splits.values()] for row, model in rows.items()}
    x = torch.randn(2, 3, *size)
    rows = {row: with_norms_folded(model, x) for row, model in rows.items()}
    times = []
    for batch in args.batches.split(","):
        x = torch.randn(int(batch), 3, *size)
        runs = {row: partial(model, x) for row, model in rows.items()}
        times.append(interleaved(runs, rounds=args.rounds, clock=time.process_time))

    table = Table(title=f"{args.run or args.model}: a KD layer at inference")
    table.add_column("row")
    for name in (*(f"{split} %" for split in splits), *(f"time, batch {batch}" for batch in args.batches.split(","))):
        table.add_column(name, justify="right")
    for row in rows:
        ratios = [f"{taken[row] / taken['no layer']:.3f}" for taken in times]
        table.add_row(row, *(f"{value:.2f}" for value in accuracies[row]), *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
