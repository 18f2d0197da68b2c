"""CRD: scores, loss, banks and negatives against loops in float64, and what its memory promises."""

import copy
import itertools
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import letkd
from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.errors import DataError, FitError, NonFiniteError, NotFittedError, TapError, UnsupportedPair
from letkd.methods.base import View
from letkd.methods.crd import CRD, contrast, nce_loss
from letkd.methods.kd import KD
from letkd.recipes import resolve
from letkd.supervision.crd_bank import CRDBank, draw_distinct
from letkd.taps import Tap
from tests.support.pair import SIZE, a_distiller, a_stream, same_state, steps

TAPS: dict[str, Tap | str] = {"pooled": Tap("fc", io="input"), "penultimate": "last"}
every_pair = pytest.mark.parametrize("pair", ["equal", "unequal"])


def a_crd(pair: str = "equal", method: CRD | None = None, **options) -> Distiller:
    options = {"student_taps": TAPS, "teacher_taps": TAPS, **options}
    return a_distiller(method or CRD(6, 5), pair, **options)


def fitted(pair: str = "equal", method: CRD | None = None, **options) -> Distiller:
    return a_crd(pair, method, **options).fit(a_stream())


def a_bank(counts: list[int], **options) -> CRDBank:
    """A bank of classes of these sizes, the images in some order."""
    y = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))]
    return CRDBank(**options).fit([(torch.zeros(len(y), 3), y, torch.arange(len(y)))])


def sgd(distiller: Distiller) -> torch.optim.Optimizer:
    return torch.optim.SGD(distiller.parameters(), lr=0.02, momentum=0.9)


# ------------------------------------------------------------------------------------------------ the formulas


def nce_oracle(P_pos: list[float], P_neg: list[list[float]], N: int) -> float:
    b, K = len(P_neg), len(P_neg[0])
    total = 0.0
    for i in range(b):
        total += math.log(P_pos[i] / (P_pos[i] + K / N + 1e-7))
        for k in range(K):
            total += math.log((K / N) / (P_neg[i][k] + K / N + 1e-7))
    return -total / b


def test_nce_loss_is_the_formula():
    P_pos, P_neg = torch.rand(4, dtype=torch.float64), torch.rand(4, 7, dtype=torch.float64)
    assert float(nce_loss(P_pos, P_neg, 30)) == pytest.approx(nce_oracle(P_pos.tolist(), P_neg.tolist(), 30), rel=1e-12)


def test_nce_loss_of_chance_and_of_certainty():
    """P = 1/N everywhere: log(1 + K) + K log(1 + 1/K). P⁺ large and P⁻ nothing: 0."""
    N, K = 1000, 50
    chance = nce_loss(torch.full((3,), 1 / N).double(), torch.full((3, K), 1 / N).double(), N)
    assert float(chance) == pytest.approx(math.log(1 + K) + K * math.log(1 + 1 / K), rel=1e-4)
    assert float(nce_loss(torch.full((3,), 1e9).double(), torch.zeros(3, K).double(), N)) == pytest.approx(0, abs=2e-4)


def test_nce_loss_keeps_its_digits_in_float32():
    """At the field's size a P⁻ is 10^-5 of what it is compared with, and there are 16384 of them."""
    N, K = 50_000, 16_384
    P_pos, P_neg = torch.rand(2).double() / N, torch.rand(2, K).double() / N
    exact = nce_loss(P_pos, P_neg, N)
    torch.testing.assert_close(nce_loss(P_pos.float(), P_neg.float(), N).double(), exact, rtol=1e-6, atol=0)


