"""What every network of the zoo promises: published size and names, true taps, any input size, gradients everywhere."""

import copy
import io
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from letkd.models import create_model, list_models
from letkd.models.base import MODELS
from letkd.taps import Taps, as_taps, probe

# Parameters and state-dict entries at 100 classes, as published; the tiny ones are summed by hand over their definition.
SIZES = {
    "resnet8": (83_892, 56),
    "resnet14": (181_108, 92),
    "resnet20": (278_324, 128),
    "resnet32": (472_756, 200),
    "resnet44": (667_188, 272),
    "resnet56": (861_620, 344),
    "resnet110": (1_736_564, 668),
    "resnet8x4": (1_233_540, 62),
    "resnet32x4": (7_433_860, 206),
    "resnet8_tiny": (22_924, 56),
    "resnet14_tiny": (47_340, 92),
}

BN = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
NAMES = {
    "resnet": re.compile(
        rf"conv1\.weight|bn1\.{BN}|fc\.(weight|bias)|layer[123]\.\d+\.conv[12]\.weight|layer[123]\.\d+\.bn[12]\.{BN}"
        rf"|layer[123]\.0\.downsample\.(0\.weight|1\.{BN})"
    ),
}

RESNETS = [name for name in list_models() if name.startswith("resnet")]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def images(model: nn.Module, b: int = 2, size: tuple[int, int] | None = None) -> torch.Tensor:
    d, h, w = model.input_size
    return torch.randn(b, d, *(size or (h, w)))


