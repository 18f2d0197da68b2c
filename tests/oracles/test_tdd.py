"""TDD: the tree, its cut and the loss against loops in float64, and what the method promises."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from letkd.distiller import Distiller
from letkd.errors import FitError, NonFiniteError, NotFittedError, TapError, UnsupportedPair
from letkd.methods.kd import KD
from letkd.methods.tdd import TDD, group_loss
from letkd.recipes import resolve
from letkd.supervision.artefacts import Origin, path_of
from letkd.supervision.tree import ClassTree, cut_tree, knn_purity, tree_nodes, ward_tree
from letkd.taps import Tap
from tests.support.pair import SIZE, C, a_distiller, a_stream, features, in_batches, same_state, steps

TAPS: dict[str, Tap | str] = {"stage1": "first", "stage2": "last.0", "stage3": "last"}
every_pair = pytest.mark.parametrize("pair", ["equal", "unequal"])


def a_tdd(pair: str = "equal", method: TDD | None = None, **options) -> Distiller:
    options = {"student_taps": TAPS, "teacher_taps": TAPS, **options}
    return a_distiller(method or TDD(k=5), pair, **options)


def sgd(distiller: Distiller) -> torch.optim.Optimizer:
    return torch.optim.SGD(distiller.parameters(), lr=0.02, momentum=0.9)


# ------------------------------------------------------------------------------------------------ the loss


def test_group_loss_is_the_weighted_cross_entropy_of_the_groups():
    group = torch.tensor([0, 1, 0, 0, 2, 1])
    logits, y = torch.randn(7, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 5, 4])
    size = {0: 3, 1: 2, 2: 1}
    above = below = 0.0
    for i in range(7):
        g = int(group[y[i]])
        total = sum(math.exp(logits[i, k]) for k in range(3))  # of six logits three have a group
        above += -math.log(math.exp(logits[i, g]) / total) / size[g]
        below += 1 / size[g]
    assert float(group_loss(logits, y, group)) == pytest.approx(above / below, rel=1e-12)
    assert torch.equal(group_loss(logits[:, :3], y, group), group_loss(logits, y, group))


def test_with_every_class_its_own_group_it_is_plain_cross_entropy():
    logits, y = torch.randn(9, 5, dtype=torch.float64), torch.randint(5, (9,))
    torch.testing.assert_close(group_loss(logits, y, torch.arange(5)), F.cross_entropy(logits, y))


def test_the_numbers_of_the_groups_are_only_names():
    logits, y = torch.randn(9, 3, dtype=torch.float64), torch.randint(4, (9,))
    order = torch.tensor([2, 0, 1])
    renamed = group_loss(logits[:, order.argsort()], y, order[torch.tensor([0, 1, 1, 2])])
    torch.testing.assert_close(renamed, group_loss(logits, y, torch.tensor([0, 1, 1, 2])))


def test_one_group_is_nothing_to_learn():
    logits = torch.randn(6, 4, requires_grad=True)
    loss = group_loss(logits, torch.randint(4, (6,)), torch.zeros(4, dtype=torch.int64))
    loss.backward()
    assert loss == 0
    assert torch.equal(logits.grad, torch.zeros(6, 4))


def test_logits_without_a_group_get_no_gradient_and_low_precision_is_raised():
    logits = torch.randn(6, 4).bfloat16().requires_grad_()
    loss = group_loss(logits, torch.arange(6) % 4, torch.tensor([0, 1, 1, 0]))
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.equal(logits.grad[:, 2:], torch.zeros(6, 2).bfloat16())
    assert logits.grad[:, :2].abs().min() > 0


# ------------------------------------------------------------------------------------------------ the tree


def ward_oracle(means: list[list[float]]) -> list[frozenset[int]]:
    """Merge, again and again, the two groups whose union adds least to the sum of squares around the groups' means."""
    d = len(means[0])

    def spread(group: frozenset[int]) -> float:
        mean = [sum(means[c][a] for c in group) / len(group) for a in range(d)]
        return sum((means[c][a] - mean[a]) ** 2 for c in group for a in range(d))

    alive, made = [frozenset({c}) for c in range(len(means))], []
    while len(alive) > 1:
        pairs = [(one, two) for i, one in enumerate(alive) for two in alive[:i]]
        one, two = min(pairs, key=lambda pair: spread(pair[0] | pair[1]) - spread(pair[0]) - spread(pair[1]))
        alive = [group for group in alive if group not in (one, two)] + [one | two]
        made.append(one | two)
    return made


