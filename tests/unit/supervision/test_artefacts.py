"""Fitted supervisions on disk: reused when all they depend on is the same, refitted, and said so, when anything is not."""

import os
import re
import threading
import time

import pytest
import torch
from torch import nn

from letkd.distiller import Distiller
from letkd.errors import FitError, NonFiniteError, RunError
from letkd.methods import LetKD, Method, Site, letkd2
from letkd.supervision import KMeansSupervision, SubclassSupervision
from letkd.supervision.artefacts import Origin, load_fitted, path_of, save_fitted
from tests.support.pair import TAPS, C, Net, a_distiller, a_stream, a_teacher, features, same_state

STEMS = {"intermediate.subclass", "penultimate.kmeans"}


class Counting(nn.Module):
    """A teacher that counts how often it runs."""

    def __init__(self, net: Net):
        super().__init__()
        self.first, self.last, self.fc, self.runs = net.first, net.last, net.fc, 0

    def forward(self, x):
        self.runs += 1
        return self.fc(self.last(self.first(x)).mean(dim=(2, 3)))


def distiller_for(method: Method | None = None, *, teacher_seed: int = 100, **options) -> Distiller:
    distiller = a_distiller(method or letkd2(6, 2), teacher=Counting(a_teacher(teacher_seed)), **options)
    distiller.teacher.runs = 0
    return distiller


def fit(distiller: Distiller, folder, **options) -> int:
    """How often the teacher ran."""
    distiller.teacher.runs = 0
    distiller.fit(a_stream(), folder=folder, **{"data": "the stream", **options})
    return distiller.teacher.runs


def stems(folder) -> list[str]:
    """The names of the files, without fingerprint and suffix."""
    return sorted(re.fullmatch(r"(.*)\.[0-9a-f]{12}\.safetensors", path.name)[1] for path in folder.iterdir())


def fitted_state(distiller: Distiller) -> dict[str, torch.Tensor]:
    return {f"{site}.{k}": v for site, fitting in distiller.fittings().items() for k, v in fitting.part.state_dict().items()}


@pytest.fixture
def folder(tmp_path):
    fit(distiller_for(), tmp_path)
    return tmp_path


def test_the_second_fit_costs_no_run_of_the_teacher(tmp_path, said):
    first, second = distiller_for(), distiller_for()
    assert fit(first, tmp_path / "made" / "for it") == 3
    assert stems(tmp_path / "made" / "for it") == sorted(STEMS)
    text = said()
    assert (
        "fitted SubclassSupervision(K=2, r=60) at intermediate (pixels seen 384, pixels counted 384, LDA components 2" in text
    )
    assert "fitted KMeansSupervision(K=6, tau=1) at penultimate (pixels seen 384, pixels clustered 384, " in text

    assert fit(second, tmp_path / "made" / "for it") == 0
    assert said().count("same teacher, tap, data and settings; reused") == 2
    assert same_state(fitted_state(second), fitted_state(first))
    step = second(a_stream()[0])
    assert torch.equal(step.loss, first(a_stream()[0]).loss)
    reports = [[fitting.part.report_ for fitting in distiller.fittings().values()] for distiller in (first, second)]
    assert reports[0] == reports[1]


