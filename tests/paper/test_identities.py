"""What the paper says must hold exactly: α = 0 is QUEST and the bare student, layers start as near-identities, labels are what they are."""

import copy
import inspect
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from letkd.batch import Batch
from letkd.functional import pixel_kl, pixels
from letkd.layer import KDLayer
from letkd.methods import KD, LetKD, Site, letkd1, letkd2, quest
from letkd.supervision import KMeansSupervision, SubclassSupervision
from tests.support.pair import C, a_distiller, a_stream, a_student, features, images

# ------------------------------------------------------------------------------------------------ α = 0


def quest_and_letkd1_at_alpha_zero():
    """Both with the same trunk, the same templates and the same fitted labels; in float64, as gradients add up in another order."""
    one, two = a_distiller(quest(6)).fit(a_stream()), a_distiller(letkd1(6, alpha=0.0)).fit(a_stream())
    omega = two.student.last.kd_penultimate.omega
    omega.load_state_dict(one.methods[0].predictor["penultimate"].state_dict())
    return one.double(), two.double()


def float64_stream() -> list[Batch]:
    return [replace(batch, x=batch.x.double()) for batch in a_stream()]


def trunk(distiller) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in distiller.student.named_parameters() if ".kd_" not in name}


def test_letkd1_at_alpha_zero_is_quest_in_terms_and_in_gradients():
    one, two = quest_and_letkd1_at_alpha_zero()
    batch = float64_stream()[0]
    step_one, step_two = one(batch), two(batch)
    assert step_one.terms.keys() == step_two.terms.keys() == {"ce", "kd/penultimate"}
    for name, term in step_one.terms.items():
        assert torch.equal(term, step_two.terms[name]), name
    assert torch.equal(step_one.logits, step_two.logits)
    step_one.loss.backward()
    step_two.loss.backward()
    assert trunk(one).keys() == trunk(two).keys()
    for name, parameter in trunk(one).items():
        torch.testing.assert_close(parameter.grad, trunk(two)[name].grad, rtol=1e-10, atol=1e-14)
    omega = two.student.last.kd_penultimate.omega
    for name, parameter in one.methods[0].predictor["penultimate"].named_parameters():
        torch.testing.assert_close(parameter.grad, omega.get_parameter(name).grad, rtol=1e-10, atol=1e-14)


def test_letkd1_at_alpha_zero_stays_quest_over_training():
    one, two = quest_and_letkd1_at_alpha_zero()
    optimizers = [torch.optim.SGD(d.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4) for d in (one, two)]
    for batch in float64_stream() * 2:
        losses = []
        for distiller, optimizer in zip((one, two), optimizers, strict=True):
            optimizer.zero_grad()
            step = distiller(batch)
            step.loss.backward()
            optimizer.step()
            losses.append(step.loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-10)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_alpha_zero_gives_the_bare_students_logits_bit_by_bit(mode):
    bare = a_student().train(mode == "train")
    distiller = a_distiller(letkd2(6, 2, alpha_penult=0.0, alpha_inter=0.0))
    distiller.train(mode == "train")
    x = images(5)[0]
    assert torch.equal(distiller.student(x), bare(x))


def test_at_alpha_zero_the_value_path_does_not_run():
    """No BN statistics gathered, no gradient, so no weight decay either."""
    distiller = a_distiller(letkd1(6, alpha=0.0)).fit(a_stream())
    distiller(a_stream()[0]).loss.backward()
    layer = distiller.student.last.kd_penultimate
    assert int(layer.bn.num_batches_tracked) == 0
    assert all(parameter.grad is None for part in (layer.bn, layer.nu) for parameter in part.parameters())


def test_the_exported_student_needs_images_only():
    distiller = a_distiller(letkd2(6, 2)).fit(a_stream())
    student = distiller.export()
    del distiller
    assert list(inspect.signature(student.forward).parameters) == ["x"]
    assert student(images(2)[0]).shape == (2, C)


# ------------------------------------------------------------------------------------------------ the layer at first

d, K = 64, 4096