@pytest.mark.parametrize("n", [2, 3, 9])
def test_the_tree_is_wards(n):
    means = torch.randn(n, 4, dtype=torch.float64)
    tree = ward_tree(means)
    _, below = tree_nodes(tree, means)
    assert below.shape == (2 * n - 1, n)
    found = [frozenset(row.nonzero().flatten().tolist()) for row in below]
    assert found[:n] == [frozenset({c}) for c in range(n)]
    assert found[n:] == ward_oracle(means.tolist())


def test_a_nodes_mean_is_the_plain_mean_of_its_two_children():
    """Not of its classes: a chain of merges weighs the classes 1/2, 1/4, 1/8, …"""
    means = torch.tensor([[0.0], [1.0], [10.0], [100.0]], dtype=torch.float64)
    node, _ = tree_nodes(ward_tree(means), means)
    assert node.flatten().tolist() == [0, 1, 10, 100, 0.5, 5.25, 52.625]


def purity_oracle(node: list[float], below: set[int], f: list[list[float]], y: list[int], k: int) -> float:
    order = sorted(range(len(f)), key=lambda i: sum((a - b) ** 2 for a, b in zip(node, f[i], strict=True)))
    return sum(y[i] in below for i in order[:k]) / len(order[:k])


@pytest.mark.parametrize("k", [1, 7, 1000])
def test_purity_is_the_share_of_the_nearest_samples_that_are_the_nodes_own(k):
    f, y = 0.7 * torch.randn(60, 3, dtype=torch.float64) + 30, torch.arange(60) % 6
    f = f + torch.randn(6, 3, dtype=torch.float64)[y]
    means = torch.stack([f[y == c].mean(dim=0) for c in range(6)])
    node, below = tree_nodes(ward_tree(means), means)
    purity = knn_purity(node, below, f, y, k)
    for i in range(11):
        own = set(below[i].nonzero().flatten().tolist())
        assert purity[i].item() == pytest.approx(purity_oracle(node[i].tolist(), own, f.tolist(), y.tolist(), k))
    assert purity[-1] == 1
    assert torch.equal(knn_purity(node, below, f.float(), y, k), purity)


def test_a_node_at_the_threshold_is_split():
    """4 of 20 is not below 0.2, whatever the precision."""
    tree, below = ward_tree(torch.tensor([[0.0], [1.0]])), torch.tensor([[True, False]])
    for k in (3, 7, 20, 30):
        for own in range(k):
            f, y = torch.arange(float(k))[:, None], (torch.arange(k) >= own).long()
            purity = knn_purity(torch.zeros(1, 1), below, f, y, k)
            assert purity.item() == own / k
            assert cut_tree(tree, purity.expand(3), own / k).tolist() == [0, 1]


def cut_oracle(tree: list[list[float]], purity: list[float], threshold: float) -> set[frozenset[int]]:
    C = len(tree) + 1

    def classes(node: int) -> frozenset[int]:
        return frozenset({node}) if node < C else classes(int(tree[node - C][0])) | classes(int(tree[node - C][1]))

    def walk(node: int) -> set[frozenset[int]]:
        if node < C or purity[node] < threshold:
            return {classes(node)}
        return walk(int(tree[node - C][0])) | walk(int(tree[node - C][1]))

    return walk(2 * C - 2)


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 1.0, 1.1])
def test_the_cut_goes_down_from_the_root_while_nodes_are_pure(threshold):
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        tree = ward_tree(torch.randn(12, 3, generator=g))
        purity = torch.cat([torch.rand(22, generator=g), torch.ones(1)])
        group = cut_tree(tree, purity, threshold)
        found = {frozenset((group == k).nonzero().flatten().tolist()) for k in range(int(group.max()) + 1)}
        assert found == cut_oracle(tree.tolist(), purity.tolist(), threshold)
        firsts = [group.tolist().index(k) for k in range(len(found))]
        assert firsts == sorted(firsts)  # numbered by the first class in them
        if threshold == 0:
            assert torch.equal(group, torch.arange(12))
        if threshold > 1:
            assert not group.any()
        else:
            assert len(found) > 1  # the root's purity is 1