def test_contrast_is_the_exponential_of_the_scaled_dot_product():
    v, bank = torch.randn(3, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    positive, negative = torch.tensor([2, 0, 8]), torch.tensor([[1, 3], [4, 8], [0, 7]])
    out = contrast(v, bank, positive, negative, 0.5)
    assert out.shape == (3, 3)
    for i in range(3):
        for k, j in enumerate([positive[i], *negative[i]]):
            dot = sum(float(v[i, a]) * float(bank[j, a]) for a in range(4))
            assert float(out[i, k]) == pytest.approx(math.exp(dot / 0.5), rel=1e-12)


def unit(v: list[float]) -> list[float]:
    norm = math.sqrt(sum(a * a for a in v))
    return [a / norm for a in v]


@pytest.mark.parametrize("K", [3, 1000])
def test_three_steps_of_crd_are_what_the_loops_say(K):
    """Embedding, scores with the other's bank, Z from the first batch, the two terms, and the banks' update after scoring."""
    method = CRD(4, K)
    distiller = fitted("unequal", method).double()
    bank = method.bank
    S, T, Z = bank.memory_S_.tolist(), bank.memory_T_.tolist(), {}
    N = 24
    for batch in [*a_stream()[:2], a_stream()[0]]:
        batch.x = batch.x.double()
        negative = bank.negatives(batch.index)
        assert negative.shape == (8, min(K, 16))
        chosen, seen = negative.tolist(), {}
        with torch.no_grad():
            _, seen["S"] = distiller._student_reads(batch.x)
            _, seen["T"] = distiller._teacher_reads(batch.x)
        rows = {
            side: [unit(row) for row in linear(seen[side]["pooled"]).tolist()]
            for side, linear in (("S", method.embed_S), ("T", method.embed_T))
        }
        expected = 0.0
        for side, against in (("S", T), ("T", S)):
            e = [
                [math.exp(sum(a * c for a, c in zip(v, against[j], strict=True)) / 0.07) for j in [i, *js]]
                for v, i, js in zip(rows[side], batch.index.tolist(), chosen, strict=True)
            ]
            Z.setdefault(side, sum(map(sum, e)) / sum(map(len, e)) * N)
            P = [[value / Z[side] for value in row] for row in e]
            expected += nce_oracle([row[0] for row in P], [row[1:] for row in P], N)
        assert distiller(batch).terms["crd"].item() == pytest.approx(expected, rel=1e-9)
        for side, memory in (("S", S), ("T", T)):
            for i, v in zip(batch.index.tolist(), rows[side], strict=True):
                memory[i] = unit([0.5 * old + 0.5 * new for old, new in zip(memory[i], v, strict=True)])
        torch.testing.assert_close(bank.memory_S_, torch.tensor(S, dtype=torch.float64))
        torch.testing.assert_close(bank.memory_T_, torch.tensor(T, dtype=torch.float64))
        assert bank.Z_T_.item() == pytest.approx(Z["S"], rel=1e-9)  # the teacher's bank, against the student's anchors
        assert bank.Z_S_.item() == pytest.approx(Z["T"], rel=1e-9)


def test_the_gradient_does_not_see_the_update_and_steps_may_add_up():
    """The banks move between forward and backward; what is differentiated are the scores with the banks of before."""
    distiller = fitted()
    twin, batch = copy.deepcopy(distiller).eval(), a_stream()[0]
    distiller.eval()
    distiller.methods.train()
    distiller(batch).terms["crd"].backward()
    twin(batch).terms["crd"].backward()
    for one, two in zip(distiller.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        assert one.grad is None or torch.equal(one.grad, two.grad)
    losses = [distiller(batch).loss for batch in a_stream()]
    torch.stack(losses).sum().backward()


# ------------------------------------------------------------------------------------------------ negatives

# M at most 8 K: keys; beyond that: distinct draws.
DRAWS = [(6, 3), (7, 7), (5, 1), (9, 1), (17, 2), (12, 1)]


@pytest.mark.parametrize(("M", "K"), DRAWS)
def test_every_set_of_K_is_drawn_equally_often(M, K):
    n = 20_000
    drawn = draw_distinct(torch.full((n,), M), K, torch.Generator().manual_seed(0))
    sets = Counter(tuple(row) for row in drawn.sort(dim=1).values.tolist())
    possible = set(itertools.combinations(range(M), K))
    assert set(sets) == possible
    expected, df = n / len(possible), len(possible) - 1
    chi2 = sum((sets[s] - expected) ** 2 / expected for s in possible)
    assert chi2 < df + 4 * math.sqrt(2 * df) + 1


@pytest.mark.parametrize(("M", "K"), [([50, 41, 60], 40), ([900, 4000, 1500], 40), ([4000, 80, 41], 40), ([40, 4000, 40], 40)])
def test_rows_may_have_different_ranges(M, K):
    drawn = draw_distinct(torch.tensor(M * 50), K, torch.Generator().manual_seed(0))
    for most, row in zip(M * 50, drawn.tolist(), strict=True):
        assert len(set(row)) == K
        assert min(row) >= 0
        assert max(row) < most
    for i, most in enumerate(M):
        mean = drawn[i::3].double().mean().item()
        assert mean == pytest.approx((most - 1) / 2, abs=5 * most / math.sqrt(12 * 50 * K) + 1e-9)


def test_too_few_different_draws_are_followed_by_more(monkeypatch):
    calls, randint = [], torch.randint
    monkeypatch.setattr(torch, "randint", lambda *args, **options: calls.append(args[1]) or randint(*args, **options))
    n = 400_000  # of which some few draw the same number five times
    drawn = draw_distinct(torch.full((n,), 17), 2, torch.Generator().manual_seed(0))
    assert calls == [(n, 5)] * 2
    assert bool((drawn[:, 0] != drawn[:, 1]).all())


def test_more_than_there_are_is_refused():
    with pytest.raises(FitError, match="5 distinct numbers cannot be drawn from 4"):
        draw_distinct(torch.tensor([9, 4]), 5, torch.Generator())


@pytest.mark.parametrize("K", [1, 4])
def test_negatives_are_of_other_classes_and_uniform_over_them(K):
    bank = a_bank([3, 1, 5, 2, 20], K=K)
    N, rounds = 31, 400
    index = torch.arange(N).repeat(rounds)
    negative = bank.negatives(index)
    assert negative.shape == (N * rounds, K)
    assert not bool((bank.y_[negative] == bank.y_[index][:, None]).any())
    assert int((negative.sort(dim=1).values.diff(dim=1) == 0).sum()) == 0
    times = torch.zeros(N, N).index_put_((index[:, None].expand_as(negative), negative), torch.ones(()), accumulate=True)
    for i in range(N):
        others = bank.y_ != bank.y_[i]
        expected = rounds * K / int(others.sum())
        assert times[i, ~others].sum() == 0
        chi2 = ((times[i, others] - expected) ** 2 / expected).sum()
        assert chi2 < int(others.sum()) + 5 * math.sqrt(2 * int(others.sum()))


def test_there_are_as_many_negatives_as_the_largest_class_leaves():
    bank = a_bank([3, 1, 5], K=100)
    assert bank.report_ == {"images": 9, "negatives": 4}
    negative = bank.negatives(torch.arange(9))
    assert negative.shape == (9, 4)
    for i in torch.nonzero(bank.y_ == 2).flatten():
        assert set(negative[i].tolist()) == set((bank.y_ != 2).nonzero().flatten().tolist())


def test_every_step_and_every_seed_draws_anew_and_the_same_one_the_same():
    bank, other, index = a_bank([20, 20], K=5), a_bank([20, 20], K=5, seed=1), torch.arange(8)
    first = bank.negatives(index)
    assert torch.equal(bank.negatives(index), first)
    assert not torch.equal(other.negatives(index), first)
    zero, Z = torch.zeros(8, 128), torch.ones(())
    bank.update(index, v_S=zero, v_T=zero, Z_S=Z, Z_T=Z)
    assert not torch.equal(bank.negatives(index), first)
    assert len({tuple(row) for row in first.tolist()}) > 4  # and every image of a batch its own


# ------------------------------------------------------------------------------------------------ the memory


def test_the_banks_begin_uniform_in_the_fields_range():
    bank = a_bank([1000, 1000], feat_dim=48)
    bound = 1 / math.sqrt(48 / 3)
    for rows in (bank.memory_S_, bank.memory_T_):
        assert rows.shape == (2000, 48)
        assert rows.abs().max() <= bound
        assert rows.var().item() == pytest.approx(bound**2 / 3, rel=0.02)
        assert abs(rows.mean().item()) < 0.01 * bound
    assert not torch.equal(bank.memory_S_, bank.memory_T_)
    assert not torch.equal(bank.memory_S_, a_bank([1000, 1000], feat_dim=48, seed=1).memory_S_)


def test_a_step_moves_the_rows_of_its_images_and_only_in_training():
    distiller = fitted()
    bank = distiller.methods[0].bank
    before = copy.deepcopy(bank.state_dict())
    batch = a_stream()[1]
    distiller.eval()
    assert torch.equal(distiller(batch).loss, distiller(batch).loss)
    assert same_state(bank.state_dict(), before)
    distiller.train()(batch)
    for name in ("memory_S_", "memory_T_"):
        moved = (bank.state_dict()[name] != before[name]).any(dim=1).nonzero().flatten()
        assert torch.equal(moved, batch.index)
        torch.testing.assert_close(bank.state_dict()[name][moved].norm(dim=1), torch.ones(8))
    Z = bank.Z_S_.item(), bank.Z_T_.item()
    distiller(a_stream()[2])
    assert (bank.Z_S_.item(), bank.Z_T_.item()) == Z
    assert bank.draws_.item() == 2
    assert torch.equal(bank.y_, before["y_"])


def test_the_artefact_holds_the_labels_and_the_state_the_banks(tmp_path):
    distiller, other = a_crd(), a_crd("unequal")
    distiller.fit(a_stream(), folder=tmp_path, data="the stream")
    fresh = copy.deepcopy(distiller.methods[0].bank.state_dict())
    assert set(fresh) == {"y_", "memory_S_", "memory_T_", "Z_S_", "Z_T_", "draws_"}
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"crd\.crd_bank\b.*\.safetensors", path.name)
    assert set(load_file(path)) == {"y_"}
    steps(distiller, a_stream(), sgd(distiller))
    other.fit([], folder=tmp_path, data="the stream")
    assert same_state(other.methods[0].bank.state_dict(), fresh)
    assert other.methods[0].bank.negatives(torch.arange(3)).shape == (3, 5)


def test_settings_of_the_banks_do_not_cost_another_fit(tmp_path):
    a_crd().fit(a_stream(), folder=tmp_path, data="the stream")
    other = a_crd(method=CRD(9, 3, seed=4)).fit([], folder=tmp_path, data="the stream")
    assert other.methods[0].bank.memory_T_.shape == (24, 9)


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("already", [False, True])
def test_resume_is_exact(done, already):
    """The state is whole from the moment of the fit: before the first step it has the keys of a later checkpoint."""
    distiller = fitted(method=CRD(6, 5))
    steps(distiller, a_stream()[:done], sgd(distiller))
    state = copy.deepcopy(distiller.state_dict())
    fresh = (fitted if already else a_crd)(method=CRD(6, 5), seed=7)
    assert not already or fresh.state_dict().keys() == state.keys()
    fresh.load_state_dict(state)
    assert steps(fresh, a_stream(), sgd(fresh)) == steps(distiller, a_stream(), sgd(distiller))
    assert same_state(fresh.state_dict(), distiller.state_dict())


def test_fitted_anew_it_begins_anew():
    distiller = fitted()
    state = copy.deepcopy(distiller.methods[0].bank.state_dict())
    steps(distiller, a_stream(), sgd(distiller))
    assert same_state(distiller.fit(a_stream()).methods[0].bank.state_dict(), state)


def test_the_order_of_the_stream_does_not_matter():
    one, two = fitted(), a_crd().fit(reversed(a_stream()))
    assert same_state(one.methods[0].bank.state_dict(), two.methods[0].bank.state_dict())


def test_everything_moves_with_to():
    bank = a_bank([3, 4])
    bank.negatives(torch.arange(2))
    assert {b.device.type for b in copy.deepcopy(bank).to("meta").buffers()} == {"meta"}
    double = CRDBank().double().fit([(torch.zeros(4, 2), torch.tensor([0, 0, 1, 1]), torch.arange(4))])
    assert (double.memory_S_.dtype, double.Z_S_.dtype, double.draws_.dtype) == (torch.float64, torch.float64, torch.int64)


def test_what_turned_to_nan_does_not_stay_in_the_banks():
    distiller = fitted()
    bank = distiller.methods[0].bank
    distiller.teacher.last[0].conv.weight.data[0, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="the teacher's tap 'pooled'"):
        distiller(a_stream()[0])
    assert all(torch.isfinite(value).all() for value in bank.state_dict().values())
    assert bank.Z_S_ == 0  # that of the teacher's anchors: not fixed yet


@pytest.mark.processes
def test_two_processes_keep_one_memory(tmp_path):
    """Each sees half of the batch; both end with the banks, and in the mean with the loss, of one that sees it all."""
    script = """
import sys
import torch
import torch.distributed as dist
from letkd.batch import Batch
from letkd.methods.base import View
from letkd.methods.crd import CRD
from letkd.supervision.crd_bank import CRDBank

def run(rank, size):
    torch.manual_seed(0)
    method = CRD(6, 100)
    method.embed_S, method.embed_T = torch.nn.Linear(3, 6), torch.nn.Linear(5, 6)
    y = torch.arange(12) % 3
    method.bank.fit([(torch.zeros(12, 5), y, torch.arange(12))])
    losses = []
    for step in range(3):
        f_S, f_T = torch.randn(8, 3), torch.randn(8, 5)
        index = torch.randperm(12)[:8]
        mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
        batch = Batch(torch.zeros(8 // size), y[index][mine], index[mine])
        losses.append(method.terms(View(batch, {"pooled": f_S[mine]}, {"pooled": f_T[mine]}))["crd"].detach())
    few = CRDBank(6, 2).fit([(torch.zeros(12, 5), y, torch.arange(12))])
    return {"loss": torch.stack(losses), "drawn": few.negatives(torch.arange(12)), **method.bank.state_dict()}

folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
if rank == 0:
    torch.save(run(0, 1), f"{folder}/alone.pt")
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
torch.save(run(rank, 2), f"{folder}/{rank}.pt")
dist.barrier()
dist.destroy_process_group()
"""
    source = str(Path(letkd.__file__).parents[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(rank)],
            env={"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()[-2000:]
    alone, one, two = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("alone", "0", "1"))
    drawn = [part.pop("drawn") for part in (alone, one, two)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])  # for the same images each process draws its own
    torch.testing.assert_close((one.pop("loss") + two.pop("loss")) / 2, alone.pop("loss"))
    assert same_state(one, two)
    for name, value in alone.items():
        torch.testing.assert_close(one[name], value, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ what is refused


def test_batches_without_indices_are_refused():
    bare = [Batch(batch.x, batch.y) for batch in a_stream()]
    with pytest.raises(DataError, match=r"the loader must yield \(x, y, index\)"):
        a_crd().fit(bare)
    with pytest.raises(DataError, match=r"the loader must yield \(x, y, index\)"):
        fitted()(bare[0])


def test_before_it_is_fitted_it_says_so():
    with pytest.raises(NotFittedError, match=r"CRDBank\(feat_dim=6, K=5\) at 'crd' has no y_ yet\. Run `letkd fit`, or call"):
        a_crd()(a_stream()[0])


def test_banks_too_large_are_refused_with_how_many_images_fit():
    room = 2 * 4 * 6 * 20
    sentence = (
        rf"two banks for 24 images or more at feat_dim=6 do not fit into memory={room:,} bytes, enough for 20 images; "
        "lower feat_dim, train on a subset, or allow more memory"
    )
    with pytest.raises(FitError, match=sentence):
        fitted(method=CRD(6, 5, memory=room))
    fitted(method=CRD(6, 5, memory=room + 4 * 2 * 4 * 6))
    fitted(method=CRD(5, 5, memory=room))


def test_an_artefact_of_more_images_than_fit_is_refused_too(tmp_path):
    a_crd().fit(a_stream(), folder=tmp_path, data="the stream")
    with pytest.raises(FitError, match="do not fit into memory=100 bytes"):
        a_crd(method=CRD(6, 5, memory=100)).fit([], folder=tmp_path, data="the stream")


@pytest.mark.parametrize(
    ("y", "index", "match"),
    [
        ([0, 1, 0], [0, 1, 4], r"indices go up to 4, but 2 smaller ones are missing \(first: 2\)"),
        ([0, 1, 1], [0, 1, 0], "the index 0 has two different labels"),
        ([0, 1, 0], [0, -1, 1], "an image has the index -1"),
        ([2, 2, 2], [0, 1, 2], "from other classes, but all training images have the same class"),
        ([], [], "CRD saw no images"),
    ],
)
def test_streams_that_name_no_images_are_refused(y, index, match):
    bank = CRDBank()
    with pytest.raises(FitError, match=match):
        bank.fit([(torch.zeros(len(y), 2), torch.tensor(y, dtype=torch.int64), torch.tensor(index, dtype=torch.int64))])
    assert not bank.is_fitted
    assert not bank.state_dict()


@pytest.mark.parametrize(
    ("index", "match"),
    [
        (24, r"index 24 and label 0, which is not among the 24 fitted images"),
        (1, "index 1 and label 0, which was fitted with the label 1"),
    ],
)
def test_other_images_than_it_was_fitted_to_are_refused(index, match):
    batch = a_stream()[0]
    batch.index = torch.tensor([index, *range(1, 8)])
    with pytest.raises(DataError, match=match):
        fitted()(batch)


def test_one_class_is_no_pair():
    one = [nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 1)) for _ in range(2)]
    taps = {"pooled": "0"}
    with pytest.raises(UnsupportedPair, match="negatives from other classes, and there is only one class"):
        Distiller(*one, CRD(), student_taps=taps, teacher_taps=taps, example=torch.zeros(1, 3, *SIZE))


