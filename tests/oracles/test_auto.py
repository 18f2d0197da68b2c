"""K and τ from the data: the perplexity against loops in float64, the bisection's target, K's rule, and both in a fit."""

import math

import pytest
import torch

from letkd.distiller import Distiller
from letkd.errors import FitError
from letkd.methods import letkd1
from letkd.supervision import KMeansSupervision
from letkd.supervision.auto import auto_K, mean_perplexity, tau_for
from tests.support.pair import SIZE, TAPS, a_stream, a_student, a_teacher, features, same_state


def distances(n=50, K=9, *, scale=1.0):
    g = torch.Generator().manual_seed(0)
    f, rho = torch.randn(n, 4, generator=g), torch.randn(K, 4, generator=g)
    return scale * torch.cdist(f, rho).square()


def test_perplexity_by_loops():
    d = distances()
    expected = 0.0
    for row in d.double().tolist():
        p = [math.exp(-0.7 * value) for value in row]
        p = [value / sum(p) for value in p]
        expected += math.exp(-sum(value * math.log(value) for value in p)) / len(d)
    assert mean_perplexity(d, 0.7) == pytest.approx(expected, rel=1e-6)
    assert mean_perplexity(d, 0.7) == pytest.approx(mean_perplexity(d - d.mean(dim=1, keepdim=True), 0.7), rel=1e-4)
    assert mean_perplexity(d, 1e-9) == pytest.approx(9)
    assert mean_perplexity(d, 1e6) == pytest.approx(1)


@pytest.mark.parametrize("target", [1.2, 4.0, 8.5])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_tau_gives_the_target_whatever_the_scale(target, scale):
    d = distances(scale=scale)
    tau = tau_for(d, target, "here")
    assert mean_perplexity(d, tau) == pytest.approx(target, rel=1e-3)
    assert tau * scale == pytest.approx(tau_for(distances(), target, "here"), rel=1e-2)


def test_targets_that_cannot_be_had_get_a_sentence():
    for target in (9.0, 20.0):
        with pytest.raises(
            FitError, match=r"'here' needs a mean perplexity of .*, but with K=9 it must be above 1 and below 9"
        ):
            tau_for(distances(), target, "here")
    with pytest.raises(FitError, match="no tau gives a mean perplexity of 4 at 'here'"):
        tau_for(torch.ones(20, 9), 4.0, "here")


@pytest.mark.parametrize(
    ("pixels", "classes", "K"),
    [
        (50_000 * 64, 100, 4096),  # the paper's
        (45_000 * 64, 10, 512),
        (98 * 64, 10, 64),  # the demo's hundred images
        (100, 10, 2),
        (10**9, 1000, 32768),
    ],
)
def test_K_by_classes_and_pixels(pixels, classes, K):
    found, reason = auto_K(pixels, classes)
    assert found == K
    assert (f"{pixels:,} pixels" in reason) == (2 ** round(math.log2(41 * classes)) > K)


def fitted(**given) -> Distiller:
    options = {"student_taps": TAPS, "teacher_taps": TAPS, "example": torch.zeros(1, 3, *SIZE), "images": 24}
    torch.manual_seed(0)
    return Distiller(a_student(), a_teacher(), letkd1("auto", tau="auto"), **{**options, **given})


def test_a_fit_with_both(tmp_path, said):
    distiller = fitted()
    assert "K = 4 at penultimate: 384 pixels, at least 64 per centre; 3 classes alone would give 128" in said()
    supervision = distiller.fittings()["penultimate"].part
    supervision.perplexity = 2.0
    distiller.fit(a_stream(), folder=tmp_path, data="the stream")
    assert "fitted KMeansSupervision(K=4, tau=auto) at penultimate" in said()
    assert supervision.report_["mean perplexity"] == pytest.approx(2.0, rel=1e-3)
    p_T = supervision.p_T(*_maps(distiller))
    entropy = -(p_T.double() * p_T.double().clamp_min(1e-300).log()).sum(dim=1)
    assert float(entropy.exp().mean()) == pytest.approx(2.0, rel=1e-3), "on the pixels it was fitted to"

    again = fitted()
    again.fittings()["penultimate"].part.perplexity = 2.0
    again.fit([], folder=tmp_path, data="the stream")
    assert same_state(again.state_dict(), distiller.state_dict()), "found on disk, τ too"
    third = fitted()
    third.load_state_dict(distiller.state_dict())
    losses = [one(a_stream()[0]).loss for one in (distiller, again, third)]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2]), "from a checkpoint, τ too"
    with pytest.raises(FitError):  # another perplexity is another fit, here to nothing
        fitted().fit([], folder=tmp_path, data="the stream")


def _maps(distiller):
    maps, labels = [], []
    for batch in a_stream():
        part = distiller.fittings()["penultimate"]
        with torch.no_grad():
            maps.append(part.f_T(distiller.run_teacher(batch.x)))
        labels.append(batch.y)
    return torch.cat(maps), torch.cat(labels)


def test_the_perplexity_is_told_with_a_tau_of_ones_own_too():
    supervision = KMeansSupervision(6, 0.5).fit([features()])
    assert 1 <= supervision.report_["mean perplexity"] <= 6


def test_what_cannot_be_gets_a_sentence():
    with pytest.raises(FitError, match="omit scale_free"):
        KMeansSupervision(6, "auto", scale_free=True)
    with pytest.raises(FitError, match=r'K = "auto" at .penultimate. needs the number of training images'):
        fitted(images=None)
    with pytest.raises(FitError, match="works only in a Distiller"):
        KMeansSupervision("auto").fit([features()])
