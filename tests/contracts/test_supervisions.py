"""What every supervision promises, at whatever site it stands."""

import copy
import pickle

import pytest
import torch

from letkd.errors import FitError, NotFittedError
from letkd.functional import pixels
from letkd.methods import LetKD, Site
from letkd.supervision import SUPERVISIONS as REGISTRY
from letkd.supervision import Supervision
from letkd.supervision.artefacts import Origin, load_fitted, save_fitted
from tests.support.methods import SUPERVISIONS
from tests.support.pair import C, a_distiller, a_stream, features, in_batches, same_state

every_kind = pytest.mark.parametrize("kind", SUPERVISIONS)
every_fitted_kind = pytest.mark.parametrize("kind", [kind for kind, make in SUPERVISIONS.items() if make().fitted_buffers])
every_site = pytest.mark.parametrize("site", ["intermediate", "penultimate"])

ORIGIN = Origin("teacher", "tap", "data", "settings")


def at_site(kind: str, where: str = "penultimate", d: int = 4) -> Supervision:
    supervision = SUPERVISIONS[kind]()
    supervision.bind(where, d=d, C=C)
    return supervision


def fitted(kind: str, batch: int = 5, *, seed: int = 0) -> Supervision:
    return at_site(kind).fit(in_batches(features(seed=seed), batch))


def test_every_supervision_is_in_these_cases():
    assert {make().kind for make in SUPERVISIONS.values()} == set(SUPERVISIONS) == set(REGISTRY)


@every_fitted_kind
@every_site
def test_before_it_is_fitted_it_says_so(kind, site):
    supervision, (f_T, y, _) = at_site(kind, site), features()
    assert not supervision.is_fitted
    sentence = rf"Supervision\(K=\d+, .*\) at '{site}' has no \w+_ yet\. Run `letkd fit`, or call distiller\.fit\(loader\)"
    with pytest.raises(NotFittedError, match=sentence):
        supervision.p_T(f_T, y)
    assert not supervision.state_dict()


@every_kind
@every_site
def test_it_serves_any_site_of_a_distiller(kind, site):
    distiller = a_distiller(LetKD([Site(site, SUPERVISIONS[kind]())]), "unequal").fit(a_stream())
    step = distiller(a_stream()[0])
    assert set(step.terms) == {"ce", f"kd/{site}"}
    assert torch.isfinite(step.loss)
    layer = distiller.student.get_submodule({"intermediate": "last.0", "penultimate": "last"}[site] + f".kd_{site}")
    assert layer.omega.weight.shape[0] == distiller.fittings()[site].part.num_labels()


@every_kind
def test_labels_are_distributions(kind):
    f_T, y, _ = features(seed=1)
    supervision = fitted(kind)
    p_T = supervision.p_T(f_T, y)
    assert p_T.shape == (12, supervision.num_labels(), 3, 5)
    assert p_T.min() >= 0
    torch.testing.assert_close(p_T.sum(dim=1), torch.ones(12, 3, 5))
    assert not p_T.requires_grad
    assert p_T.std() > 0


@every_kind
@pytest.mark.parametrize("precision", [torch.float32, torch.float64, torch.bfloat16])
def test_labels_in_their_small_form_are_the_same(kind, precision):
    f_T, y, _ = features(seed=1)
    f_T, supervision = f_T.to(precision), fitted(kind)
    if precision == torch.float64:
        supervision.double()
    p_T, labels = pixels(supervision.p_T(f_T, y)), supervision.labels(f_T, y)
    torch.testing.assert_close(labels.dense(), p_T, rtol=1e-5, atol=2e-7)
    torch.testing.assert_close(labels.negative_entropy(), torch.xlogy(p_T, p_T).sum(dim=1), rtol=1e-4, atol=1e-5)
    W = torch.randn(supervision.num_labels(), 3, dtype=p_T.dtype, requires_grad=True)
    mixed, weight = labels.mix(W), torch.randn(len(p_T), 3, dtype=p_T.dtype)
    torch.testing.assert_close(mixed, p_T @ W, rtol=1e-4, atol=1e-5)
    (gradient,) = torch.autograd.grad((mixed * weight).sum(), W)
    torch.testing.assert_close(gradient, p_T.T @ weight, rtol=1e-4, atol=1e-4)


