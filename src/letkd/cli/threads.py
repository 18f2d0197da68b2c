"""OpenMP threads on a machine that other processes use."""

import os

from letkd.progress import say

VARIABLE = "OMP_NUM_THREADS"


def tell_if_busy() -> None:
    """Say so if other processes keep the machine busy, so that threads would wait for each other.

    Two threads next to one busy process were three times slower than one thread (`benchmarks/busy.py`). The number of threads is not
    changed, because sums in another order give other bits.
    """
    import torch

    threads = torch.get_num_threads()
    if VARIABLE in os.environ or threads == 1 or torch.cuda.is_available() or not hasattr(os, "getloadavg"):
        return
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.4 * cores:
        say(
            f"the machine is busy (load {load:.1f}, {cores} cores) and {threads} threads wait for each other; {VARIABLE}=1 may be "
            "faster for a small network"
        )