def with_lively_bn(model: nn.Module) -> nn.Module:
    """Statistics and affine values as after training: fresh BN would hide a swapped or a missing one."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def test_every_model_has_its_size_and_name_pattern_in_these_tables():
    assert set(SIZES) == set(list_models()) == set(MODELS)
    assert all(any(name.startswith(family) for family in NAMES) for name in list_models())


@pytest.mark.parametrize("name", list_models())
def test_parameters_and_keys_are_the_published_ones(name):
    model = create_model(name, num_classes=100)
    parameters, keys = SIZES[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert len(model.state_dict()) == keys
    pattern = next(pattern for family, pattern in NAMES.items() if name.startswith(family))
    assert [key for key in model.state_dict() if not pattern.fullmatch(key)] == []


@pytest.mark.parametrize("name", list_models())
@pytest.mark.parametrize("size", [(32, 32), (48, 64)])
def test_taps_are_where_and_what_the_table_says(name, size):
    model = create_model(name, num_classes=7).eval()
    taps = as_taps(model)
    assert {"stem", "stage1", "stage2", "stage3", "intermediate", "penultimate", "pooled", "logits"} <= set(taps)
    x = images(model, b=1, size=size)
    with torch.no_grad():
        logits, features = Taps(model, taps)(x)
    assert logits.shape == (1, 7)
    assert model.num_classes == 7
    assert torch.isfinite(logits).all()
    assert torch.equal(features["logits"], logits)
    for role, tap in taps.items():
        shape = tuple(features[role].shape)
        if len(shape) == 4:
            assert shape == (1, tap.channels, size[0] // tap.stride, size[1] // tap.stride), role
        else:
            assert (len(shape), tap.channels, tap.stride) == (2, None, None), role


@pytest.mark.parametrize("name", list_models())
def test_every_parameter_gets_a_gradient(name):
    model = create_model(name, num_classes=5).train()
    F.cross_entropy(model(images(model)), torch.tensor([1, 3])).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", list_models())
def test_copies_and_stored_states_compute_the_same(name):
    model = with_lively_bn(create_model(name, num_classes=5))
    x = images(model, b=1)
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    fresh = create_model(name, num_classes=5).eval()
    with torch.no_grad():
        expected = model(x)
        assert not torch.equal(fresh(x), expected)
        fresh.load_state_dict(torch.load(stored, weights_only=True))
        assert torch.equal(fresh(x), expected)
        twin = copy.deepcopy(model)
        nn.init.zeros_(next(model.parameters()))
        assert torch.equal(twin(x), expected)
    assert twin.taps == model.taps


@pytest.mark.parametrize("name", RESNETS)
def test_resnet_roles_mean_what_they_say(name):
    model = with_lively_bn(create_model(name, num_classes=5))
    taps = as_taps(model)
    _, f = probe(model, taps, images(model))
    assert torch.equal(f["stem"], f["stem"].relu())
    for stage in ("stage1", "stage2", "stage3"):
        assert f[f"{stage}.preact"].min() < 0
        assert torch.equal(f[f"{stage}.preact"].relu(), f[stage])
    assert torch.equal(f["penultimate"], f["stage3"])
    assert torch.allclose(f["pooled"], f["penultimate"].mean(dim=(2, 3)), atol=1e-6)
    blocks = {"intermediate": model.layer3[0], "penultimate": model.layer3[-1]}
    for role, block in blocks.items():
        assert model.get_submodule(taps[f"{role}.conv3x3"].path) is block.conv1
        assert block.conv1.kernel_size == (3, 3)
    conv = model.layer3[0].conv1
    assert torch.equal(f["intermediate.conv3x3"], F.conv2d(f["stage2"], conv.weight, stride=2, padding=1))


@pytest.mark.parametrize("name", ["resnet14", "resnet8x4", "resnet14_tiny"])
def test_resnet_computes_its_definition(name):
    model = with_lively_bn(create_model(name, num_classes=5)).double()
    state = model.state_dict()

    def bn(x, key):
        mean, var = state[f"{key}.running_mean"], state[f"{key}.running_var"]
        y = (x - mean.view(-1, 1, 1)) / torch.sqrt(var.view(-1, 1, 1) + 1e-5)
        return y * state[f"{key}.weight"].view(-1, 1, 1) + state[f"{key}.bias"].view(-1, 1, 1)

    def conv(x, key, stride, padding):
        return F.conv2d(x, state[f"{key}.weight"], stride=stride, padding=padding)

    x = images(model).double()
    y = bn(conv(x, "conv1", 1, 1), "bn1").relu()
    for stage, first_stride in ((1, 1), (2, 2), (3, 2)):
        i = 0
        while f"layer{stage}.{i}.conv1.weight" in state:
            key, stride = f"layer{stage}.{i}", first_stride if i == 0 else 1
            z = bn(conv(y, f"{key}.conv1", stride, 1), f"{key}.bn1").relu()
            z = bn(conv(z, f"{key}.conv2", 1, 1), f"{key}.bn2")
            if f"{key}.downsample.0.weight" in state:
                y = bn(conv(y, f"{key}.downsample.0", stride, 0), f"{key}.downsample.1")
            y = (y + z).relu()
            i += 1
    expected = F.avg_pool2d(y, 8).flatten(1) @ state["fc.weight"].T + state["fc.bias"]
    with torch.no_grad():
        assert torch.allclose(model(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["resnet8", "resnet20", "resnet8_tiny"])
def test_shortcuts_stand_only_where_the_shape_changes(name):
    keys = create_model(name, num_classes=5).state_dict()
    assert {key.split(".downsample")[0] for key in keys if "downsample" in key} == {"layer2.0", "layer3.0"}
    wide = create_model("resnet8x4", num_classes=5).state_dict()
    assert {key.split(".downsample")[0] for key in wide if "downsample" in key} == {"layer1.0", "layer2.0", "layer3.0"}


def test_convolutions_start_kaiming_normal_over_fan_out():
    model = create_model("resnet8x4", num_classes=5)
    for conv in (model.layer3[0].conv1, model.layer3[0].conv2, model.layer3[0].downsample[0]):
        fan_out = conv.out_channels * conv.kernel_size[0] * conv.kernel_size[1]
        assert conv.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)


@pytest.mark.parametrize("size", [(8, 8), (9, 13), (64, 32)])
def test_resnet_takes_any_size_from_8_pixels_on(size):
    model = create_model("resnet14_tiny", num_classes=3).eval()
    assert torch.isfinite(model(images(model, size=size))).all()


def test_resnet_tiny_has_8_8_16_32_channels():
    taps = create_model("resnet8_tiny", num_classes=3).taps
    assert [taps[role].channels for role in ("stem", "stage1", "stage2", "stage3")] == [8, 8, 16, 32]