def test_a_map_is_no_vector_but_one_of_a_single_pixel_is():
    with pytest.raises(
        TapError, match=r"tap 'pooled' of the teacher: 'last' gives \[b 10 4 4\], and a vector \[b d\] is needed"
    ):
        a_crd(teacher_taps={"pooled": "last"})

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pool, self.fc = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.pool(self.body(x)).flatten(1))

    taps = {"pooled": "pool"}
    distiller = Distiller(Pooled(), Pooled(), CRD(6), student_taps=taps, teacher_taps=taps, example=torch.zeros(1, 3, *SIZE))
    assert distiller.fit(a_stream())(a_stream()[0]).terms["crd"] > 0


# ------------------------------------------------------------------------------------------------ in a distiller


@every_pair
def test_the_embeddings_are_linear_and_trained(pair):
    distiller = fitted(pair, CRD(7, 5))
    d = 10 if pair == "equal" else 8
    method = distiller.methods[0]
    shapes = {name: tuple(parameter.shape) for name, parameter in method.named_parameters()}
    assert shapes == {"embed_S.weight": (7, d), "embed_S.bias": (7,), "embed_T.weight": (7, 10), "embed_T.bias": (7,)}
    distiller(a_stream()[0]).terms["crd"].backward()
    for name, parameter in distiller.named_parameters():
        if name.startswith("methods") or "last" in name:
            assert parameter.grad.abs().max() > 0, name
    assert not any(buffer.requires_grad for buffer in distiller.buffers())