def maps(n: int = 240, C: int = 8, d: int = 3, *, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Maps of classes that overlap, so that some nodes of the tree hold together."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(C, (n,), generator=g)
    means = 0.2 * torch.randn(C, d, generator=g)
    return torch.randn(n, d, 2, 3, generator=g) + means[y][:, :, None, None] + 5, y, torch.arange(n)


def test_the_fit_is_the_sum_of_its_parts():
    f_T, y, index = maps()
    tree = ClassTree(k=10, threshold=0.35, C=8).fit(in_batches((f_T, y, index), 50))
    pooled = f_T.double().mean(dim=(2, 3))
    means = torch.stack([pooled[y == c].mean(dim=0) for c in range(8)])
    expected = ward_tree(means)
    torch.testing.assert_close(tree.tree_, expected.float())
    node, below = tree_nodes(expected, means)
    purity = [
        purity_oracle(node[i].tolist(), set(below[i].nonzero().flatten().tolist()), pooled.tolist(), y.tolist(), 10)
        for i in range(15)
    ]
    torch.testing.assert_close(tree.purity_, torch.tensor(purity))
    groups = cut_oracle(expected.tolist(), purity, 0.35)
    assert 2 < len(groups) < 8
    assert {frozenset((tree.group_ == k).nonzero().flatten().tolist()) for k in range(len(groups))} == groups
    assert tree.report_ == {"images": 240, "groups": len(groups), "classes in the largest": max(map(len, groups))}


def test_two_classes_are_two_groups():
    f_T, y, index = maps(40, C=2)
    assert ClassTree(C=2).fit([(f_T, y, index)]).group_.tolist() == [0, 1]


def test_neither_order_nor_batch_size_matters_nor_what_was_fitted_before():
    f_T, y, index = maps()
    expected = ClassTree(C=8).fit([(f_T, y, index)])
    shuffled = torch.randperm(len(y))
    for order, batch in [(torch.arange(len(y)), 7), (shuffled, 100)]:
        other = ClassTree(C=8).fit([maps(seed=9)])
        other.fit(in_batches((f_T[order], y[order], index[order]), batch))
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], value)


def test_few_samples_are_kept_and_all_count_for_the_means():
    f_T, y, index = maps(2000)
    tree, everything = ClassTree(memory=4 * 4 * 300, C=8), ClassTree(C=8).fit([(f_T, y, index)])
    for part in in_batches((f_T, y, index), 100):
        tree.partial_fit(*part)
        assert tree._reservoir._rows <= 1.25 * 300
    tree.finish()
    torch.testing.assert_close(tree.tree_, everything.tree_)
    assert (tree.purity_ - everything.purity_).abs().mean() < 0.2


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_saved_and_loaded_it_is_the_same(way):
    tree, other = ClassTree(C=8).fit([maps()]), ClassTree(C=8)
    if way == "state_dict":
        other.load_state_dict(tree.state_dict())
    else:
        other = copy.deepcopy(tree)
    assert torch.equal(other.groups(), tree.groups())
    assert same_state(other.state_dict(), tree.state_dict())


