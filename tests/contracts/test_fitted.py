"""What everything that is fitted to a teacher promises: the supervisions, TDD's class tree, CRD's banks."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from letkd.errors import NonFiniteError, NotFittedError
from letkd.supervision import Supervision
from letkd.supervision.artefacts import Origin, load_fitted, save_fitted
from letkd.supervision.crd_bank import CRDBank
from letkd.supervision.fitted import Fitted
from letkd.supervision.tree import ClassTree
from tests.support.methods import SUPERVISIONS
from tests.support.pair import C, features, in_batches, same_state

FITTED: dict[str, Callable[[], Fitted]] = {
    **SUPERVISIONS,
    "tree": lambda: ClassTree(k=5, C=C),
    "crd_bank": lambda: CRDBank(6, 2),
}
INDEXED = ("crd_bank",)  # knows images by their index, so it cannot do without
every_kind = pytest.mark.parametrize("kind", FITTED)
every_fitted_kind = pytest.mark.parametrize("kind", [kind for kind, make in FITTED.items() if make().fitted_buffers])

ORIGIN = Origin("teacher", "tap", "data", "settings")


def at_site(kind: str, where: str = "penultimate", d: int = 4) -> Fitted:
    part = FITTED[kind]()
    part.bind(where, d=d, C=C)
    return part


def fitted(kind: str, batch: int = 5, *, seed: int = 0) -> Fitted:
    return at_site(kind).fit(in_batches(features(seed=seed), batch))


def _subclasses(cls: type) -> set[type]:
    return {cls} | {below for one in cls.__subclasses__() for below in _subclasses(one)}


def test_every_fitted_part_of_the_library_is_in_these_cases():
    ours = {cls for cls in _subclasses(Fitted) if cls.__module__.startswith("letkd.")}
    assert {type(make()) for make in FITTED.values()} == ours - {Fitted, Supervision}
    assert {make().kind for make in FITTED.values()} == set(FITTED)


@every_fitted_kind
def test_before_the_fit_it_holds_nothing(kind):
    part = at_site(kind)
    assert not part.is_fitted
    assert not part.state_dict()
    with pytest.raises(NotFittedError, match=r"at 'penultimate' has no \w+_ yet"):
        part._check_fitted()
    assert issubclass(NotFittedError, ValueError)


@every_kind
def test_neither_order_nor_batch_size_of_the_stream_matters(kind):
    """Given the images' indices."""
    f_T, y, index = features()
    expected = fitted(kind, batch=12).state_dict()
    shuffled = torch.randperm(12)
    for order, batch in [(torch.arange(12), 5), (shuffled, 12), (shuffled, 1)]:
        other = at_site(kind).fit(in_batches((f_T[order], y[order], index[order]), batch)).state_dict()
        assert other.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-4)


@every_fitted_kind
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "artefact"])
def test_saved_and_loaded_it_is_the_same(kind, way, tmp_path):
    part, other = fitted(kind), at_site(kind)
    if way == "state_dict":
        other.load_state_dict(part.state_dict())
    elif way == "artefact":
        save_fitted(part, tmp_path, "penultimate", ORIGIN)
        assert load_fitted(other, tmp_path, "penultimate", ORIGIN)
        assert other.report_ == part.report_
    else:
        other = copy.deepcopy(part) if way == "deepcopy" else pickle.loads(pickle.dumps(part))
    assert other.is_fitted
    assert same_state(other.state_dict(), part.state_dict())


@every_fitted_kind
def test_loading_overwrites_what_was_fitted_before(kind):
    part, other = fitted(kind), fitted(kind, seed=5)
    other.load_state_dict(part.state_dict())
    assert same_state(other.state_dict(), part.state_dict())


@every_kind
def test_fitted_again_it_is_what_the_last_stream_made_it(kind):
    again = fitted(kind, seed=5).fit(in_batches(features(), 5))
    assert same_state(again.state_dict(), fitted(kind).state_dict())


@every_kind
def test_the_same_seed_fits_the_same(kind):
    one, two = fitted(kind), fitted(kind)
    assert same_state(one.state_dict(), two.state_dict())


@pytest.mark.parametrize("kind", [kind for kind in FITTED if kind not in INDEXED])
def test_without_indices_the_batch_size_does_not_matter(kind):
    f_T, y, _ = features()
    one, two = (at_site(kind).fit(in_batches((f_T, y), batch)) for batch in (2, 12))
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
@every_fitted_kind
@pytest.mark.parametrize("way", ["state_dict", "artefact"])
@pytest.mark.parametrize("already", [False, True])
def test_what_is_loaded_goes_where_the_part_was_moved(kind, way, already, tmp_path):
    """The `meta` device stands for an accelerator."""
    part = fitted(kind)
    other = (fitted(kind) if already else at_site(kind)).to("meta")
    if way == "state_dict":
        other.load_state_dict(part.state_dict())
    else:
        save_fitted(part, tmp_path, "penultimate", ORIGIN)
        assert load_fitted(other, tmp_path, "penultimate", ORIGIN)
    assert {value.device.type for value in other.state_dict().values()} == {"meta"}


@every_fitted_kind
def test_nan_in_the_stream_stops_the_fit_and_nothing_is_fitted(kind):
    f_T, y, index = features()
    f_T[7, 0, 1, 1] = torch.inf
    part = at_site(kind, "intermediate")
    with pytest.raises(
        NonFiniteError, match=r"the teacher's map at 'intermediate' contains NaN or infinity; nothing was fitted"
    ):
        part.fit(in_batches((f_T, y, index), 5))
    assert not part.is_fitted
    part.fit(in_batches(features(), 5))  # and nothing of it is left in the next one
    assert same_state(part.state_dict(), fitted(kind).state_dict())