@pytest.fixture(scope="module")
def layer() -> KDLayer:
    torch.manual_seed(0)
    return KDLayer(d, K)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(4, d, 8, 8, generator=torch.Generator().manual_seed(1)).relu()


@pytest.mark.parametrize(("channels", "templates"), [(64, 4096), (64, 800), (10, 6)])
def test_parameters_of_a_layer(channels, templates):
    count = sum(parameter.numel() for parameter in KDLayer(channels, templates).parameters())
    assert count == 2 * channels * templates + 2 * templates + 2


def test_scores_are_scaled_cosines_of_at_most_three(layer, x):
    a = layer.omega(x)
    assert a.abs().max() <= 3 + 1e-5
    assert a.abs().max() > 0.5


@pytest.mark.parametrize("templates", [4096, 800])
def test_at_first_the_value_path_is_small(templates, x):
    with torch.no_grad():
        x_prime = KDLayer(d, templates)(x) - x
    assert x_prime.std().item() == pytest.approx(1 / math.sqrt(templates), rel=0.2)
    assert x_prime.std() < 0.1 * x.std()


def test_at_first_half_of_the_units_are_active(layer, x):
    with torch.no_grad():
        active = (copy.deepcopy(layer).bn(layer.omega(x)) > 0).float().mean().item()
    assert active == pytest.approx(0.5, abs=0.03)


def test_at_first_the_kl_to_one_hot_labels_is_ln_K(layer, x):
    labels = torch.randint(K, (4, 8, 8))
    p_T = F.one_hot(labels, K).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        assert pixel_kl(p_T, layer.omega(x)).item() == pytest.approx(math.log(K), abs=0.2)


def test_the_value_path_does_not_feel_the_scale_of_the_templates(layer, x):
    loud = copy.deepcopy(layer)
    loud.omega.scale.data *= 10
    with torch.no_grad():
        torch.testing.assert_close(loud(x) - x, copy.deepcopy(layer)(x) - x, rtol=0, atol=1e-5)
        assert not torch.allclose(loud.omega(x), layer.omega(x))


def test_a_pixel_that_no_template_matches_is_left_alone(layer, x):
    deaf = copy.deepcopy(layer)
    torch.nn.init.constant_(deaf.bn.bias, -100.0)
    with torch.no_grad():
        assert torch.equal(deaf(x), x)


def test_the_semantic_vectors_learn_from_the_students_loss_alone():
    """The labels supervise ω; ν, behind the BN-ReLU, sees the cross-entropy only."""
    distiller = a_distiller(letkd1(6), weights={"ce": 0.0}).fit(a_stream())
    distiller(a_stream()[0]).loss.backward()
    layer = distiller.student.last.kd_penultimate
    assert layer.omega.weight.grad.abs().max() > 0
    for parameter in (layer.nu.weight, layer.nu.scale, layer.bn.weight):
        assert parameter.grad is None or not parameter.grad.any()


def test_both_losses_reach_the_templates():
    grads = []
    for weights in ({"ce": 0.0}, {"kd/penultimate": 0.0}):
        distiller = a_distiller(letkd1(6), weights=weights).fit(a_stream())
        distiller(a_stream()[0]).loss.backward()
        grads.append(distiller.student.last.kd_penultimate.omega.weight.grad)
        assert grads[-1].abs().max() > 0
    assert not torch.allclose(*grads)


# ------------------------------------------------------------------------------------------------ the labels


def test_penultimate_labels_peak_at_the_nearest_centre():
    f_T, y, index = features(n=30)
    supervision = KMeansSupervision(7).fit([(f_T, y, index)])
    p_T = supervision.p_T(f_T, y)
    torch.testing.assert_close(p_T.sum(dim=1), torch.ones(30, 3, 5))
    distance = torch.cdist(pixels(f_T).double(), supervision.rho_.double())
    assert torch.equal(pixels(p_T).argmax(dim=1), distance.argmin(dim=1))


