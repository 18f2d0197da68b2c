"""Large tensors without page faults: glibc's allocator keeps big freed blocks instead of returning them to the system."""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
VARIABLE = "LETKD_MALLOC"


def keep_large_blocks() -> bool:
    """Let this process reuse freed blocks of up to 1 GB; returns whether the setting was applied.

    By default glibc maps a new block for every allocation over 32 MB and unmaps it when it is freed, so each K-wide tensor of a step
    (67 MB at K = 4096 and 64 images) causes page faults. Applied on Linux with glibc, unless LETKD_MALLOC=0. The command line calls
    it; in your own program, call it once, before the first large tensor. The process then keeps its peak memory.
    """
    if os.environ.get(VARIABLE, "1") == "0" or platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
