"""Shared parts of the benchmarks: interleaved timing, peak memory, and comparison with recorded ratios."""

import argparse
import os
import random
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import tomli_w
import torch
from rich.console import Console
from rich.table import Table

from letkd.cli.memory import keep_large_blocks
from letkd.progress import set_quiet

RECORDED = Path(__file__).with_name("recorded.toml")
MARGIN = 1.5  # allowed factor over a recorded ratio: machines differ, and shared ones are noisy


def parser(doc: str, *, rounds: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help="number of timings per case; the median is shown")
    made.add_argument("--check", action="store_true", help=f"fail if a ratio is over {MARGIN} times the one in {RECORDED.name}")
    made.add_argument("--record", action="store_true", help=f"write the ratios to {RECORDED.name}")
    return made


def begin(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line and set up the process like the `letkd` command."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides the profiler's log lines
    keep_large_blocks()
    set_quiet(True)
    torch.manual_seed(0)
    return arguments.parse_args()


def device_title() -> str:
    """Device and threads, for a table's title."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} thread(s)"
    return f"{device}; {'seconds of CPU' if _one_thread() else 'wall time'}"


def _one_thread() -> bool:
    return torch.get_num_threads() == 1 and not torch.cuda.is_available()


def seconds(run: Callable[[], object]) -> float:
    """Time of one call: processor time on one thread, which other work disturbs least; otherwise wall-clock time."""
    clock = time.process_time if _one_thread() else time.perf_counter
    start = clock()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median time of every case. Each round runs all cases in turn, so that noise affects all alike; the first is warm-up.

    The order differs between rounds, so that no case always follows the same other case and inherits its memory state.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for k in range(rounds + 1):
        for name in random.Random(k).sample(list(cases), len(cases)):
            taken = seconds(cases[name])
            if k:
                times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}


def peak_memory(run: Callable[[], object]) -> int:
    """Peak of allocated bytes during `run` minus those before: from torch's allocator on a GPU, from a profile on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    allocated = peak = 0
    for event in sorted(
        (e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title)
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=max(100, Console().width)).print(table)


def compare_with_recorded(args: argparse.Namespace, name: str, ratios: Mapping[str, float]) -> None:
    """With `--check` compare ratios with the recorded ones; with `--record` write them."""
    recorded = tomllib.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if args.record:
        recorded[name] = {row: round(ratio, 3) for row, ratio in ratios.items()}
        RECORDED.write_text(tomli_w.dumps(recorded))
    if args.check:
        table = recorded.get(name, {})
        worse = [
            f"{row}: {ratio:.2f} against {table[row]:.2f}"
            for row, ratio in ratios.items()
            if row in table and ratio > MARGIN * table[row]
        ]
        if worse:
            sys.exit(f"{name}: over {MARGIN} times the recorded ratio: " + "; ".join(worse))
        print(f"{name}: {len(ratios.keys() & table.keys())} ratios are within {MARGIN} times the recorded ones")
