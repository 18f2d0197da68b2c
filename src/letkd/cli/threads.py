"""OpenMP threads that sleep while they wait."""

import os

VARIABLE = "OMP_WAIT_POLICY"


def wait_passively() -> None:
    """Let OpenMP threads sleep instead of spin while they wait; call this before torch is imported.

    A spinning thread uses processor time that the thread it waits for may need: on a busy machine two threads can be many times
    slower than one. Results do not change. The environment variable OMP_WAIT_POLICY, if set, takes precedence; `active` spins.
    `benchmarks/busy.py` measures the cost on an idle machine and the gain on a busy one.
    """
    os.environ.setdefault(VARIABLE, "passive")