@pytest.mark.parametrize("iterations", [20, 200])
def test_intermediate_labels_are_the_own_sub_class_and_other_classes(iterations):
    """Off the diagonal, the own class's block of s_T is empty, but for what prototypes and centres may differ by."""
    f_T, y, index = features(n=60)
    supervision = SubclassSupervision(4, C=C, iterations=iterations).fit([(f_T, y, index)])
    s_T = supervision.s_T_
    assert s_T.shape == (12, 12)
    torch.testing.assert_close(s_T.sum(dim=1), torch.ones(12))
    for c in range(C):
        block = s_T[4 * c : 4 * c + 4, 4 * c : 4 * c + 4]
        assert (block - block.diag().diag()).max() <= (0.03 if iterations == 20 else 0)
        assert block.diagonal().min() > 0.2
    assert (s_T - s_T.T).abs().max() > 0.01  # who is taken for whom need not be mutual


def test_intermediate_labels_are_one_and_the_same_within_a_sub_class():
    f_T, y, index = features(n=60)
    supervision = SubclassSupervision(4, C=C).fit([(f_T, y, index)])
    rows = pixels(supervision.p_T(f_T, y))
    labels = y.repeat_interleave(15)
    own = supervision.h1(supervision.z(f_T), labels)
    assert torch.equal(own // 4, labels)
    assert torch.equal(rows, supervision.s_T_[own])
    assert len(rows.unique(dim=0)) <= 12


def test_another_label_for_the_image_is_another_row():
    f_T, y, index = features(n=60)
    supervision = SubclassSupervision(4, C=C).fit([(f_T, y, index)])
    for c in range(C):
        peaks = pixels(supervision.p_T(f_T, torch.full_like(y, c)))
        assert (peaks[:, 4 * c : 4 * c + 4].amax(dim=1) > 0).all()


def test_no_gradient_reaches_the_teachers_side():
    distiller = a_distiller(letkd2(6, 2)).fit(a_stream())
    distiller(a_stream()[0]).loss.backward()
    for parameter in distiller.teacher.parameters():
        assert parameter.grad is None
    for fitting in distiller.fittings().values():
        assert not list(fitting.part.parameters())
        assert all(buffer.grad is None and not buffer.requires_grad for buffer in fitting.part.buffers())


# ------------------------------------------------------------------------------------------------ the paper's numbers


def test_defaults_are_the_papers():
    one, two = letkd1(), letkd2()
    (penult,) = one.sites.values()
    assert list(two.sites) == ["intermediate", "penultimate"]
    inter = two.sites["intermediate"]
    for site in (penult, two.sites["penultimate"], quest().sites["penultimate"]):
        assert isinstance(site.supervision, KMeansSupervision)
        assert (site.supervision.K, site.supervision.tau, site.supervision.iterations) == (4096, 1.0, 20)
    assert isinstance(inter.supervision, SubclassSupervision)
    assert (inter.supervision.K, inter.supervision.r, inter.supervision.smoothing) == (8, 60, 0.0)
    for site in (penult, inter):
        assert (site.alpha, site.scale_omega, site.scale_nu, site.beta, site.normalize_value_input) == (
            1.0,
            3.0,
            1.0,
            0.0,
            True,
        )
    inter.supervision.bind("intermediate", d=64, C=100)
    assert inter.supervision.num_labels() == 800
    assert KD().T == 4.0


def test_every_term_weighs_one_at_first():
    """(3.2) with λ = 1."""
    distiller = a_distiller(letkd2(6, 2)).fit(a_stream())
    step = distiller(a_stream()[0])
    assert set(step.terms) == {"ce", "kd/intermediate", "kd/penultimate"}
    torch.testing.assert_close(step.loss, sum(step.terms.values()))


def test_the_intermediate_layer_feeds_the_layers_above_it():
    """Knowledge put in after the first block of the last stage changes what the penultimate layer sees."""
    both = LetKD([Site("intermediate", KMeansSupervision(5)), Site("penultimate", KMeansSupervision(6), alpha=0.0)])
    distiller = a_distiller(both).eval()
    x = images(2)[0]
    with torch.no_grad():
        before = distiller.student(x)
        distiller.student.last[0].kd_intermediate.alpha = 0.0
        assert not torch.equal(distiller.student(x), before)