@every_kind
def test_a_pixels_label_is_its_own_affair(kind):
    """Neither the other images nor the other pixels of the batch change it."""
    f_T, y, _ = features(seed=1)
    supervision = fitted(kind)
    p_T = supervision.p_T(f_T, y)
    for part, expected in zip(in_batches((f_T, y), 5), p_T.split(5), strict=True):
        torch.testing.assert_close(supervision.p_T(*part), expected)
    torch.testing.assert_close(supervision.p_T(f_T[:, :, 1:2, 2:3], y), p_T[:, :, 1:2, 2:3])


@every_kind
def test_neither_order_nor_batch_size_of_the_stream_matters(kind):
    """Given the images' indices."""
    f_T, y, index = features()
    expected = fitted(kind, batch=12)
    shuffled = torch.randperm(12)
    for order, batch in [(torch.arange(12), 5), (shuffled, 12), (shuffled, 1)]:
        other = at_site(kind).fit(in_batches((f_T[order], y[order], index[order]), batch))
        assert other.state_dict().keys() == expected.state_dict().keys()
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(other.p_T(f_T, y), expected.p_T(f_T, y), rtol=1e-4, atol=1e-4)


@every_kind
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "artefact"])
def test_saved_and_loaded_it_gives_the_same_labels(kind, way, tmp_path):
    f_T, y, _ = features(seed=1)
    supervision = fitted(kind)
    other = at_site(kind)
    if way == "state_dict":
        other.load_state_dict(supervision.state_dict())
    elif way == "artefact":
        save_fitted(supervision, tmp_path, "penultimate", ORIGIN)
        assert load_fitted(other, tmp_path, "penultimate", ORIGIN)
        assert other.report_ == supervision.report_
    else:
        other = copy.deepcopy(supervision) if way == "deepcopy" else pickle.loads(pickle.dumps(supervision))
    assert other.is_fitted
    assert same_state(other.state_dict(), supervision.state_dict())
    assert torch.equal(other.p_T(f_T, y), supervision.p_T(f_T, y))


@every_kind
def test_loading_overwrites_what_was_fitted_before(kind):
    f_T, y, _ = features(seed=1)
    supervision, other = fitted(kind), fitted(kind, seed=5)
    other.load_state_dict(supervision.state_dict())
    assert torch.equal(other.p_T(f_T, y), supervision.p_T(f_T, y))


@every_kind
def test_it_moves_with_to(kind):
    f_T, y, _ = features(seed=1)
    supervision = fitted(kind)
    p_T = supervision.p_T(f_T, y)
    torch.testing.assert_close(supervision.double().p_T(f_T.double(), y).float(), p_T, rtol=1e-4, atol=1e-4)


@every_kind
def test_labels_are_computed_in_full_precision_under_autocast(kind):
    """In bf16 the distances of features as far from the origin as a ResNet's would be off by more than the gaps between centres."""
    f_T, y, index = features(n=60)
    f_T = f_T + 20
    supervision = at_site(kind).fit([(f_T, y, index)])
    exact = supervision.p_T(f_T, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p_T = supervision.p_T(f_T, y)
        again = at_site(kind).fit([(f_T, y, index)])
    assert same_state(again.state_dict(), supervision.state_dict())
    assert p_T.dtype == torch.float32
    torch.testing.assert_close(p_T, exact, rtol=1e-4, atol=1e-4)


@every_kind
def test_maps_of_low_precision_are_labelled_too(kind):
    f_T, y, _ = features(seed=1)
    p_T = fitted(kind).p_T(f_T.bfloat16(), y)
    assert p_T.dtype == torch.float32
    torch.testing.assert_close(p_T.sum(dim=1), torch.ones(12, 3, 5))


@every_fitted_kind
def test_maps_of_other_channels_than_it_was_fitted_to_are_refused(kind):
    f_T, y, _ = features(d=6)
    with pytest.raises(FitError, match=r"at 'penultimate' was fitted to maps of 4 channels but gets 6; fit it to this teacher"):
        fitted(kind).p_T(f_T, y)


@every_fitted_kind
def test_a_dead_layer_is_refused(kind):
    f_T, y, index = features()
    supervision = at_site(kind)
    with pytest.raises(FitError, match=r"the teacher's maps at 'penultimate' .*; choose another tap"):
        supervision.fit([(torch.zeros_like(f_T), y, index)])
    assert not supervision.is_fitted


@pytest.mark.parametrize("value", [0.1, 3.5])
def test_sub_classes_of_a_layer_that_never_varies_are_refused(value):
    f_T, y, index = features()
    with pytest.raises(FitError, match=r"the teacher's maps at 'penultimate' are constant or the same for every class"):
        at_site("subclass").fit([(torch.full_like(f_T, value), y, index)])
