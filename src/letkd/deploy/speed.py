"""How long things take beside each other."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


@torch.no_grad()
def interleaved(
    runs: Mapping[str, Callable[[], Any]], *, rounds: int = 25, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds that each takes, one of each in every round and the fastest counted: noise of a busy machine only ever adds.

    Args:
        clock: `time.process_time` counts processor time, which a busy machine changes less; of one thread it is the time itself.
    """
    for run in runs.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = clock()
            run()
            taken[name].append(clock() - started)
    return {name: min(times) for name, times in taken.items()}
