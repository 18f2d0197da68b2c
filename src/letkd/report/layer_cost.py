"""Cost of the KD layer at inference, by its number of templates."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from letkd.batch import input_size_of
from letkd.layer import KDLayer
from letkd.models import create_model
from letkd.models.cost import macs
from letkd.report.pair_tables import NONE, millions
from letkd.runs.grid import Cell, Grid
from letkd.taps import as_taps, graft, probe

SIZES = (64, 256, 1024, 4096)
# Supplement, "Effect of the KD layer": increase in time per image.
PAPER = {"intermediate": "about 2 %", 64: "2 %", 4096: "20 %"}


def with_layer(model: str, num_classes: int, role: str, K: int) -> nn.Module:
    """A network with a KD layer at the tap of a role, as in an exported letKD student."""
    network = create_model(model, num_classes=num_classes)
    tap = as_taps(network)[role]
    _, found = probe(network, {role: tap}, torch.zeros(1, *_size_of(network)))
    graft(network, KDLayer(found[role].shape[1], K), after=tap.path)
    return network


def medians(runs: Mapping[str, Callable[[], object]], *, rounds: int = 15) -> dict[str, float]:
    """Median seconds per run; every round runs each once, so that noise affects all equally."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if turn > 1:  # the first two warm up
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in taken.items()}


def layer_cost(model: str, num_classes: int, *, K_inter: int = 8, batch: int = 64, rounds: int = 15) -> Grid:
    """Time, MACs and parameters of a student without a KD layer, with an intermediate one, and with penultimate ones of growing K."""
    bare = create_model(model, num_classes=num_classes)
    rows = {f"{model} alone": (bare, NONE)}
    K = K_inter * num_classes
    rows[f"intermediate, K = {K} ({K_inter} per class)"] = (
        with_layer(model, num_classes, "intermediate", K),
        PAPER["intermediate"],
    )
    for K in SIZES:
        rows[f"penultimate, K = {K}"] = (with_layer(model, num_classes, "penultimate", K), PAPER.get(K, NONE))
    x = torch.randn(batch, *_size_of(bare), generator=torch.Generator().manual_seed(0))
    seconds = medians({name: _forward(network.eval(), x) for name, (network, _) in rows.items()}, rounds=rounds)
    first, *_ = seconds.values()
    cells = []
    for name, (network, paper) in rows.items():
        parameters = sum(parameter.numel() for parameter in network.parameters())
        increase = NONE if network is bare else f"{100 * (seconds[name] / first - 1):+.0f} %".replace("-", "−")
        numbers = [f"{1000 * seconds[name] / batch:.3f} ms", increase, paper, millions(macs(network, x[:1])), f"{parameters:,}"]
        cells.append([Cell(name), *(Cell(number) for number in numbers)])
    notes = [
        f"Time per image in batches of {batch}, median of {rounds} rounds on this machine with {torch.get_num_threads()} thread(s); the "
        "paper's increases are for its networks, on another machine."
    ]
    head = ["student", "time per image", "increase", "paper: increase", "MACs", "parameters"]
    return Grid("Cost of the KD layer at inference (supplement 1.2)", head, cells, notes)


def _size_of(network: nn.Module) -> tuple[int, int, int]:
    return input_size_of(network) or (3, 32, 32)


def _forward(network: nn.Module, x: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return network(x)

    return run
