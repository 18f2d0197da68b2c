"""Some cases of the fuzz of data files and recipes; `python -m tests.support.fuzz_data 4000` runs more."""

import pytest

from tests.support.fuzz_data import CASES, run


@pytest.mark.parametrize("kind", CASES)
def test_damaged_files_are_read_or_refused(tmp_path, kind):
    outcomes = {seed: run(kind, seed, tmp_path) for seed in range(40)}
    assert set(outcomes.values()) == {"read", "refused"}, outcomes