CHANGES = {
    "teacher": ({"teacher_seed": 101}, {}),
    "tap": ({"teacher_taps": {**TAPS, "intermediate": "last.0.bn", "penultimate": "last.0"}}, {}),
    "pooling": ({"pair": "unequal"}, {}),
    "data": ({}, {"data": "another stream"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_is_said_and_fitted_anew(what, folder, said):
    build, how = CHANGES[what]
    changed = distiller_for(**build)
    assert fit(changed, folder, **how) == 3
    text = said()
    assert text.count(f"differ in {'tap' if what == 'pooling' else what}; fitting again, next to them") == 2
    alone = distiller_for(**build).fit(a_stream())
    assert same_state(fitted_state(changed), fitted_state(alone))
    assert fit(distiller_for(**build), folder, **how) == 0
    assert fit(distiller_for(), folder) == 0, "what was there before is still there"
    assert stems(folder) == sorted([*STEMS, *STEMS])


def test_an_old_folder_without_fingerprints_in_its_names_is_read(folder, said):
    for path in list(folder.iterdir()):
        path.rename(folder / re.sub(r"\.[0-9a-f]{12}\.", ".", path.name))
    said()
    assert fit(distiller_for(), folder) == 0
    assert "penultimate.kmeans.safetensors: same teacher, tap, data and settings; reused" in said()
    assert fit(distiller_for(letkd2(5, 2)), folder) == 3
    assert "penultimate.kmeans.safetensors: differs in settings; refitting" in said()


@pytest.mark.parametrize(
    "penultimate",
    [{"K": 5}, {"K": 6, "seed": 1}, {"K": 6, "iterations": 3}, {"K": 6, "pixels_per_centre": 10}],
)
def test_only_the_site_whose_settings_changed_is_fitted_anew(penultimate, folder, said):
    method = LetKD([Site("intermediate", SubclassSupervision(2)), Site("penultimate", KMeansSupervision(**penultimate))])
    assert fit(distiller_for(method), folder) == 3
    text = said()
    assert re.search(r"intermediate\.subclass\.\w+\.safetensors: same teacher, tap, data and settings; reused", text)
    assert "fits at penultimate differ in settings; fitting again" in text
    assert stems(folder) == sorted([*STEMS, "penultimate.kmeans"])


@pytest.mark.parametrize(
    "inter", [{"K": 3}, {"r": 1}, {"smoothing": 0.5}, {"seed": 2}, {"pixels_per_class": 9}, {"iterations": 2}]
)
def test_every_setting_of_the_sub_classes_counts(inter, folder, said):
    method = LetKD([Site("intermediate", SubclassSupervision(**{"K": 2, **inter}))])
    assert fit(distiller_for(method), folder) == 3
    assert "differ in settings" in said()


@pytest.mark.parametrize(
    "method",
    [
        lambda: letkd2(6, 2, tau=0.3, alpha_inter=0.5),
        lambda: LetKD(
            [
                Site("intermediate", SubclassSupervision(2, prototypes_online=True)),
                Site("penultimate", KMeansSupervision(6, scale_free=True)),
            ]
        ),
    ],
)
def test_what_does_not_touch_the_fit_does_not_cost_one(method, folder):
    """τ, α, and how the fitted numbers are read online."""
    assert fit(distiller_for(method()), folder) == 0


def test_force_fits_even_so(folder):
    assert fit(distiller_for(), folder, force=True) == 3


def test_one_changed_weight_is_another_teacher(folder):
    distiller = distiller_for()
    distiller.teacher.fc.bias.data[0] += 1e-6
    assert fit(distiller, folder) == 3
    distiller = distiller_for()
    distiller.teacher.last[0].bn.running_var[1] += 1e-6
    assert fit(distiller, folder) == 3


def test_a_student_of_other_weights_is_no_reason(folder):
    assert fit(distiller_for(seed=5), folder) == 0


# ------------------------------------------------------------------------------------------------ damaged files

ORIGIN = Origin("teacher", "tap", "data", "settings")


@pytest.fixture
def stored(tmp_path):
    supervision = SubclassSupervision(2, C=C).fit([features()])
    save_fitted(supervision, tmp_path, "here", ORIGIN)
    return supervision, path_of(supervision, tmp_path, "here", ORIGIN)


def reopened(path) -> SubclassSupervision | None:
    other = SubclassSupervision(2, C=C)
    return other if load_fitted(other, path.parent, "here", ORIGIN) else None


def test_a_truncated_file_is_refused_wherever_it_ends(stored, said):
    _, path = stored
    whole = path.read_bytes()
    for length in [0, 1, 7, 8, 9, *range(20, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert reopened(path) is None, length
        assert "refitting" in said(), length


@pytest.mark.slow
def test_a_flipped_bit_is_refused_wherever_it_is(stored):
    _, path = stored
    whole = path.read_bytes()
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        assert reopened(path) is None, at
    path.write_bytes(whole)
    assert reopened(path) is not None


def test_foreign_files_are_refused(stored, said, tmp_path):
    _, path = stored
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, path)
    assert reopened(path) is None
    assert "differs in format; refitting" in said()
    path.write_text("not a tensor in sight")
    assert reopened(path) is None
    assert "not readable" in said()


def test_a_damaged_file_costs_one_fit_and_is_whole_again(folder, said):
    (path,) = folder.glob("penultimate.kmeans.*")
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    expected = distiller_for().fit(a_stream())
    said()
    repaired = distiller_for()
    assert fit(repaired, folder) == 3
    assert "differs in content (checksum); refitting" in said()
    assert same_state(fitted_state(repaired), fitted_state(expected))
    assert fit(distiller_for(), folder) == 0


# ------------------------------------------------------------------------------------------------ nothing half done


def test_a_fit_that_fails_leaves_the_old_files(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    stream = a_stream()
    stream[1].x[0] = torch.nan
    with pytest.raises(NonFiniteError):
        distiller_for().fit(stream, folder=folder, data="another")
    with pytest.raises(FitError):
        distiller_for(letkd2(6000, 2)).fit(a_stream(), folder=folder, data="the stream")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_write_that_fails_leaves_the_old_file_and_no_scrap(stored, monkeypatch):
    supervision, path = stored
    before = path.read_bytes()

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(RunError, match="could not be written: disk full"):
        save_fitted(supervision, path.parent, "here", ORIGIN)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_runs_that_start_together_fit_once(tmp_path, said):
    """The second run starts while the first is fitting; it waits, and loads what the first has saved."""
    first, second = distiller_for(), distiller_for()
    began = threading.Event()

    def slowly():
        for batch in a_stream():
            began.set()
            time.sleep(0.5)
            yield batch

    thread = threading.Thread(target=lambda: first.fit(slowly(), folder=tmp_path, data="the stream"))
    thread.start()
    began.wait()
    runs_of_the_teacher = fit(second, tmp_path)
    thread.join()
    assert runs_of_the_teacher == 0
    assert same_state(fitted_state(first), fitted_state(second))
    assert "another run is fitting it; waiting" in said()
    assert set(stems(tmp_path)) == STEMS  # no lock is left


def test_a_failed_fit_lets_the_next_run_fit(tmp_path):
    def broken():
        yield a_stream()[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        distiller_for().fit(broken(), folder=tmp_path, data="the stream")
    assert fit(distiller_for(), tmp_path) > 0
    assert set(stems(tmp_path)) == STEMS


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/fits cannot be created: .*; choose another folder"):
        fit(distiller_for(), tmp_path / "file" / "fits")
