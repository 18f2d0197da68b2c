"""Large blocks kept: where it is done, where not, and what it changes."""

import os
import platform
import subprocess
import sys

import pytest

from letkd.cli import memory

glibc = pytest.mark.skipif(
    platform.system() != "Linux" or platform.libc_ver()[0] != "glibc", reason="only glibc has these two settings"
)

FAULTS = """
import ctypes, resource, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, which would hide the faults
from letkd.cli.memory import keep_large_blocks
print(keep_large_blocks(), 'torch' in sys.modules)
import numpy
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 2**20
start = resident()
for k in range(12):
    if k == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    numpy.ones(16 * 2**20, dtype=numpy.float32)  # 64 MB, freed at once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, resident() - start)
"""


def faults(value: str) -> tuple[str, int, int]:
    """What was said, the page faults of ten blocks of 64 MB after the first two, and the MB that the process holds after the last."""
    env = {**os.environ, "LETKD_MALLOC": value}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, check=True)
    said, numbers = done.stdout.splitlines()
    n, held = map(int, numbers.split())
    return said, n, held


@pytest.mark.slow
@glibc
def test_a_block_that_was_freed_is_used_again_without_page_faults():
    (kept, few, held), (off, many, left) = faults("1"), faults("0")
    assert (kept, off) == ("True False", "False False")
    assert held >= 60
    assert left < 10
    assert few <= 0.1 * many  # a sandbox may count none at all


@pytest.mark.parametrize(("system", "libc"), [("Darwin", "glibc"), ("Linux", "musl"), ("Windows", "")])
def test_elsewhere_nothing_is_done(monkeypatch, system, libc):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    assert not memory.keep_large_blocks()