def test_what_cannot_be_fitted_is_refused():
    f_T, y, index = features()
    tree = ClassTree(C=C)
    tree.bind("tdd/stage2", d=4, C=C)
    with pytest.raises(NotFittedError, match=r"ClassTree\(k=20, threshold=0.2\) at 'tdd/stage2' has no group_ yet"):
        tree.groups()
    with pytest.raises(
        FitError, match="a tree of 3 classes at 'tdd/stage2' needs images of every class, but there are none of class 2"
    ):
        tree.fit([(f_T[y < 2], y[y < 2], index[y < 2])])
    with pytest.raises(FitError, match="none of class 0, 1, 2; add images of them"):
        tree.fit([])
    with pytest.raises(FitError, match="labels at 'tdd/stage2' range from 0 to 5, but with 3 classes they must be 0 to 2"):
        tree.fit([(f_T, torch.arange(12) % 6, index)])
    with pytest.raises(NonFiniteError, match="the teacher's map at 'tdd/stage2' contains NaN or infinity"):
        tree.fit([(f_T / 0, y, index)])
    for value in (0.0, 0.1, -3.5):
        with pytest.raises(
            FitError, match="the teacher's maps at 'tdd/stage2' have the same mean for every class; choose another"
        ):
            tree.fit([(torch.full_like(f_T, value), y, index)])
    with pytest.raises(FitError, match="needs at least two classes, but there is only one"):
        ClassTree(C=1).fit([(f_T, torch.zeros_like(y), index)])
    with pytest.raises(FitError, match="needs the number of classes"):
        ClassTree().fit([(f_T, y, index)])
    assert not tree.is_fitted


# ------------------------------------------------------------------------------------------------ in a distiller


@every_pair
def test_the_term_is_the_sum_over_stages(pair):
    distiller = a_tdd(pair).fit(a_stream())
    method, batch = distiller.methods[0], a_stream()[0]
    _, f = distiller._student_reads(batch.x)
    expected = 0.0
    for role in ("stage1", "stage2", "stage3"):
        logits = method.heads[role](f[role].mean(dim=(2, 3)))
        expected += group_loss(logits, batch.y, method.trees[role].group_)
    step = distiller(batch)
    assert set(step.terms) == {"ce", "tdd"}
    torch.testing.assert_close(step.terms["tdd"], expected)


@every_pair
def test_each_stage_has_a_linear_layer_that_is_trained_and_does_not_ship(pair):
    distiller = a_tdd(pair).fit(a_stream())
    d = 5 if pair == "equal" else 4
    shapes = {name: tuple(p.shape) for name, p in distiller.methods[0].named_parameters()}
    widths = {"stage1": d, "stage2": 2 * d, "stage3": 2 * d}
    assert shapes == {f"heads.{r}.weight": (C, w) for r, w in widths.items()} | {f"heads.{r}.bias": (C,) for r in widths}
    distiller(a_stream()[0]).terms["tdd"].backward()
    for name, parameter in distiller.named_parameters():
        if not name.startswith("student.fc"):
            assert parameter.grad.abs().max() > 0, name
    assert not any(buffer.requires_grad for buffer in distiller.buffers())
    assert distiller.export().state_dict().keys() == distiller.student.state_dict().keys()


@every_pair
def test_it_falls_and_stands_beside_kd(pair):
    method = [TDD(k=5), KD()]
    distiller = a_distiller(method, pair, student_taps=TAPS, teacher_taps=TAPS, weights={"ce": 0.0, "kd": 0.0}).fit(a_stream())
    losses = steps(distiller, a_stream()[:1] * 25, sgd(distiller))
    assert losses[-1] < 0.9 * losses[0]
    distiller.set_weights({})
    assert set(distiller(a_stream()[0]).terms) == {"ce", "tdd", "kd"}


def test_a_stage_of_one_group_adds_nothing():
    distiller = a_tdd(method=TDD(["stage2"], k=5)).fit(a_stream())
    assert distiller(a_stream()[0]).terms["tdd"] > 0
    whole = a_tdd(method=TDD(["stage2"], k=5, threshold=1.1)).fit(a_stream())
    step = whole(a_stream()[0])
    assert step.terms["tdd"] == 0
    step.loss.backward()
    assert torch.equal(whole.methods[0].heads["stage2"].weight.grad, torch.zeros(C, 10))


