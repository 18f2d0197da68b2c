"""Time and peak memory of one training step by method, interleaved in one run, as ratios to plain cross-entropy.

    python benchmarks/step.py [--teacher resnet56] [--student resnet20] [--K 4096] [--batch 64] [--rounds 8] [--rows ce,kd,letkd-2]

Every round takes one step of every method in turn, so that noise of a shared machine falls on all alike; the median is
shown. Peak memory is what one step allocates over what was there before it, read from torch's allocator on CUDA and from a
profile of allocations on CPU.
"""

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

import letkd
from letkd.methods import METHODS
from letkd.progress import set_quiet
from letkd.recipes import resolve

C = 100
ROWS = ["ce", "kd", "fitnet", "at", "ab", "fsp", "sp", "vid", "crd", "dkd", "simkd", "tdd", "quest", "letkd-1", "letkd-2"]
SITE = "sites.penultimate.supervision"
K_OF = {"quest": [f"quest.{SITE}"], "letkd-1": [f"letkd.{SITE}"], "letkd-2": [f"letkd.{SITE}"]}  # where K is set


def distillers(teacher: torch.nn.Module, student: str, K: int, rows: list[str]) -> dict[str, letkd.Distiller]:
    """One distiller a method, as its recipe has it, each with its own student; supervisions are fitted to random images."""
    x = torch.randn(200, 3, 32, 32)
    stream = [letkd.Batch(x[part], part % C, part) for part in torch.arange(200).split(100)]
    made = {}
    for row in rows:
        recipe = resolve("cifar100/rn56-rn20", method=row, settings=[f"methods.{key}.K={K}" for key in K_OF.get(row, [])])
        methods = [METHODS[name].from_recipe(table) for name, table in recipe.methods.items()]
        torch.manual_seed(0)
        weights = recipe.phases[0].weights if recipe.phases else recipe.weights
        network = letkd.create_model(student, num_classes=C)
        made[recipe.title] = letkd.Distiller(network, teacher, methods, weights=weights).fit(stream)
    return made


def step(distiller: letkd.Distiller, optimizer: torch.optim.Optimizer, batch: letkd.Batch) -> None:
    distiller(batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def peak_memory(run) -> int:
    """Bytes held at the worst moment of `run`, over those held before it."""
    from torch.profiler import ProfilerActivity, profile

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    held = peak = 0
    for event in sorted(
        (e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="resnet56")
    parser.add_argument("--student", default="resnet20")
    parser.add_argument("--K", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rows", default=",".join(ROWS), help="methods, as letkd train --method names them; ce first")
    args = parser.parse_args()
    set_quiet(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    teacher = letkd.create_model(args.teacher, num_classes=C)
    made = {
        name: distiller.to(device).train()
        for name, distiller in distillers(teacher, args.student, args.K, args.rows.split(",")).items()
    }
    # Only the cost counts: with an untrained teacher a real learning rate makes some methods diverge within a few steps.
    optimizers = {name: torch.optim.SGD(distiller.parameters(), lr=1e-7, momentum=0.9) for name, distiller in made.items()}
    index = torch.arange(args.batch) % 200
    batch = letkd.Batch(torch.randn(args.batch, 3, 32, 32), index % C, index, epoch=20).to(device)
    times: dict[str, list[float]] = {name: [] for name in made}
    memory = {}
    for k in range(args.rounds + 1):
        for name, distiller in made.items():
            start = time.perf_counter()
            step(distiller, optimizers[name], batch)
            if device == "cuda":
                torch.cuda.synchronize()
            if k:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    for name, distiller in made.items():
        memory[name] = peak_memory(lambda name=name, distiller=distiller: step(distiller, optimizers[name], batch))
    table = Table(
        title=f"{args.teacher} → {args.student}, K={args.K}, batch {args.batch}, {device}, {torch.get_num_threads()} threads"
    )
    for column in ("step", "time (ms)", "time / first", "peak memory (MB)", "memory / first"):
        table.add_column(column, justify="left" if column == "step" else "right")
    unit = statistics.median(next(iter(times.values())))
    for name in made:
        middle = statistics.median(times[name])
        table.add_row(
            name,
            f"{1e3 * middle:.0f}",
            f"{middle / unit:.2f}",
            f"{memory[name] / 1e6:.0f}",
            f"{memory[name] / next(iter(memory.values())):.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
