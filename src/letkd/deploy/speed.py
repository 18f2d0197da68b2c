"""Run times, measured in turns."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


@torch.no_grad()
def interleaved(
    runs: Mapping[str, Callable[[], Any]], *, rounds: int = 25, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds per run: every round runs each once, and the fastest counts, because noise on a busy machine only adds time.

    Args:
        clock: `time.process_time` counts processor time, which depends less on other load; use it with one thread.
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