def test_the_teachers_place_may_be_another_than_the_students():
    taps = {**TAPS, "stage2": "last.0.bn"}
    distiller = a_tdd("unequal", teacher_taps=taps).fit(a_stream())
    tree = ClassTree(k=5, C=C)
    for batch in a_stream():
        _, f = distiller._teacher_reads(batch.x)
        tree.partial_fit(f["stage2"], batch.y, batch.index)
    tree.finish()
    assert same_state(distiller.methods[0].trees["stage2"].state_dict(), tree.state_dict())


def test_trees_are_files_of_their_own_and_are_found_again(tmp_path):
    distiller = a_tdd().fit(a_stream(), folder=tmp_path, data="the stream")
    names = sorted(path.name.partition(".tree.")[0] for path in tmp_path.iterdir())
    assert names == [f"tdd-stage{i}" for i in (1, 2, 3)]
    again = a_tdd(seed=5).fit([], folder=tmp_path, data="the stream")
    for role, tree in distiller.methods[0].trees.items():
        assert same_state(again.methods[0].trees[role].state_dict(), tree.state_dict())
    for change in ({"k": 4}, {"k": 5, "threshold": 0.3}, {"k": 5, "seed": 0}, {"k": 5, "memory": 999}):
        with pytest.raises(FitError):  # fitted anew, to nothing
            a_tdd(method=TDD(**change)).fit([], folder=tmp_path, data="the stream")


@pytest.mark.parametrize("site", ["tdd/stage1", "../../elsewhere", "/etc/x", "a\\b", "stage1.preact", "C:x"])
def test_a_sites_file_lies_in_its_folder_whatever_the_name(site, tmp_path):
    path = path_of(ClassTree(), tmp_path, site, Origin("t", "p", "d", "s"))
    assert path.resolve().parent == tmp_path.resolve()
    assert re.search(r"\.tree\.[0-9a-f]{12}\.safetensors$", path.name)
    assert not set(path.name) & set("/\\:")


@pytest.mark.parametrize("roles", [[], ["stage1", "stage1"], "stage1"])
def test_wrong_roles_are_refused(roles):
    with pytest.raises(UnsupportedPair, match="TDD needs a list of roles, at least one and each only once"):
        TDD(roles)


def test_pairs_that_it_cannot_serve():
    with pytest.raises(TapError, match="the teacher Net has no tap for the role 'stage4'"):
        a_tdd(method=TDD(["stage3", "stage4"]))
    with pytest.raises(TapError, match=r"tap 'stage3' of the teacher: 'fc' gives \[b 3\], and a map"):
        a_tdd(teacher_taps={**TAPS, "stage3": "fc"})
    one = [nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * 14 * 14, 1)) for _ in range(2)]
    taps = {"stage1": "0"}
    with pytest.raises(UnsupportedPair, match="distinguishes groups of classes, but there is only one class"):
        Distiller(*one, TDD(["stage1"]), student_taps=taps, teacher_taps=taps, example=torch.zeros(1, 3, *SIZE))


def test_defaults_are_the_authors():
    method = TDD()
    assert method.roles == ("stage1", "stage2", "stage3")
    assert {(tree.k, tree.threshold, tree.seed) for tree in method.trees.values()} == {(20, 0.2, 1029)}


@pytest.mark.parametrize(
    ("name", "weights"),
    [("tdd", {"ce": 0.1, "kd": 0.9, "tdd": 0.1}), ("tdd-crd", {"ce": 0.1, "kd": 0.9, "tdd": 0.1, "crd": 0.8})],
)
def test_recipes(name, weights):
    recipe = resolve(f"cifar100/rn56-rn20/{name}")
    assert recipe.weights == weights
    method = TDD.from_recipe(recipe.methods["tdd"])
    assert method.roles == ("stage1", "stage2", "stage3")
    assert {(tree.k, tree.threshold) for tree in method.trees.values()} == {(20, 0.2)}
    assert KD.from_recipe(recipe.methods["kd"]).T == 4.0
