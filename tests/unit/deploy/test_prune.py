"""Pruning drops what does nothing for nothing, keeps the layer's output by least squares, and finds the fewest templates."""

import pytest
import torch
from torch import nn

from letkd import KDLayer, graft
from letkd.batch import Batch
from letkd.deploy.prune import folded_layers, observe, prune_auto, prune_layer, prune_to, prune_unused, ranking, smallest
from letkd.deploy.shrink import hold_out, shrink
from letkd.deploy.source import Source
from letkd.errors import ExportError
from letkd.layer.folded import FoldedKDLayer, fold_student
from letkd.taps.layouts import Tokens
from tests.support.pair import a_net, a_stream
from tests.support.tokens import ViT

SILENT = [3, 7, 11]


def a_folded_student(K: int = 16, *, d: int = 4, **settings) -> nn.Module:
    """Two KD layers; of the first, three templates never fire."""
    student = a_net(d, seed=0)
    torch.manual_seed(1)
    for path in ("last.0", "last"):
        graft(student, KDLayer(2 * d, K, **settings), after=path)
    with torch.no_grad():
        for batch in a_stream():
            student(batch.x)
    student = fold_student(student)
    student.last[0].kd_layer.beta[SILENT] = -1e3
    return student


@torch.no_grad()
def logits(student: nn.Module, batches: list[Batch]) -> torch.Tensor:
    return torch.cat([student(batch.x) for batch in batches])


@pytest.mark.parametrize("normalize_value_input", [True, False])
def test_use_is_what_the_formula_says(stream, normalize_value_input):
    student = a_folded_student(normalize_value_input=normalize_value_input)
    layer = student.last[0].kd_layer
    use = observe(student, "last.0.kd_layer", stream, pixels=50)
    fired, energy = torch.zeros(16), torch.zeros(16, dtype=torch.float64)
    entered = []
    layer.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    logits(student, stream)
    rows = torch.cat([x.movedim(1, -1).reshape(-1, 8) for x in entered])
    for row in rows:
        p = (layer.omega[:, :, 0, 0] @ (row / row.norm().clamp_min(1e-12)) + layer.beta).clamp_min(0).double()
        fired += p > 0
        energy += (p / (p.norm() if normalize_value_input and p.norm() else 1)) ** 2 * layer.nu[:, :, 0, 0].double().norm(
            dim=0
        ) ** 2
    assert use.seen == len(rows)
    assert torch.equal(use.fired, fired.long())
    assert (use.fired == 0).nonzero().flatten().tolist() == SILENT
    torch.testing.assert_close(use.share.double(), energy / energy.sum(), rtol=1e-4, atol=1e-6)
    assert use.pixels.shape == (51, 8)  # 17 of each of 3 batches
    assert all((rows == pixel).all(dim=1).any() for pixel in use.pixels)
    assert set(ranking(use).tolist()) == set(range(16)) - set(SILENT)
    assert use.share[ranking(use)].diff().max() <= 0


def test_templates_that_never_fire_cost_nothing_to_drop(stream):
    student = a_folded_student()
    state = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    small, layers = prune_unused(student, stream)
    first = layers[0]
    assert (first.path, first.K, first.never, first.kept) == ("last.0.kd_layer", 16, 3, 13)
    assert small.last[0].kd_layer.omega.shape[0] == 13
    torch.testing.assert_close(logits(small, stream), logits(student, stream), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(student.state_dict()[name], tensor) for name, tensor in state.items())


