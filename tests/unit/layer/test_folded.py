"""A folded student gives what the student gives: exact in float64, and with as many products fewer as were constant."""

import copy
import pickle

import pytest
import torch
from torch import nn

from letkd import KDLayer, create_model, graft
from letkd.distiller.student import load_student, save_student
from letkd.layer.folded import FoldedKDLayer, fold_batch_norms, fold_layer, fold_student
from tests.support.pair import a_net


def trained(layer: nn.Module, *, seed: int = 0) -> nn.Module:
    """As after training: statistics, affine values and scales are not what a fresh layer has."""
    torch.manual_seed(seed)
    for name, tensor in layer.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.2 if "var" in name or "scale" in name else 0.4 * torch.randn_like(tensor))
    return layer.eval()


def a_kd_layer(d: int = 5, K: int = 12, **settings) -> KDLayer:
    layer = KDLayer(d, K, **settings)
    trained(layer)
    return layer


def test_half_precision_has_no_nan_for_pixels_without_direction_or_match():
    layer = a_kd_layer()
    layer.bn.bias.data[:] -= 3.0
    x = torch.randn(3, 5, 4, 6)
    x[0, :, 0, 0], x[1] = 0, 300 * x[1]  # ‖x‖² is above the largest number of this type
    for small in (layer.half(), fold_layer(layer.half())):
        with torch.no_grad():
            assert small(x.half()).isfinite().all()
            assert (small(x.half()) == x.half()).all(dim=1).any()


@pytest.mark.parametrize("normalize_value_input", [True, False])
@pytest.mark.parametrize("alpha", [1.0, -0.3])
def test_a_folded_layer_is_the_layer_in_eval_mode(alpha, normalize_value_input):
    layer = a_kd_layer(alpha=alpha, normalize_value_input=normalize_value_input)
    x = torch.randn(3, 5, 4, 6)
    x[0, :, 0, 0] = 0  # a pixel without a direction
    layer.omega.scale.data[:], layer.nu.scale.data[:] = 4.0, 3.0
    layer.bn.bias.data[:] -= 1.5
    with torch.no_grad():
        assert ((layer.bn(layer.omega(x)) > 0).sum(dim=1) == 0).any()  # and pixels that match nothing
        wanted = layer(x)
        assert (wanted - x).abs().max() > 0.1
        torch.testing.assert_close(fold_layer(layer)(x), wanted, rtol=1e-5, atol=1e-5)
        x, layer = x.double(), layer.double()
        torch.testing.assert_close(fold_layer(layer)(x), layer(x), rtol=0, atol=1e-10)


def test_a_folded_layer_holds_plain_tensors_and_can_be_copied():
    folded = fold_layer(a_kd_layer())
    assert {name: tuple(t.shape) for name, t in folded.state_dict().items()} == {
        "omega": (12, 5, 1, 1),
        "beta": (12,),
        "nu": (5, 12, 1, 1),
        "bias": (5,),
    }
    assert not list(folded.parameters())
    x = torch.randn(1, 5, 3, 3)
    before = x.clone()
    for other in (copy.deepcopy(folded), pickle.loads(pickle.dumps(folded))):
        assert torch.equal(other(x), folded(x))
    assert torch.equal(x, before)
    again = FoldedKDLayer(**folded.settings())
    again.load_state_dict(folded.state_dict())
    assert torch.equal(again(x), folded(x))


def grafted(name: str = "resnet8_tiny", roles: tuple[str, ...] = ("intermediate", "penultimate"), **settings) -> nn.Module:
    model = create_model(name, num_classes=3)
    for role in roles:
        tap = model.taps[role]
        graft(model, KDLayer(tap.channels, 7, **settings), after=tap.path)
    return trained(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet8_tiny", "wrn_16_1", "vgg11"])
def test_a_folded_student_and_its_file(name, tmp_path):
    student, x = grafted(name), torch.randn(2, 3, 16, 16)
    state = {key: tensor.clone() for key, tensor in student.state_dict().items()}
    folded = fold_student(student)
    kinds = [type(module) for module in folded.modules()]
    assert (kinds.count(FoldedKDLayer), kinds.count(KDLayer)) == (2, 0)
    assert all(torch.equal(student.state_dict()[key], tensor) for key, tensor in state.items())
    save_student(folded, tmp_path / "s.safetensors", model=name, num_classes=3)
    with torch.no_grad():
        assert torch.equal(load_student(tmp_path / "s.safetensors")(x), folded(x))
        student, folded, x = student.double(), fold_student(student.double()), x.double()
        torch.testing.assert_close(folded(x), student(x), rtol=1e-10, atol=1e-10)


def test_a_layer_that_does_nothing_goes(tmp_path):
    student, x = grafted(alpha=0.0), torch.randn(2, 3, 16, 16)
    folded = fold_student(student)
    assert torch.equal(folded(x), student(x))
    save_student(folded, tmp_path / "s.safetensors", model="resnet8_tiny", num_classes=3)
    assert torch.equal(load_student(tmp_path / "s.safetensors")(x), student(x))


class Shared(nn.Module):
    """Of its four BNs one can be folded: of the others, one's input is read twice, one has no convolution, one runs twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.bn_a, self.bn_b, self.bn_c, self.bn = (nn.BatchNorm2d(3) for _ in range(4))

    def forward(self, x):
        x = self.bn_a(self.a(x)).relu()
        y = self.b(x)
        y = self.bn(y + self.bn_b(y))
        return self.bn_c(self.c(self.bn_c(self.c(y)))).mean(dim=(2, 3))


def folded_norms(model: nn.Module, size: int = 8) -> tuple[int, nn.Module]:
    model = copy.deepcopy(model)
    count = fold_batch_norms(model, torch.export.export(model, (torch.randn(2, 3, size, size, dtype=torch.float64),)))
    return count, model


def test_batch_norms_are_folded_where_nobody_else_reads_the_convolution():
    model, x = trained(Shared().double()), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    count, folded = folded_norms(model)
    assert count == 1
    assert isinstance(folded.bn_a, nn.Identity)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)


def test_a_batch_norm_with_a_graft_stays():
    model = a_net(3, seed=0).eval().double()
    graft(model, a_kd_layer(6).double(), after="last.1.bn")
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    count, folded = folded_norms(fold_student(model), 16)
    assert count == 2
    assert isinstance(folded.last[1].bn, nn.BatchNorm2d)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)