@every_pair
def test_it_falls_alone_and_beside_kd(pair):
    distiller = fitted(pair, weights={"ce": 0.0})
    first = distiller(a_stream()[0]).terms["crd"].item()
    steps(distiller, a_stream()[:1] * 25, sgd(distiller))
    assert distiller(a_stream()[0]).terms["crd"].item() < 0.8 * first
    both = a_distiller([CRD(6, 5), KD()], pair, student_taps=TAPS, teacher_taps=TAPS).fit(a_stream())
    assert set(both(a_stream()[0]).terms) == {"ce", "crd", "kd"}


def test_under_autocast_scores_are_of_full_precision():
    method = CRD(6, 5)
    method.embed_S, method.embed_T = nn.Linear(3, 6), nn.Linear(5, 6)
    y = torch.arange(12) % 3
    method.bank.fit([(torch.zeros(12, 5), y, torch.arange(12))])
    view = View(Batch(torch.zeros(12), y, torch.arange(12)), {"pooled": torch.randn(12, 3)}, {"pooled": torch.randn(12, 5)})
    exact = method.eval().terms(view)["crd"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(method.terms(view)["crd"], exact)
    view.student["pooled"] = view.student["pooled"].bfloat16()
    assert method.terms(view)["crd"].dtype == torch.float32


def test_defaults_are_the_fields():
    method = CRD()
    assert (method.feat_dim, method.bank.K, method.tau, method.bank.momentum) == (128, 16384, 0.07, 0.5)
    assert method.bank.memory == 2**30


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("crd", {"ce": 1.0, "crd": 0.8}),
        ("crd-kd", {"ce": 1.0, "crd": 0.8, "kd": 1.0}),
        ("tdd-crd", {"ce": 0.1, "kd": 0.9, "tdd": 0.1, "crd": 0.8}),
    ],
)
def test_recipes(name, weights):
    recipe = resolve(f"cifar100/rn56-rn20/{name}")
    assert recipe.weights == weights
    method = CRD.from_recipe(recipe.methods["crd"])
    assert (method.feat_dim, method.bank.K, method.tau, method.bank.momentum) == (128, 16384, 0.07, 0.5)
    if "kd" in weights:
        assert KD.from_recipe(recipe.methods["kd"]).T == 4.0
