"""A folded teacher: the same features at every tap, BN gone where nobody reads the convolution, the original untouched."""

import copy

import pytest
import torch
from torch import nn

from letkd.models import create_model
from letkd.taps import Tap, Taps, as_taps, run_once
from letkd.taps.fold_bn import fold_teacher
from tests.support.pair import SIZE, TAPS, a_teacher, images, same_state

EXAMPLE = torch.zeros(1, 3, *SIZE)


def norms(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}


def features(model: nn.Module, taps: dict[str, Tap], x: torch.Tensor) -> dict[str, torch.Tensor]:
    logits, seen = run_once(Taps(model, taps), x)
    return {**seen, "logits": logits}


@pytest.mark.parametrize("taps", [{}, TAPS, {"bn": "last.1.bn", "relu": Tap("last.0.relu", io="input")}])
def test_every_tap_and_the_logits_stay(taps):
    teacher = a_teacher().eval()
    before = copy.deepcopy(teacher.state_dict())
    table = as_taps(teacher, taps)
    folded = fold_teacher(teacher, table, EXAMPLE)
    x = images(6)[0]
    one, two = features(teacher, table, x), features(folded, table, x)
    assert one.keys() == two.keys()
    for role, f in one.items():
        torch.testing.assert_close(two[role], f, rtol=1e-4, atol=1e-4)
    assert same_state(teacher.state_dict(), before)
    assert norms(teacher) == {"first.1", "last.0.bn", "last.1.bn"}


def test_a_bn_stays_where_its_convolution_is_read():
    teacher = a_teacher().eval()
    assert norms(fold_teacher(teacher, {}, EXAMPLE)) == set()
    assert norms(fold_teacher(teacher, {"raw": Tap("last.0.conv")}, EXAMPLE)) == {"last.0.bn"}
    assert norms(fold_teacher(teacher, {"raw": Tap("last.1.bn", io="input")}, EXAMPLE)) == {"last.1.bn"}
    assert norms(fold_teacher(teacher, {"normed": Tap("last.1.bn")}, EXAMPLE)) == set()


@pytest.mark.parametrize("name", ["resnet8x4", "wrn_16_1", "shufflenet_v2", "mobilenetv2_half"])
def test_networks_of_the_zoo(name):
    torch.manual_seed(0)
    teacher = create_model(name, num_classes=5).eval()
    for module in teacher.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
    folded = fold_teacher(teacher, as_taps(teacher), torch.zeros(1, 3, 32, 32))
    assert len(norms(folded)) < len(norms(teacher))
    x = torch.rand(2, 3, 32, 32)
    for role, f in features(teacher, as_taps(teacher), x).items():
        torch.testing.assert_close(features(folded, as_taps(teacher), x)[role], f, rtol=1e-3, atol=1e-4)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = a_teacher()

    def forward(self, x):
        return self.net(x) if x.sum() > 0 else self.net(-x)


def test_a_network_that_cannot_be_followed_is_left_alone(said):
    teacher = Branching().eval()
    assert fold_teacher(teacher, {}, EXAMPLE) is teacher
    assert "the teacher Branching keeps its BN: torch.fx cannot trace it" in said()


class Shared(nn.Module):
    """A convolution that runs twice, with a BN for each."""

    def __init__(self):
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.two(self.conv(self.one(self.conv(x)))).mean(dim=(2, 3))


def test_a_convolution_that_runs_twice_keeps_both_norms():
    assert norms(fold_teacher(Shared().eval(), {}, EXAMPLE)) == {"one", "two"}


def test_a_convolution_with_two_names_and_a_bn_without_statistics_stay():
    teacher = a_teacher().eval()
    teacher.alias = nn.ModuleList([teacher.last[0].conv])
    teacher.last[1].bn = nn.BatchNorm2d(10, track_running_stats=False).eval()
    assert norms(fold_teacher(teacher, {}, EXAMPLE)) == {"last.0.bn", "last.1.bn"}


@pytest.mark.parametrize("shared", ["weight", "bias", "beta"])
def test_parameters_that_others_share_keep_their_type(shared):
    conv, bn = (lambda: nn.Conv2d(3, 3, 1)), (lambda: nn.BatchNorm2d(3))
    teacher = nn.Sequential(conv(), bn(), conv(), nn.ReLU(), bn(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    if shared == "beta":
        teacher[4].bias = teacher[1].bias
    else:
        setattr(teacher[2], shared, getattr(teacher[0], shared))
    folded = fold_teacher(teacher, {}, EXAMPLE)
    assert norms(folded) == {"4"}
    assert {tensor.dtype for tensor in folded.parameters()} == {torch.float32}
    x = images(6)[0]
    torch.testing.assert_close(folded(x), teacher(x))
