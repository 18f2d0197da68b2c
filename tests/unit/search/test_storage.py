"""The storage of a study."""

import itertools
from types import SimpleNamespace

import pytest

from letkd.search.storage import open_storage


def test_a_lock_that_a_killed_process_left_expires(tmp_path, monkeypatch):
    """Also if the storage was given by a relative path."""
    optuna = pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    storage = open_storage("study/study.journal")
    optuna.create_study(storage=storage, study_name="before")
    storage._backend._lock.acquire()  # and never released
    clock = itertools.count(step=5)
    sleeps = itertools.repeat(None, 100)  # StopIteration if it waits longer
    monkeypatch.setattr(
        "optuna.storages.journal._file.time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: next(sleeps))
    )
    optuna.create_study(storage=open_storage("study/study.journal"), study_name="after")
    assert {study.study_name for study in storage.get_all_studies()} == {"before", "after"}
