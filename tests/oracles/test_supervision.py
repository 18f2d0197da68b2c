"""The supervisions against what they stand for: distances, scikit-learn's LDA and K-means, counts by loops, honest samples."""

import math
import re
from collections import Counter
from itertools import pairwise

import faiss
import numpy as np
import pytest
import torch
from scipy.stats import chi2
from sklearn.cluster import KMeans
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from letkd.errors import FitError
from letkd.functional import pixels
from letkd.supervision import ConvSupervision, KMeansSupervision, SubclassSupervision
from letkd.supervision.kmeans import nearest_gaps, soft_assign
from letkd.supervision.stats import ClassMoments, MiniBatches, Reservoir, kmeans, nearest_centre
from letkd.supervision.subclass import transition_scores
from tests.support.pair import C, features, in_batches

# ------------------------------------------------------------------------------------------------ soft assignment


def squared_distance(u, v) -> float:
    return sum((float(p) - float(q)) ** 2 for p, q in zip(u, v, strict=True))


@pytest.mark.parametrize("tau", [1.0, 0.05])
def test_soft_assign_is_the_softmax_of_negative_squared_distances(tau):
    f, rho = torch.randn(2, 3, 2, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    p_T = soft_assign(f, rho, tau)
    for b in range(2):
        for i in range(2):
            for j in range(4):
                weight = [math.exp(-tau * squared_distance(f[b, :, i, j], centre)) for centre in rho]
                expected = [v / sum(weight) for v in weight]
                assert p_T[b, :, i, j].tolist() == pytest.approx(expected, rel=1e-10)


def test_soft_assign_peaks_at_the_nearest_centre_also_far_from_the_origin():
    rho = torch.randn(20, 8) + 30  # norms as of ResNet-56's centres and more
    f = rho[torch.randint(20, (2, 3, 3))].permute(0, 3, 1, 2) + 0.1 * torch.randn(2, 8, 3, 3)
    nearest = ((pixels(f).double()[:, None] - rho.double()) ** 2).sum(dim=2).argmin(dim=1)
    p_T = soft_assign(f, rho, 1.0)
    assert torch.equal(pixels(p_T).argmax(dim=1), nearest)
    expected = torch.softmax(-((pixels(f).double()[:, None] - rho.double()) ** 2).sum(dim=2), dim=1)
    torch.testing.assert_close(pixels(p_T).double(), expected, rtol=0, atol=5e-3)


def test_conv_supervision_is_the_softmax_of_the_activations():
    f = torch.randn(2, 3, 2, 2, dtype=torch.float64)
    p_T = ConvSupervision(tau=0.7).p_T(f, torch.zeros(2, dtype=torch.int64))
    for b in range(2):
        weight = [math.exp(0.7 * float(v)) for v in f[b, :, 1, 0]]
        assert p_T[b, :, 1, 0].tolist() == pytest.approx([v / sum(weight) for v in weight])


# ------------------------------------------------------------------------------------------------ K-means


def inertia(f: torch.Tensor, centres: torch.Tensor) -> float:
    return float(torch.cdist(f.double(), centres.double()).square().min(dim=1).values.sum())


def test_kmeans_is_as_tight_as_scikit_learns_and_faisss_own():
    f = torch.randn(3000, 4) + 2 * torch.randn(12, 4)[torch.randint(12, (3000,))]
    ours = min(inertia(f, kmeans(f, 12, seed=seed)) for seed in range(3))
    theirs = KMeans(12, n_init=3, init="random", max_iter=20, random_state=0).fit(f.numpy()).inertia_
    assert ours == pytest.approx(theirs, rel=0.04)
    engine = faiss.Kmeans(4, 12, niter=20, nredo=3, seed=1, max_points_per_centroid=3000)
    engine.train(f.numpy())
    assert ours == pytest.approx(inertia(f, torch.from_numpy(engine.centroids)), rel=0.04)


def test_kmeans_ends_at_the_means_of_all_rows_it_was_given():
    """2000 rows a centre is more than faiss would take of itself (256): were rows left out, the means would differ."""
    f = torch.randn(6000, 3) + 10 * torch.eye(3)[torch.arange(6000) % 3]
    centres = kmeans(f, 3, iterations=50)
    own = nearest_centre(f, centres)
    means = torch.stack([f[own == k].mean(dim=0) for k in range(3)])
    torch.testing.assert_close(centres, means, rtol=0, atol=1e-4)


def test_mini_batches_come_near_what_faiss_finds_and_repeat_for_the_same_order():
    f_T, y, _ = features(400, h=5, w=5)
    stream = in_batches((f_T, y), 40)

    def fitted(**options) -> KMeansSupervision:
        return KMeansSupervision(12, **options).fit(stream)

    first, again, whole = fitted(engine="minibatch"), fitted(engine="minibatch"), fitted(pixels_per_centre="all")
    assert torch.equal(first.rho_, again.rho_)
    assert inertia(pixels(f_T), first.rho_) < 1.15 * inertia(pixels(f_T), whole.rho_)
    assert first.report_["pixels clustered"] == 400 * 25


def test_mini_batches_are_let_go_and_the_last_may_be_small():
    f_T, _, _ = features(30, h=5, w=5)  # 750 pixels
    stream = MiniBatches(6, size=100)
    for part in f_T.split(4):
        stream.add(part)
        assert sum(len(rows) for rows in stream._waiting) < 100
    assert len(stream._waiting) == 1
    centres = stream.finish()
    assert (centres.shape, stream.seen) == ((6, 4), 750)
    assert inertia(pixels(f_T), centres) < 1.25 * inertia(pixels(f_T), kmeans(pixels(f_T), 6))


def test_mini_batches_with_too_few_pixels_or_several_processes(monkeypatch):
    f_T, y, _ = features(1, h=2, w=2)
    with pytest.raises(FitError, match="needs at least K=9 pixels but got 4; choose a smaller K, or more images"):
        KMeansSupervision(9, engine="minibatch").fit([(f_T, y)])
    monkeypatch.setattr("letkd.supervision.kmeans.is_distributed", lambda: True)
    with pytest.raises(FitError, match="by mini-batches does not work in several processes"):
        KMeansSupervision(2, engine="minibatch").gather()
    with pytest.raises(FitError, match="engine='lloyd': choose 'faiss' or 'minibatch'"):
        KMeansSupervision(2, engine="lloyd")


def test_kmeans_with_as_many_centres_as_rows_has_no_distance_left():
    f = torch.randn(7, 3)
    assert inertia(f, kmeans(f, 7)) < 1e-9


def test_nearest_centre_by_brute_force_whatever_the_chunk():
    f, centres = torch.randn(50, 3), torch.randn(6, 3)
    expected = [min(range(6), key=lambda k: squared_distance(row, centres[k])) for row in f]
    for chunk in (1, 7, 4096):
        assert nearest_centre(f, centres, chunk=chunk).tolist() == expected


def test_kmeans_supervision_clusters_the_pixels_and_measures_their_gaps():
    f_T, y, index = features(n=30)
    supervision = KMeansSupervision(6, pixels_per_centre="all").fit([(f_T, y, index)])
    best = KMeans(6, n_init=5, random_state=0).fit(pixels(f_T).numpy()).inertia_
    assert best * 0.999 <= inertia(pixels(f_T), supervision.rho_) < best * 1.15  # one random start
    gaps = [
        min(squared_distance(one, two) for m, two in enumerate(supervision.rho_) if m != k)
        for k, one in enumerate(supervision.rho_)
    ]
    assert float(supervision.nearest_) == pytest.approx(sum(gaps) / 6, rel=1e-5)
    torch.testing.assert_close(
        nearest_gaps(supervision.rho_, chunk=4), torch.tensor(gaps, dtype=torch.float64), rtol=1e-5, atol=0
    )
    p_T = supervision.p_T(f_T, y)
    peaks = p_T.amax(dim=1)
    entropies = [-sum(p * math.log(p) for p in row if p > 0) for row in pixels(p_T).double().tolist()]
    assert supervision.report_ == {
        "pixels seen": 450,
        "pixels clustered": 450,
        "mean perplexity": pytest.approx(sum(map(math.exp, entropies)) / len(entropies), rel=1e-4),
        "mean of largest label at tau 1": pytest.approx(peaks.mean().item(), rel=1e-4),
        "labels per pixel above 1e-07 of it": pytest.approx((p_T > 1e-7 * peaks[:, None]).sum(dim=1).double().mean().item()),
        "mass of the other labels": pytest.approx(0, abs=6e-7),
    }


@pytest.mark.parametrize("scale_free", [False, True])
@pytest.mark.parametrize(("tau", "kind"), [(1e4, "one-hot"), (1e-5, "uniform")])
def test_labels_that_say_little_are_told_with_a_tau_that_gives_a_perplexity_of_five(tau, kind, scale_free, said):
    stream = in_batches(features(n=60), 20)
    KMeansSupervision(12, tau, scale_free=scale_free).fit(stream)
    (line,) = said().splitlines()
    assert re.search(rf"warning: .* nearly {kind}: p_T has a perplexity of [\d.]+ for K=12 at tau {tau:g}; tau = ", line)
    better = float(re.search(r"; tau = (\S+) would give about 5$", line)[1])
    other = KMeansSupervision(12, better, scale_free=scale_free).fit(stream)
    assert said() == ""
    assert other.report_["mean perplexity"] == pytest.approx(5, rel=0.1)


def test_a_sample_that_holds_all_pixels_gives_what_all_pixels_give():
    stream = features(n=30)
    every, enough, few = (KMeansSupervision(6, pixels_per_centre=n).fit(in_batches(stream, 7)) for n in ("all", 75, 20))
    assert torch.equal(enough.rho_, every.rho_)
    assert (enough.report_["pixels clustered"], few.report_["pixels clustered"]) == (450, 120)
    assert not torch.equal(few.rho_, every.rho_)


def test_scale_free_labels_do_not_depend_on_the_scale_of_the_features():
    f_T, y, index = features(n=30)
    plain, large = (KMeansSupervision(6, 0.8, scale_free=True).fit([(s * f_T, y, index)]) for s in (1.0, 16.0))
    torch.testing.assert_close(plain.p_T(f_T, y), large.p_T(16 * f_T, y), rtol=0, atol=1e-5)
    raw = KMeansSupervision(6, 0.8 / float(plain.nearest_)).fit([(f_T, y, index)])
    torch.testing.assert_close(plain.p_T(f_T, y), raw.p_T(f_T, y), rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------ LDA


def labelled(n: int, d: int, classes: int, *, shift: float = 0.0, dead: tuple[int, ...] = (), constant: tuple[int, ...] = ()):
    """Maps [n d 2 3] with correlated channels of unequal size, and labels."""
    mix = torch.randn(d, d, dtype=torch.float64) * torch.logspace(-1, 1, d, dtype=torch.float64)
    y = torch.arange(n) % classes
    f = torch.randn(n, 2, 3, d, dtype=torch.float64) @ mix + 3 * torch.randn(classes, d, dtype=torch.float64)[y][:, None, None]
    f = f.permute(0, 3, 1, 2).contiguous() + shift
    f[:, list(dead)] = 0.0
    f[:, list(constant)] = 0.7
    return f, y


def moments_of(f: torch.Tensor, y: torch.Tensor, classes: int, batch: int = 7) -> ClassMoments:
    moments = ClassMoments.zeros(classes, f.shape[1])
    for part in in_batches((f, y), batch):
        moments.add(*part)
    return moments


def up_to_sign(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """`two` with each column turned to `one`'s sign."""
    return two * torch.sign((one * two).sum(dim=0))


@pytest.mark.parametrize(
    ("d", "classes", "r", "options"),
    [
        pytest.param(6, 4, 3, {}, id="plain"),
        pytest.param(6, 4, 2, {}, id="fewer components than there are"),
        pytest.param(4, 7, 60, {}, id="more classes than channels"),
        pytest.param(9, 3, 60, {}, id="more channels than classes"),
        pytest.param(6, 2, 60, {}, id="two classes"),
        pytest.param(7, 4, 60, {"dead": (0, 5)}, id="dead channels"),
        pytest.param(6, 4, 3, {"shift": 100.0}, id="far from the origin"),
    ],
)
def test_lda_is_scikit_learns(d, classes, r, options):
    f, y = labelled(60, d, classes, **options)
    rows, labels = pixels(f), y.repeat_interleave(6)
    W, b = moments_of(f, y, classes).lda(r)
    kept = min(r, classes - 1, d - len(options.get("dead", ())))
    assert W.shape == (kept, d)
    sklearn = LinearDiscriminantAnalysis(solver="svd", n_components=kept)
    expected = torch.from_numpy(sklearn.fit(rows.numpy(), labels.numpy()).transform(rows.numpy()))
    z, N = rows @ W.T + b, len(rows)
    scale = float(z.norm() / expected.norm())  # scikit-learn divides S_w by N − C, newer versions by N
    assert scale == pytest.approx(1) or scale == pytest.approx(math.sqrt((N - classes) / N))
    torch.testing.assert_close(up_to_sign(expected, z), scale * expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"dead": (1,)}, {"constant": (0, 3)}])
def test_lda_gives_unit_within_class_covariance_and_zero_mean(options):
    f, y = labelled(80, 6, 5, **options)
    W, b = moments_of(f, y, 5).lda(60)
    z, labels = pixels(f) @ W.T + b, y.repeat_interleave(6)
    torch.testing.assert_close(z.mean(dim=0), torch.zeros(len(W)).double(), rtol=0, atol=1e-9)
    centred = torch.cat([z[labels == c] - z[labels == c].mean(dim=0) for c in range(5)])
    torch.testing.assert_close(centred.T @ centred / (len(z) - 5), torch.eye(len(W)).double(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("value", [0.0, -0.0072524815797805784, 0.1, 1.4225894212722778, 267.1349048614502])
def test_lda_gives_no_weight_to_a_channel_that_never_varies(value):
    """In streamed moments its variance is rounding, whose sign and size are chance."""
    f, y = labelled(200, 6, 5)
    f[:, 2] = value
    for batch in (3, 7, 200):
        W, _ = moments_of(f, y, 5, batch).lda(60)
        assert len(W) == 4
        assert W[:, 2].abs().max() < 1e-12


def test_lda_drops_a_channel_that_repeats_another():
    f, y = labelled(60, 5, 4)
    alone, _ = moments_of(f, y, 4).lda(60)
    doubled, b = moments_of(torch.cat([f, f[:, :1]], dim=1), y, 4).lda(60)
    z = pixels(torch.cat([f, f[:, :1]], dim=1)) @ doubled.T + b
    expected = pixels(f - f.mean(dim=(0, 2, 3), keepdim=True)) @ alone.T
    torch.testing.assert_close(up_to_sign(expected, z), expected, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------ sub-classes


def brute_h1(z, y: int, centres) -> int:
    K = centres.shape[1]
    return y * K + min(range(K), key=lambda k: squared_distance(z, centres[y, k]))


def brute_h2(z, prototypes) -> int:
    flat = prototypes.flatten(0, 1)
    return min(range(len(flat)), key=lambda m: squared_distance(z, flat[m]))


@pytest.fixture(params=[20, 1], ids=["centres at rest", "centres and prototypes apart"])
def fitted(request):
    stream = features(n=18)
    return SubclassSupervision(3, C=C, iterations=request.param).fit(in_batches(stream, 5)), stream


def test_h1_and_h2_by_brute_force(fitted):
    supervision, (f_T, y, _) = fitted
    z, labels = supervision.z(f_T), y.repeat_interleave(15)
    assert supervision.h1(z, labels).tolist() == [
        brute_h1(row, int(c), supervision.rho_) for row, c in zip(z, labels, strict=True)
    ]
    assert supervision.h2(z).tolist() == [brute_h2(row, supervision.prototypes_) for row in z]


def test_prototypes_are_the_means_of_their_sub_classes(fitted):
    supervision, (f_T, y, _) = fitted
    z, labels = supervision.z(f_T), y.repeat_interleave(15)
    own = supervision.h1(z, labels)
    for m, prototype in enumerate(supervision.prototypes_.flatten(0, 1)):
        torch.testing.assert_close(prototype, z[own == m].mean(dim=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_s_T_counts_which_sub_class_is_taken_for_which(fitted, smoothing):
    """Alg. 2: over all pixels, h_1 among the own class's centres, h_2 among all prototypes; then each row by its sum."""
    supervision, (f_T, y, index) = fitted
    supervision.smoothing = smoothing
    z = supervision.fit([(f_T, y, index)]).z(f_T)
    counts = [[smoothing] * 9 for _ in range(9)]
    for n, row in enumerate(z):
        counts[brute_h1(row, int(y[n // 15]), supervision.rho_)][brute_h2(row, supervision.prototypes_)] += 1
    expected = torch.tensor([[count / sum(row) for count in row] for row in counts])
    torch.testing.assert_close(supervision.s_T_, expected)
    assert supervision.report_["pixels counted"] == len(z) == 270


def test_p_T_is_the_row_of_the_own_sub_class(fitted):
    supervision, (f_T, y, _) = fitted
    p_T, z = supervision.p_T(f_T, y), supervision.z(f_T)
    assert p_T.shape == (18, 9, 3, 5)
    for n, row in enumerate(z):
        image, at = divmod(n, 15)
        k_star = brute_h1(row, int(y[image]), supervision.rho_)
        assert int(y[image]) * 3 <= k_star < (int(y[image]) + 1) * 3
        assert torch.equal(p_T[image, :, at // 5, at % 5], supervision.s_T_[k_star])


def test_own_class_clusters_are_k_means_of_the_class():
    f_T, y, index = features(n=18)
    supervision = SubclassSupervision(3, C=C).fit([(f_T, y, index)])
    z, labels = supervision.z(f_T), y.repeat_interleave(15)
    for c in range(C):
        best = KMeans(3, n_init=5, random_state=0).fit(z[labels == c].numpy()).inertia_
        assert inertia(z[labels == c], supervision.rho_[c]) == pytest.approx(best, rel=0.2)  # one random start


def test_prototypes_online_looks_up_by_prototype():
    stream = features(n=18)
    supervision = SubclassSupervision(3, C=C, prototypes_online=True, iterations=1).fit([stream])
    assert not torch.allclose(supervision.rho_, supervision.prototypes_, atol=1e-3)
    z, labels = supervision.z(stream[0]), stream[1].repeat_interleave(15)
    expected = [brute_h1(row, int(c), supervision.prototypes_) for row, c in zip(z, labels, strict=True)]
    assert supervision.h1(z, labels).tolist() == expected


def test_lda_uses_all_pixels_even_where_the_counts_use_a_sample():
    stream = features(n=30)
    every, some = (SubclassSupervision(3, C=C, pixels_per_class=m).fit([stream]) for m in (None, 20))
    assert (every.report_["pixels counted"], some.report_["pixels counted"]) == (450, 60)
    assert torch.equal(every.W_lda_, some.W_lda_)
    assert not torch.equal(every.s_T_, some.s_T_)


def test_transition_scores_by_counting():
    i, j = torch.randint(5, (2, 200)).unbind()
    i[i == 3] = 0  # nothing falls into 3
    pairs = Counter(zip(i.tolist(), j.tolist(), strict=True))
    scores, smooth = transition_scores(i, j, 5), transition_scores(i, j, 5, smoothing=0.5)
    for m in range(5):
        total = sum(pairs[m, k] for k in range(5))
        for k in range(5):
            assert float(scores[m, k]) == pytest.approx(pairs[m, k] / total if total else float(m == k))
            assert float(smooth[m, k]) == pytest.approx((pairs[m, k] + 0.5) / (total + 2.5))


# ------------------------------------------------------------------------------------------------ reservoir


def numbered(n: int, h: int = 1, w: int = 1) -> torch.Tensor:
    """Maps whose one channel numbers the pixels."""
    return torch.arange(n * h * w, dtype=torch.float32).reshape(n, 1, h, w)


def drawn(reservoir: Reservoir) -> list[int]:
    return reservoir.sample()[0].squeeze(1).int().tolist()


def one_sample(n: int, capacity: int, *, seed: int, h: int = 1, w: int = 1, batch: int = 10) -> list[int]:
    reservoir = Reservoir(capacity, seed=seed)
    for part in numbered(n, h, w).split(batch):
        reservoir.add(part, torch.zeros(len(part), dtype=torch.int64))
    return drawn(reservoir)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "h", "w"), [(60, 1, 1), (5, 4, 3)])
def test_reservoir_keeps_every_pixel_equally_often(n, h, w):
    trials, capacity = 200, 15
    counts = np.zeros(60)
    for seed in range(trials):
        kept = one_sample(n, capacity, seed=seed, h=h, w=w, batch=-(-n // 2))
        assert len(set(kept)) == capacity
        counts[kept] += 1
    share = capacity / 60
    assert counts.mean() == trials * share
    statistic = ((counts - trials * share) ** 2).sum() / (trials * share * (1 - share)) * 59 / 60
    assert chi2.ppf(0.001, 59) < statistic < chi2.ppf(0.999, 59)


@pytest.mark.slow
def test_reservoir_keeps_pairs_of_neighbours_as_often_as_any_pair():
    trials = 200
    together = sum(
        sum(b - a == 1 for a, b in pairwise(kept)) for kept in (one_sample(40, 10, seed=s, batch=20) for s in range(trials))
    )
    expected = 39 * (10 * 9) / (40 * 39) * trials
    assert together == pytest.approx(expected, rel=0.1)


def test_reservoir_groups_are_filled_each_on_its_own():
    group = torch.tensor([0] * 50 + [2] * 7 + [0] * 20)
    reservoir = Reservoir(10, groups=3, seed=4)
    for part in in_batches((numbered(77), group), 9):
        reservoir.add(*part)
    rows, groups = reservoir.sample()
    assert reservoir.seen.tolist() == [70, 0, 7]
    assert Counter(groups.tolist()) == {0: 10, 2: 7}
    assert torch.equal(group[rows.squeeze(1).long()], groups)


def test_reservoir_that_holds_all_gives_all_in_order():
    for capacity in (120, 2**62):
        assert one_sample(20, capacity, seed=3, h=2, w=3) == list(range(120))


def test_reservoir_memory_stays_bounded():
    reservoir = Reservoir(50, seed=0)
    for part in numbered(2000).split(20):
        reservoir.add(part, torch.zeros(len(part), dtype=torch.int64))
        assert sum(len(rows) for *_, rows in reservoir._kept) <= 1.25 * 50 + 20
