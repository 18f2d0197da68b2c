"""What holds of layer, labels, losses and samples whatever the numbers."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from letkd.functional import match_to, pixel_kl, pixels
from letkd.layer import KDLayer, soft_match
from letkd.methods.kd import kd_loss
from letkd.supervision import SubclassSupervision
from letkd.supervision.stats import ClassMoments, Reservoir
from letkd.supervision.subclass import transition_scores
from tests.support.methods import SUPERVISIONS
from tests.support.pair import C, features, in_batches

few = settings(max_examples=25, deadline=None, derandomize=True)
numbers = st.floats(-5, 5, allow_nan=False, width=32)
seeds = st.integers(0, 2**31)


@st.composite
def maps(draw, d: tuple[int, int] = (1, 6)) -> torch.Tensor:
    shape = (draw(st.integers(1, 3)), draw(st.integers(*d)), draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    return torch.from_numpy(draw(hnp.arrays(np.float64, shape, elements=numbers)))


def permuted(f: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return f.flatten(2)[:, :, order].reshape(f.shape)


# ------------------------------------------------------------------------------------------------ the layer


@few
@given(maps(), seeds, st.booleans())
def test_the_layer_treats_pixels_alike(x, seed, train):
    torch.manual_seed(seed)
    layer = KDLayer(x.shape[1], 5).double().train(train and x.numel() > x.shape[1])  # BN needs more than one pixel
    order = torch.randperm(x.shape[2] * x.shape[3])
    torch.testing.assert_close(layer(permuted(x, order)), permuted(layer(x), order))


@few
@given(maps(), seeds, st.floats(0.01, 100))
def test_templates_match_directions_not_lengths(x, seed, scale):
    torch.manual_seed(seed)
    layer = KDLayer(x.shape[1], 5).double()
    torch.testing.assert_close(layer.omega(scale * x), layer.omega(x), rtol=1e-9, atol=1e-9)
    assert layer.omega(x).abs().max() <= 3 + 1e-6
    assert layer.eval()(x).sub(x).abs().max() <= 1 + 1e-6  # each channel of x' is a cosine


@few
@given(maps(), seeds)
def test_alpha_zero_is_the_identity_bit_by_bit(x, seed):
    torch.manual_seed(seed)
    assert torch.equal(KDLayer(x.shape[1], 5, alpha=0).double()(x), x)


@few
@given(maps(), seeds, st.floats(0.1, 3))
def test_x_hat_is_linear_in_alpha(x, seed, alpha):
    torch.manual_seed(seed)
    layer = KDLayer(x.shape[1], 5).double().eval()
    x_prime = layer(x) - x
    layer.alpha = alpha
    torch.testing.assert_close(layer(x) - x, alpha * x_prime)


@few
@given(maps(), st.floats(-2, 2), st.floats(0.1, 20))
def test_soft_match_leaves_a_share_for_none(a, mu, epsilon):
    p = soft_match(a, mu=mu, epsilon=epsilon)
    q = 1 - p.sum(dim=1)
    assert p.min() >= 0
    assert q.min() >= -1e-12
    torch.testing.assert_close(
        a.gather(1, p.argmax(dim=1, keepdim=True)), a.amax(dim=1, keepdim=True)
    )  # the best, or its equal
    torch.testing.assert_close(soft_match(a + 1.5, mu=mu + 1.5, epsilon=epsilon), p)  # only differences to μ count


@few
@given(seeds, st.integers(1, 5), st.floats(-2, 2))
def test_soft_match_tends_to_the_best_match_or_to_none(seed, K, mu):
    torch.manual_seed(seed)
    a = torch.randn(2, K, 2, 3, dtype=torch.float64)
    scores = torch.cat([a, torch.full_like(a[:, :1], mu)], dim=1)
    first, second = scores.topk(2, dim=1).values.unbind(dim=1)
    assume((first - second).min() > 1e-3)
    expected = ((a == first[:, None]) & (a > mu)).to(a.dtype)
    torch.testing.assert_close(soft_match(a, mu=mu, epsilon=1e5), expected)
    torch.testing.assert_close(soft_match(a, mu=10.0, epsilon=1e5), torch.zeros_like(a))  # all a below μ


# ------------------------------------------------------------------------------------------------ losses


@few
@given(maps(), seeds, st.floats(-3, 3))
def test_kl_is_not_negative_zero_at_equality_and_blind_to_a_shift(a, seed, shift):
    torch.manual_seed(seed)
    p_T = torch.softmax(torch.randn_like(a), dim=1)
    assert pixel_kl(p_T, a) >= -1e-12
    assert abs(pixel_kl(torch.softmax(a, dim=1), a + shift)) < 1e-12
    torch.testing.assert_close(pixel_kl(p_T, a + shift), pixel_kl(p_T, a))


@few
@given(maps(), seeds)
def test_kl_treats_pixels_and_labels_alike(a, seed):
    torch.manual_seed(seed)
    p_T = torch.softmax(torch.randn_like(a), dim=1)
    order, labels = torch.randperm(a.shape[2] * a.shape[3]), torch.randperm(a.shape[1])
    expected = pixel_kl(p_T, a)
    torch.testing.assert_close(pixel_kl(permuted(p_T, order), permuted(a, order)), expected)
    torch.testing.assert_close(pixel_kl(p_T[:, labels], a[:, labels]), expected)


@few
@given(hnp.arrays(np.float64, (4, 5), elements=numbers), st.floats(0.5, 10))
def test_kd_loss_is_zero_for_equal_logits_and_not_negative(logits, T):
    s, t = torch.from_numpy(logits), torch.from_numpy(logits[::-1].copy())
    assert abs(kd_loss(s, s + 2.0, T)) < 1e-9
    assert kd_loss(s, t, T) >= -1e-9


@few
@given(maps(), st.integers(1, 3), st.integers(1, 3))
def test_pooling_undoes_repetition_and_keeps_the_mean(f, m, n):
    large = f.repeat_interleave(m, dim=2).repeat_interleave(n, dim=3)
    torch.testing.assert_close(match_to(large, f.shape[2:], "here"), f)
    torch.testing.assert_close(match_to(large, (1, 1), "here").flatten(), f.mean(dim=(2, 3)).flatten())


@few
@given(maps())
def test_pixels_lose_nothing(f):
    b, d, h, w = f.shape
    assert torch.equal(pixels(f).reshape(b, h, w, d).permute(0, 3, 1, 2), f)


# ------------------------------------------------------------------------------------------------ supervisions


@pytest.fixture(scope="module")
def fitted():
    made = {kind: make() for kind, make in SUPERVISIONS.items()}
    for supervision in made.values():
        supervision.bind("here", d=4, C=C)
        supervision.fit(in_batches(features(n=18), 5))
    return made


@pytest.mark.parametrize("kind", SUPERVISIONS)
@few
@given(f_T=maps(d=(4, 4)), seed=seeds)
def test_labels_follow_their_pixels(fitted, kind, f_T, seed):
    torch.manual_seed(seed)
    supervision, f_T = fitted[kind], f_T.float() + 0.01 * torch.randn(f_T.shape)
    y, order = torch.randint(C, (len(f_T),)), torch.randperm(f_T.shape[2] * f_T.shape[3])
    p_T = supervision.p_T(f_T, y)
    assert p_T.min() >= 0
    torch.testing.assert_close(p_T.sum(dim=1), torch.ones(p_T[:, 0].shape))
    torch.testing.assert_close(supervision.p_T(permuted(f_T, order), y), permuted(p_T, order), rtol=1e-4, atol=1e-5)


@few
@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40))
def test_rows_of_transition_scores_sum_to_one(M, pairs):
    i, j = (torch.tensor([pair[side] % M for pair in pairs], dtype=torch.int64) for side in (0, 1))
    scores = transition_scores(i, j, M)
    assert scores.min() >= 0
    torch.testing.assert_close(scores.sum(dim=1), torch.ones(M).double())


@few
@given(st.integers(1, 4), st.integers(0, 2**31 - 2))
def test_own_class_mass_of_s_T_lies_on_the_diagonal(K, seed):
    """Where the prototypes are the centres, the nearest of all, if in the own class, is the own class's nearest."""
    f_T, y, index = features(n=15, seed=seed)
    supervision = SubclassSupervision(K, C=C, iterations=100, seed=seed % 100).fit([(f_T, y, index)])
    torch.testing.assert_close(supervision.s_T_.sum(dim=1), torch.ones(K * C))
    block = torch.block_diag(*[torch.ones(K, K)] * C).bool() & ~torch.eye(K * C).bool()
    apart = (supervision.rho_ - supervision.prototypes_).abs().max()
    assert apart < 1e-4, "Lloyd's iterations have not come to rest"
    assert not supervision.s_T_[block].any()