def test_pruning_a_layer_among_patch_tokens():
    """The class token and the registers pass by it; the other tokens are its pixels."""
    torch.manual_seed(0)
    student, batches = ViT(d=8), a_stream()
    h, w = (n // 4 for n in batches[0].x.shape[2:])
    graft(student, KDLayer(8, 16), after="blocks.2", layout=Tokens(3, (h, w)))
    logits(student, batches)
    student = fold_student(student)
    (path,) = folded_layers(student)
    student.get_submodule(path).beta[SILENT] = -1e3
    pruned, (found,) = prune_unused(student, batches)
    assert found.never >= 3
    assert pruned.get_submodule(path).omega.shape[0] == found.kept == 16 - found.never
    torch.testing.assert_close(logits(pruned, batches), logits(student, batches), rtol=1e-5, atol=1e-5)
    assert observe(student, path, batches, pixels=50).seen == sum(len(batch.y) for batch in batches) * h * w


def test_cutting_alone_changes_more_than_cutting_and_fitting():
    torch.manual_seed(0)
    layer = FoldedKDLayer(6, 64)
    for buffer in layer.buffers():
        buffer.normal_()
    layer.bias.zero_()
    pixels, others = torch.randn(4000, 6), torch.randn(8, 6, 5, 5)
    keep = torch.arange(32)
    wanted = layer(others) - others
    cut, fitted = (prune_layer(layer, keep, known)(others) - others - wanted for known in (None, pixels))
    assert fitted.norm() < 0.7 * cut.norm()
    assert fitted.norm() < 0.5 * wanted.norm()


def test_fitting_gives_back_a_layer_that_needs_no_more(stream):
    """ν of templates that say the same as others is carried by those others."""
    torch.manual_seed(0)
    layer = FoldedKDLayer(5, 12, normalize_value_input=False)
    for buffer in layer.buffers():
        buffer.normal_()
    layer.omega[6:], layer.beta[6:] = layer.omega[:6], layer.beta[:6]
    small = prune_layer(layer, torch.arange(6), torch.randn(3000, 5))
    x = torch.randn(2, 5, 4, 4)
    torch.testing.assert_close(small(x), layer(x), rtol=1e-2, atol=1e-2)


def test_prune_to_a_number(stream):
    student, layers = prune_to(a_folded_student(), stream, 5)
    assert [layer.kept for layer in layers] == [5, 5]
    assert torch.isfinite(logits(student, stream)).all()
    student, layers = prune_to(a_folded_student(), stream, 14)
    assert [layer.kept for layer in layers] == [13, 14]
    with pytest.raises(ExportError, match="cannot prune to 0 templates; a layer keeps at least 1"):
        prune_to(a_folded_student(), stream, 0)
    with pytest.raises(ExportError, match="has no KD layer, so there is nothing to prune"):
        prune_to(a_net(4, seed=0), stream, 5)


@pytest.mark.parametrize("K", [1, 2, 7, 100, 4096])
def test_smallest_by_bisection(K):
    for needed in sorted({1, min(2, K), K // 3 + 1, K}):
        asked = []
        found = smallest(K, lambda size, needed=needed, asked=asked: asked.append(size) or size >= needed)
        assert needed <= found <= max(1.25 * needed, needed + 1)
        assert len(asked) <= 6
    assert smallest(K, lambda size: False) == K
    assert smallest(K, lambda size: True) == 1


def test_auto_keeps_within_the_tolerance(stream):
    student = a_folded_student()
    truth = logits(student, stream)

    def accuracy(other: nn.Module) -> float:
        """Falls with the distance from what the whole student gives."""
        return 100 - 100 * float((logits(other, stream) - truth).norm() / truth.norm())

    found = {}
    for tolerance in (0.0, 1.0, 1000.0):
        small, layers = prune_auto(student, stream, accuracy, tolerance=tolerance)
        found[tolerance] = sum(layer.kept for layer in layers)
        assert accuracy(small) >= 100 - tolerance - 1e-3
    assert found[1000.0] == 2 < found[1.0] < found[0.0] + 1


def test_shrink_says_what_it_needs(tmp_path):
    from letkd.data import load_data
    from letkd.distiller.facts import Facts

    data = load_data("digits", val=0, fraction=0.02)
    source = Source(tmp_path, a_folded_student(), Facts(num_classes=3), None)
    with pytest.raises(ExportError, match="pruning needs the training images"):
        shrink(source, "auto")
    with pytest.raises(ExportError, match="`prune=some`: use unused, auto, or the number of templates"):
        shrink(Source(tmp_path, source.student, source.facts, data), "some")
    train, held, name = hold_out(data)
    assert name == "a tenth of the training split"
    assert len(train) + len(held) == len(data.train)
    assert len(held) == 10
    assert hold_out(load_data("digits"))[2] == "validation"
    train, held, _ = hold_out(load_data("digits", val=0, fraction=0.3, unlabelled="rest"))
    assert (train.labels < 0).any()
    assert (held.labels >= 0).all()
    assert folded_layers(source.student) == ["last.0.kd_layer", "last.kd_layer"]
