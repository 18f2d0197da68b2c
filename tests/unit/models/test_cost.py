"""MACs, against counts by hand and the published ones."""

import copy

import pytest
import torch
from torch import nn
from torch.backends import mha

from letkd.models import create_model
from letkd.models.cost import macs, parameters
from tests.support.pair import a_net, same_state

X = torch.zeros(1, 6, 10, 8)


@pytest.mark.parametrize(
    ("layer", "by_hand"),
    [
        (nn.Conv2d(6, 4, 3, padding=1), 4 * 6 * 3 * 3 * 10 * 8),
        (nn.Conv2d(6, 4, 3, padding=1, bias=False), 4 * 6 * 3 * 3 * 10 * 8),
        (nn.Conv2d(6, 4, (3, 1), stride=2), 4 * 6 * 3 * 4 * 4),
        (nn.Conv2d(6, 6, 3, padding=1, groups=6), 6 * 3 * 3 * 10 * 8),
        (nn.Conv2d(6, 4, 1, groups=2), 4 * 3 * 10 * 8),
        (nn.Sequential(nn.Flatten(), nn.Linear(480, 7)), 480 * 7),
        (nn.Sequential(nn.Flatten(), nn.Linear(480, 7, bias=False)), 480 * 7),
        (nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), 0),
    ],
)
def test_layers_counted_by_hand(layer, by_hand):
    assert macs(layer, X) == by_hand
    assert macs(layer, X.repeat(3, 1, 1, 1)) == 3 * by_hand


def test_attention_counts_though_eval_mode_would_fuse_it():
    n, d, hidden = 5, 8, 16
    layer = nn.TransformerEncoderLayer(d, 2, hidden, batch_first=True)
    projections, products, mlp = 4 * n * d * d, 2 * n * n * d, 2 * n * d * hidden
    assert mha.get_fastpath_enabled()
    assert macs(layer, torch.zeros(1, n, d)) == projections + products + mlp
    assert mha.get_fastpath_enabled()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_classes", "published"),
    [
        ("resnet8", 100, 12.5e6),
        ("resnet20", 100, 40.8e6),
        ("resnet56", 100, 125.8e6),
        ("resnet110", 100, 253.2e6),
        ("resnet32x4", 100, 1083.0e6),
        ("wrn_16_2", 100, 101.1e6),
        ("wrn_40_2", 100, 327.6e6),
        ("vgg8", 100, 96.2e6),
        ("vgg13", 100, 284.9e6),
        ("resnet50_cifar", 100, 1298.0e6),
        ("mobilenetv2_half", 100, 6.5e6),
        ("shufflenet_v1", 100, 38.7e6),
        ("shufflenet_v2", 100, 44.5e6),
        ("resnet18", 1000, 1.814e9),
        ("resnet34", 1000, 3.664e9),
        ("resnet50", 1000, 4.089e9),
        ("mobilenetv1", 1000, 0.569e9),
        ("mobilenetv2", 1000, 0.301e9),
    ],
)
def test_the_zoos_are_the_published_ones(name, num_classes, published):
    with torch.device("meta"):
        model = create_model(name, num_classes=num_classes)
        found = macs(model, torch.zeros(1, *model.input_size))
    assert found == pytest.approx(published, rel=5e-3)


def test_counting_leaves_no_trace():
    net = a_net(4, seed=0).train()
    before, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    count = macs(net, torch.randn(2, 3, 16, 16))
    assert count == macs(copy.deepcopy(net).eval().double(), torch.randn(2, 3, 16, 16).double()) > 0
    assert same_state(net.state_dict(), before)
    assert [module.training for module in net.modules()] == modes
    assert not any(module._forward_hooks for module in net.modules())


def test_shared_parameters_count_once_and_run_twice():
    layer = nn.Conv2d(6, 6, 1, bias=False)
    both = nn.Sequential(layer, layer)
    assert parameters(both) == 36
    assert macs(both, X) == 2 * 36 * 10 * 8