# ------------------------------------------------------------------------------------------------ streams


def taken(reservoir: Reservoir) -> list[list[float]]:
    rows, group = reservoir.sample()
    return torch.cat([group[:, None].float(), rows], dim=1).tolist()


def reservoir_of(parts, capacity: int, seed: int) -> Reservoir:
    reservoir = Reservoir(capacity, groups=3, seed=seed)
    for part in parts:
        reservoir.add(*part)
    return reservoir


@st.composite
def streams(draw):
    n = draw(st.integers(1, 30))
    torch.manual_seed(draw(seeds))
    f = torch.randn(n, 2, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    return f, torch.randint(3, (n,)), torch.randperm(1000)[:n]


@few
@given(streams(), st.integers(1, 60), seeds, st.integers(1, 12))
def test_a_sample_depends_on_neither_order_nor_batches(stream, capacity, seed, batch):
    order = torch.randperm(len(stream[0]))
    shuffled = tuple(part[order] for part in stream)
    whole = taken(reservoir_of([stream], capacity, seed))
    assert taken(reservoir_of(in_batches(shuffled, batch), capacity, seed)) == whole
    pixels_of = [int((stream[1] == c).sum()) * stream[0][0, 0].numel() for c in range(3)]
    assert [sum(row[0] == c for row in whole) for c in range(3)] == [min(capacity, n) for n in pixels_of]


@few
@given(streams(), st.integers(1, 60), seeds, st.integers(1, 29))
def test_samples_of_two_streams_merge_into_that_of_their_union(stream, capacity, seed, cut):
    """What the union keeps, the part it came from keeps, too."""
    parts = [tuple(side[:cut] for side in stream), tuple(side[cut:] for side in stream)]
    kept = [row for part in parts if len(part[0]) for row in taken(reservoir_of([part], capacity, seed))]
    assert all(row in kept for row in taken(reservoir_of([stream], capacity, seed)))


@few
@given(streams(), st.integers(1, 60), seeds)
def test_a_smaller_sample_is_part_of_a_larger(stream, capacity, seed):
    large = taken(reservoir_of([stream], capacity + 7, seed))
    assert all(row in large for row in taken(reservoir_of([stream], capacity, seed)))


@few
@given(streams(), st.integers(1, 12))
def test_moments_add_up(stream, batch):
    f, y, _ = stream
    whole, parts = ClassMoments.zeros(3, 2), ClassMoments.zeros(3, 2)
    whole.add(f, y)
    for part in in_batches((f, y), batch):
        parts.add(*part)
    for name in ("n", "sums", "second"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))
    rows, labels = pixels(f).double(), y.repeat_interleave(f[0, 0].numel())
    for c in range(3):
        assert int(whole.n[c]) == int((labels == c).sum())
        torch.testing.assert_close(whole.sums[c], rows[labels == c].sum(dim=0))
    torch.testing.assert_close(whole.second, rows.T @ rows)
