"""A busy machine is told, and only if it matters."""

import pytest
import torch

from letkd.cli.threads import VARIABLE, tell_if_busy


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (1.9, 0.0, 0.0))


def test_a_busy_machine_is_told(two_threads, said):
    tell_if_busy()
    assert (
        "the machine is busy (load 1.9, 2 cores) and 2 threads wait for each other; OMP_NUM_THREADS=1 may be faster" in said()
    )


@pytest.mark.parametrize("change", ["quiet", "chosen", "one thread", "GPU"])
def test_nothing_is_told_otherwise(two_threads, said, monkeypatch, change):
    if change == "quiet":
        monkeypatch.setattr("os.getloadavg", lambda: (0.5, 2.0, 2.0))
    elif change == "chosen":
        monkeypatch.setenv(VARIABLE, "2")
    elif change == "one thread":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tell_if_busy()
    assert said() == ""
