"""Large tensors without page faults: glibc's allocator told to keep big blocks instead of giving them back at every free."""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
VARIABLE = "LETKD_MALLOC"


def keep_large_blocks() -> bool:
    """Let freed blocks of up to 1 GB be used again by this process; says whether that was done.

    By default glibc maps every block over 32 MB anew and unmaps it when it is freed, so each K-wide tensor of a step (67 MB at
    K = 4096 and 64 images) is page-faulted from the start. Done on Linux with glibc, unless LETKD_MALLOC=0. The command line
    does it; in a program of your own call it once, before the first large tensor. The process then holds on to its peak memory.
    """
    if os.environ.get(VARIABLE, "1") == "0" or platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
