"""Health of the KD layer: each value is what its formula says, and looking changes nothing."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from letkd.inspect import sites
from letkd.inspect.health import health
from letkd.methods import KD, LetKD, Site, letkd1, letkd2, quest
from letkd.supervision import KMeansSupervision
from tests.support.pair import a_distiller, a_stream, same_state

LAYER = {"templates", "used", "matches", "dead", "discarded", "added", "scale_omega", "scale_nu"} | {
    "entropy_S",
    "entropy_T",
    "perplexity_T",
    "agreement",
}


@pytest.fixture
def distiller():
    return a_distiller(letkd2(6, 2)).fit(a_stream())


def test_values_by_loops_over_pixels(distiller):
    batch = a_stream()[0]
    seen = []
    layer = distiller.student.last.kd_penultimate
    layer.bn.bias.data[:2] = -100.0  # two templates that never pass
    values = health(distiller, batch)["penultimate"]
    handle = layer.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    features = []
    other = distiller.teacher.last.register_forward_hook(lambda module, args, output: features.append(output))
    with torch.no_grad():
        distiller.student.eval()(batch.x)
        distiller.teacher(batch.x)
    handle.remove()
    other.remove()
    (x, x_hat), f_T = seen[0], features[0]
    p_T = distiller.fittings()["penultimate"].part.p_T(f_T, batch.y)
    used, alive, matches, discarded, agree, H_S, H_T, labels, n, added, length = (
        set(),
        set(),
        0,
        0,
        0,
        0.0,
        0.0,
        0.0,
        0,
        0.0,
        0.0,
    )
    omega = (F.normalize(layer.omega.weight.flatten(1), dim=1) * layer.omega.scale).detach()
    bn = layer.bn
    for b in range(x.shape[0]):
        for i in range(x.shape[2]):
            for j in range(x.shape[3]):
                pixel = x[b, :, i, j]
                a = omega @ (pixel / pixel.norm().clamp_min(1e-12))
                p = ((a - bn.running_mean) / (bn.running_var + bn.eps).sqrt() * bn.weight + bn.bias).clamp_min(0)
                p_S = a.softmax(0)
                used.add(int(a.argmax()))
                alive |= set(p.nonzero().flatten().tolist())
                shares = [float((q / p.sum()).detach()) for q in p if q > 0]
                matches += math.exp(-sum(q * math.log(q) for q in shares)) if shares else 0
                discarded += int(p.sum() == 0)
                agree += int(p_T[b, :, i, j].argmax() == a.argmax())
                H_S -= float((p_S * p_S.log()).sum())
                entropy = -sum(float(q * math.log(q)) for q in p_T[b, :, i, j] if q > 0)
                H_T += entropy
                labels += math.exp(entropy)
                added += float((x_hat - x)[b, :, i, j].norm())
                length += float(pixel.norm())
                n += 1
    assert values["templates"] == 6
    assert values["used"] == len(used)
    assert values["matches"] == pytest.approx(matches / n, rel=1e-4)
    assert values["dead"] == 6 - len(alive) >= 2
    assert values["discarded"] == pytest.approx(discarded / n)
    assert values["agreement"] == pytest.approx(agree / n)
    assert values["entropy_S"] == pytest.approx(H_S / n, rel=1e-4)
    assert values["entropy_T"] == pytest.approx(H_T / n, rel=1e-4)
    assert values["perplexity_T"] == pytest.approx(labels / n, rel=1e-4)
    assert values["added"] == pytest.approx(added / length, rel=1e-4)
    assert (values["scale_omega"], values["scale_nu"]) == (3.0, 1.0)


def test_a_student_that_discards_everything_shows_it(distiller):
    distiller.student.last.kd_penultimate.bn.bias.data.fill_(-100.0)
    values = health(distiller, a_stream()[0])["penultimate"]
    assert (values["matches"], values["dead"], values["discarded"], values["added"]) == (0, 6, 1, 0)


@pytest.mark.parametrize("training", [True, False])
def test_looking_leaves_no_trace(distiller, training):
    distiller.train(training)
    distiller.student.first.eval()  # somebody's own choice
    modes = [module.training for module in distiller.modules()]
    state, teacher = copy.deepcopy(distiller.state_dict()), copy.deepcopy(distiller.teacher.state_dict())
    random = torch.get_rng_state()
    health(distiller, a_stream()[0])
    assert [module.training for module in distiller.modules()] == modes
    assert same_state(distiller.state_dict(), state)
    assert same_state(distiller.teacher.state_dict(), teacher)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in distiller.parameters())


def test_chunks_change_nothing(distiller, monkeypatch):
    whole = health(distiller, a_stream()[0])
    parts = sites.SiteView.parts
    monkeypatch.setattr(sites.SiteView, "parts", lambda self: parts(self, largest=1))
    for role, values in health(distiller, a_stream()[0]).items():
        assert values == pytest.approx(whole[role], rel=1e-5)


def test_the_sites_of_each_method():
    batch = a_stream()[0]
    assert health(a_distiller(KD()), batch) == {}
    found = health(a_distiller(letkd2(6, 2)).fit(a_stream()), batch)
    assert {role: set(values) for role, values in found.items()} == {"intermediate": LAYER, "penultimate": LAYER}
    assert found["intermediate"]["templates"] == 6
    kept = {"matches", "dead", "discarded", "added", "scale_nu"}
    assert set(health(a_distiller(quest(6)).fit(a_stream()), batch)["penultimate"]) == LAYER - kept
    assert set(health(a_distiller(letkd1(6, alpha=0.0)).fit(a_stream()), batch)["penultimate"]) == LAYER - kept
    unfitted = a_distiller(LetKD([Site("penultimate", KMeansSupervision(6))]), weights={"kd/penultimate": 0.0})
    assert set(health(unfitted, batch)["penultimate"]) == LAYER - {"entropy_T", "perplexity_T", "agreement"}


def test_unequal_maps_and_half_precision_around_it():
    distiller = a_distiller(letkd2(6, 2), "unequal").fit(a_stream())
    plain = health(distiller, a_stream()[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert health(distiller, a_stream()[0]) == plain
