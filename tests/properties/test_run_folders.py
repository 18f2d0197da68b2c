"""Damaged run folders, a few of the cases of tests/support/fuzz_runs.py: each command is done or says one sentence."""

import shutil

import pytest

from tests.support.fuzz_runs import OTHERS, READS, TENSORS, TEXTS, VERBS, letkd, make_ground, run_case


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return make_ground(tmp_path_factory.mktemp("ground"))


@pytest.mark.parametrize("first", range(7000, 7060, 10))
def test_a_damaged_run_folder(ground, first):
    for number in range(first, first + 10):
        case = run_case(ground, number)
        assert case.allowed, f"{number}: {case.verb}, {case.name} {case.how}: {case.outcome}: {case.err[-2000:]}"


def test_the_cases_reach_every_file_and_every_command():
    assert set(VERBS) == set(READS)
    assert {name for names in READS.values() for name in names} == {*TEXTS, *TENSORS, *OTHERS}


def test_a_log_that_names_a_far_epoch_costs_a_row(ground):
    home = ground.folder / "case"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(ground.folder / "stopped", home)
    (home / "metrics.jsonl").write_text('{"epoch": 1e12, "loss": 1.0}\n')
    code, _, err = letkd(*ground.command("export unfinished", home))
    assert code == 2
    assert "none of its 2 epochs is done; finish it with `letkd train" in err
    assert err.count("metrics.jsonl is damaged: 1 of its 1 rows cannot be read and are skipped") == 1
