"""Threads that sleep while they wait for each other."""

import os

VARIABLE = "OMP_WAIT_POLICY"


def wait_passively() -> None:
    """Let OpenMP's threads sleep instead of spin while they wait; call it before torch is imported.

    A thread that spins uses up the time of the processor that the one it waits for needs, so that on a busy machine two threads can
    be many times slower than one. Results do not change. The variable OMP_WAIT_POLICY, if set, counts instead; `active` spins.
    `benchmarks/busy.py` prints what it costs on a quiet machine and saves on a busy one.
    """
    os.environ.setdefault(VARIABLE, "passive")
