"""What every network of the zoo promises: published size and names, true taps, any input size, gradients everywhere."""

import copy
import io
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from letkd.models import create_model, list_models
from letkd.models.base import MODELS
from letkd.taps import Taps, as_taps, graft, probe

# Classes, and parameters and state-dict entries with so many, as published. Where only the parameters are, the entries are counted
# by hand: 6 for each convolution with its BN, 2 for the classifier. The tiny networks are summed over their definition.
SIZES = {
    "resnet8": (100, 83_892, 56),
    "resnet14": (100, 181_108, 92),
    "resnet20": (100, 278_324, 128),
    "resnet32": (100, 472_756, 200),
    "resnet44": (100, 667_188, 272),
    "resnet56": (100, 861_620, 344),
    "resnet110": (100, 1_736_564, 668),
    "resnet8x4": (100, 1_233_540, 62),
    "resnet32x4": (100, 7_433_860, 206),
    "resnet8_tiny": (100, 22_924, 56),
    "resnet14_tiny": (100, 47_340, 92),
    "resnet29": (100, 231_540, 6 * (1 + 27 + 3) + 2),
    "resnet83": (100, 656_244, 6 * (1 + 81 + 3) + 2),
    "resnet20_a": (10, 269_722, 6 * 19 + 2),
    "resnet32_a": (10, 464_154, 6 * 31 + 2),
    "resnet44_a": (10, 658_586, 6 * 43 + 2),
    "resnet56_a": (10, 853_018, 6 * 55 + 2),
    "resnet110_a": (10, 1_727_962, 6 * 109 + 2),
    "resnet50_cifar": (100, 23_705_252, 320),
    "wrn_16_1": (100, 180_916, 82),
    "wrn_16_2": (100, 703_284, 83),
    "wrn_40_1": (100, 569_780, 226),
    "wrn_40_2": (100, 2_255_156, 227),
    "vgg8": (100, 3_965_028, 37),
    "vgg11": (100, 9_277_284, 58),
    "vgg13": (100, 9_462_180, 72),
    "vgg16": (100, 14_774_436, 93),
    "vgg19": (100, 20_086_692, 114),
    "shufflenet_v1": (100, 949_258, 296),
    "shufflenet_v2": (100, 1_355_528, 338),
    "mobilenetv2_half": (100, 812_836, 320),
    "resnet18": (1000, 11_689_512, 122),
    "resnet34": (1000, 21_797_672, 218),
    "resnet50": (1000, 25_557_032, 320),
    "mobilenetv1": (1000, 4_231_976, 6 * 27 + 2),
    "mobilenetv2": (1000, 3_504_872, 314),
}

BN = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
WB = r"(weight|bias)"
NAMES = {
    r"resnet(8|14|20|32|44|56|110)(x4|_tiny)?": (
        rf"conv1\.weight|bn1\.{BN}|fc\.{WB}|layer[123]\.\d+\.conv[12]\.weight|layer[123]\.\d+\.bn[12]\.{BN}"
        rf"|layer[123]\.0\.downsample\.(0\.weight|1\.{BN})"
    ),
    r"resnet(29|83)": (
        rf"conv1\.weight|bn1\.{BN}|fc\.{WB}|layer[123]\.\d+\.conv[123]\.weight|layer[123]\.\d+\.bn[123]\.{BN}"
        rf"|layer[123]\.0\.downsample\.(0\.weight|1\.{BN})"
    ),
    r"resnet\d+_a": (rf"conv1\.weight|bn1\.{BN}|linear\.{WB}|layer[123]\.\d+\.conv[12]\.weight|layer[123]\.\d+\.bn[12]\.{BN}"),
    r"resnet50_cifar": (
        rf"conv1\.weight|bn1\.{BN}|linear\.{WB}|layer[1-4]\.\d\.conv[123]\.weight|layer[1-4]\.\d\.bn[123]\.{BN}"
        rf"|layer[1-4]\.0\.shortcut\.(0\.weight|1\.{BN})"
    ),
    r"resnet(18|34)": (
        rf"conv1\.weight|bn1\.{BN}|fc\.{WB}|layer[1-4]\.\d\.conv[12]\.weight|layer[1-4]\.\d\.bn[12]\.{BN}"
        rf"|layer[234]\.0\.downsample\.(0\.weight|1\.{BN})"
    ),
    r"resnet50": (
        rf"conv1\.weight|bn1\.{BN}|fc\.{WB}|layer[1-4]\.\d\.conv[123]\.weight|layer[1-4]\.\d\.bn[123]\.{BN}"
        rf"|layer[1-4]\.0\.downsample\.(0\.weight|1\.{BN})"
    ),
    r"wrn_\d+_1": (
        rf"conv1\.weight|bn1\.{BN}|fc\.{WB}|block[123]\.layer\.\d\.conv[12]\.weight|block[123]\.layer\.\d\.bn[12]\.{BN}"
        r"|block[23]\.layer\.0\.convShortcut\.weight"
    ),
    r"wrn_\d+_2": (
        rf"conv1\.weight|bn1\.{BN}|fc\.{WB}|block[123]\.layer\.\d\.conv[12]\.weight|block[123]\.layer\.\d\.bn[12]\.{BN}"
        r"|block[123]\.layer\.0\.convShortcut\.weight"
    ),
    r"vgg\d+": rf"block[0-4]\.(0|3|6|9)\.{WB}|block[0-4]\.(1|4|7|10)\.{BN}|classifier\.{WB}",
    r"shufflenet_v1": (
        rf"conv1\.weight|bn1\.{BN}|linear\.{WB}|layer[123]\.\d\.conv[123]\.weight|layer[123]\.\d\.bn[123]\.{BN}"
    ),
    r"shufflenet_v2": (
        rf"conv[12]\.weight|bn[12]\.{BN}|linear\.{WB}|layer[123]\.0\.conv[1-5]\.weight|layer[123]\.0\.bn[1-5]\.{BN}"
        rf"|layer[123]\.[1-7]\.conv[123]\.weight|layer[123]\.[1-7]\.bn[123]\.{BN}"
    ),
    r"mobilenetv2_half": (
        rf"conv[12]\.(0\.weight|1\.{BN})|blocks\.[0-6]\.\d\.conv\.([036]\.weight|[147]\.{BN})|classifier\.0\.{WB}"
    ),
    r"mobilenetv2": (
        rf"features\.(0|18)\.(0\.weight|1\.{BN})|features\.1\.conv\.(0\.0\.weight|0\.1\.{BN}|1\.weight|2\.{BN})|classifier\.1\.{WB}"
        rf"|features\.([2-9]|1[0-7])\.conv\.([01]\.0\.weight|[01]\.1\.{BN}|2\.weight|3\.{BN})"
    ),
    r"mobilenetv1": rf"model\.0\.(0\.weight|1\.{BN})|model\.([1-9]|1[0-3])\.([03]\.weight|[14]\.{BN})|fc\.{WB}",
}

# Channels and stride of the stem, of the stages, of `intermediate` and of `penultimate`; 0 where the stride depends on the image.
MAPS = {
    r"resnet(8|14|20|32|44|56|110)(_a)?": ("16/1 16/1 32/2 64/4", "64/4", "64/4"),
    r"resnet(8|14)_tiny": ("8/1 8/1 16/2 32/4", "32/4", "32/4"),
    r"resnet(8|32)x4": ("32/1 64/1 128/2 256/4", "256/4", "256/4"),
    r"resnet(29|83)": ("16/1 32/1 64/2 128/4", "128/4", "128/4"),
    r"wrn_\d+_1": ("16/1 16/1 32/2 64/4", "64/4", "64/4"),
    r"wrn_\d+_2": ("16/1 32/1 64/2 128/4", "128/4", "128/4"),
    r"vgg\d+": ("64/1 128/2 256/4 512/8 512/0", "512/0", "512/0"),
    r"resnet50_cifar": ("64/1 256/1 512/2 1024/4 2048/8", "2048/8", "2048/8"),
    r"mobilenetv2_half": ("16/2 12/2 16/4 48/8 160/16", "80/16", "1280/16"),
    r"shufflenet_v1": ("24/1 240/2 480/4 960/8", "960/8", "960/8"),
    r"shufflenet_v2": ("24/1 116/2 232/4 464/8", "464/8", "1024/8"),
    r"resnet(18|34)": ("64/4 64/4 128/8 256/16 512/32", "512/32", "512/32"),
    r"resnet50": ("64/4 256/4 512/8 1024/16 2048/32", "2048/32", "2048/32"),
    r"mobilenetv1": ("32/2 128/4 256/8 512/16 1024/32", "1024/32", "1024/32"),
    r"mobilenetv2": ("32/2 24/4 32/8 96/16 320/32", "160/32", "1280/32"),
}

# Channels of the 3x3 convolution in the last block; depthwise ones match no template, so networks of those have no such role.
CONV3X3 = {
    r"resnet(8|14|20|32|44|56|110)(_a)?|wrn_\d+_1|resnet(29|83)": 64,
    r"resnet(8|14)_tiny": 32,
    r"resnet(8|32)x4": 256,
    r"wrn_\d+_2": 128,
    r"vgg\d+|resnet50_cifar|resnet(18|34|50)": 512,
    r"shufflenet_v\d|mobilenetv\d(_half)?": None,
}

# The two sites of the paper, as the authors have them; VGG is not among their networks.
SITES = {
    r"resnet(8|14|20|32|44|56|110|29|83)(_a|_tiny|x4)?|shufflenet_v1": ("layer3.0", "layer3"),
    r"shufflenet_v2": ("layer3.0", "relu2"),
    r"resnet50_cifar|resnet(18|34|50)": ("layer4.0", "layer4"),
    r"wrn_.*": ("block3.layer.0", "relu"),
    r"vgg8": ("relu4", "relu4"),
    r"vgg1\d": ("block4.2", "relu4"),
    r"mobilenetv2_half": ("blocks.5.0", "conv2"),
    r"mobilenetv1": ("model.12", "model"),
    r"mobilenetv2": ("features.14", "features"),
}

RESNETS = [name for name in list_models() if re.fullmatch(r"resnet.*", name)]
IMAGENET = [name for name, (num_classes, *_) in SIZES.items() if num_classes == 1000]


def of(table: dict[str, Any], name: str) -> Any:
    """The one entry of a table whose pattern is the model's name."""
    (entry,) = [value for pattern, value in table.items() if re.fullmatch(pattern, name)]
    return entry


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def images(model: nn.Module, b: int = 2, size: tuple[int, int] | None = None) -> torch.Tensor:
    d, *full = model.input_size
    return torch.randn(b, d, *(size or [min(side, 64) for side in full]))


def with_lively_bn(model: nn.Module) -> nn.Module:
    """Statistics and affine values as after training: fresh BN would hide a swapped or a missing one."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def test_every_model_is_in_these_tables():
    assert set(SIZES) == set(list_models()) == set(MODELS)
    for table in (NAMES, MAPS, CONV3X3, SITES):
        assert [name for name in list_models() if sum(bool(re.fullmatch(pattern, name)) for pattern in table) != 1] == []


@pytest.mark.parametrize("name", list_models())
def test_parameters_and_keys_are_the_published_ones(name):
    num_classes, parameters, keys = SIZES[name]
    with torch.device("meta"):
        model = create_model(name, num_classes=num_classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert len(model.state_dict()) == keys
    pattern = re.compile(of(NAMES, name))
    assert [key for key in model.state_dict() if not pattern.fullmatch(key)] == []


@pytest.mark.parametrize("name", list_models())
def test_models_say_what_they_are_for(name):
    with torch.device("meta"):
        model = create_model(name, num_classes=7)
    assert model.num_classes == 7
    assert model.input_size == ((3, 224, 224) if name in IMAGENET else (3, 32, 32))


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
def test_role_tables_hold_the_published_maps(name):
    with torch.device("meta"):
        taps = as_taps(create_model(name, num_classes=7))
    maps, intermediate, penultimate = of(MAPS, name)
    roles = ["stem", *(f"stage{i}" for i in range(1, len(maps.split())))]
    expected = dict(zip(roles, maps.split(), strict=True))
    expected |= {f"{role}.preact": value for role, value in expected.items() if role != "stem"}
    expected |= {"intermediate": intermediate, "penultimate": penultimate}
    if of(CONV3X3, name):
        for role in ("intermediate", "penultimate"):
            expected[f"{role}.conv3x3"] = f"{of(CONV3X3, name)}/{expected[role].split('/')[1]}"
    vectors = {"pooled", "logits"}
    assert {role: f"{tap.channels}/{tap.stride or 0}" for role, tap in taps.items() if role not in vectors} == expected
    assert vectors < set(taps)
    assert (taps["intermediate"].path, taps["penultimate"].path) == of(SITES, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
@pytest.mark.parametrize("size", [(32, 32), (16, 48)])
def test_taps_are_where_and_what_the_table_says(name, size):
    size = (2 * size[0], 2 * size[1]) if name in IMAGENET else size
    model = create_model(name, num_classes=7).eval()
    taps = as_taps(model)
    x = images(model, b=1, size=size)
    with torch.no_grad():
        logits, features = Taps(model, taps)(x)
    assert logits.shape == (1, 7)
    assert torch.isfinite(logits).all()
    assert torch.equal(features["logits"], logits)
    for role, tap in taps.items():
        shape = tuple(features[role].shape)
        if role in ("pooled", "logits"):
            assert (len(shape), tap.channels, tap.stride) == (2, None, None), role
        else:
            stride = tap.stride or 8
            assert shape == (1, tap.channels, size[0] // stride, size[1] // stride), role


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
def test_the_classifier_is_a_linear_layer_on_the_pooled_last_map(name):
    model = with_lively_bn(create_model(name, num_classes=5))
    taps = as_taps(model)
    _, f = probe(model, taps, images(model))
    linear = model.get_submodule(taps["pooled"].path)
    assert type(linear) is nn.Linear
    assert taps["logits"].path == taps["pooled"].path
    assert torch.allclose(f["pooled"], f["penultimate"].mean(dim=(2, 3)), rtol=1e-4, atol=1e-6)
    assert f["penultimate"].min() >= 0


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
def test_layers_can_be_grafted_at_both_sites_and_feed_the_logits(name):
    model = with_lively_bn(create_model(name, num_classes=5))
    x = images(model, b=1)
    with torch.no_grad():
        before = model(x)
        for role in ("intermediate", "penultimate"):
            layer = nn.Conv2d(model.taps[role].channels, model.taps[role].channels, 1, groups=model.taps[role].channels)
            placed = graft(model, layer, model.taps[role].path, f"kd_{role}")
            assert not torch.allclose(model(x), before), role
            placed.remove()
        assert torch.equal(model(x), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
def test_every_parameter_gets_a_gradient(name):
    # In training BN takes a bias before it away again, so that VGG's get a gradient otherwise only.
    model = create_model(name, num_classes=5).train(not name.startswith("vgg"))
    F.cross_entropy(model(images(model)), torch.tensor([1, 3])).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.slow
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
    *_, before, last = stages = [role for role in taps if re.fullmatch(r"stage\d", role)]
    for stage in stages:
        assert f[f"{stage}.preact"].min() < 0
        assert torch.equal(f[f"{stage}.preact"].relu(), f[stage])
    assert torch.equal(f["penultimate"], f[last])
    layer = model.get_submodule(f"layer{len(stages)}")
    for role, block in {"intermediate": layer[0], "penultimate": layer[-1]}.items():
        conv = model.get_submodule(taps[f"{role}.conv3x3"].path)
        assert conv is (block.conv2 if hasattr(block, "conv3") else block.conv1)
        assert conv.kernel_size == (3, 3)
    if not hasattr(layer[0], "conv3"):
        weight = layer[0].conv1.weight
        assert torch.equal(f["intermediate.conv3x3"], F.conv2d(f[before], weight, stride=2, padding=1))


@pytest.mark.parametrize("name", [name for name in list_models() if name.startswith("wrn")])
def test_wrn_stages_are_sums_and_the_next_bn_comes_before_the_activation(name):
    model = with_lively_bn(create_model(name, num_classes=5))
    _, f = probe(model, model.taps, images(model))
    norms = {"stage1": model.block2.layer[0].bn1, "stage2": model.block3.layer[0].bn1, "stage3": model.bn1}
    for stage, bn in norms.items():
        assert f[stage].min() < 0
        assert torch.equal(f[f"{stage}.preact"], bn(f[stage]))
    assert f["intermediate"].min() < 0
    assert torch.equal(f["penultimate"], f["stage3.preact"].relu())
    for role, block in {"intermediate": model.block3.layer[0], "penultimate": model.block3.layer[-1]}.items():
        assert model.get_submodule(model.taps[f"{role}.conv3x3"].path) is block.conv1


@pytest.mark.parametrize("name", [name for name in list_models() if name.startswith(("vgg", "mobilenet", "shuffle"))])
def test_other_roles_mean_what_they_say(name):
    model = with_lively_bn(create_model(name, num_classes=5))
    _, f = probe(model, model.taps, images(model))
    assert torch.equal(f["stem"], f["stem"].relu())
    for stage in [role for role in f if re.fullmatch(r"stage\d", role)]:
        preact = f[f"{stage}.preact"]
        assert preact.min() < 0
        if name.startswith("mobilenetv2"):
            assert torch.equal(preact, f[stage])
        elif name == "shufflenet_v2":
            assert torch.equal(preact.relu().unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), f[stage])
        else:
            assert torch.equal(preact.relu(), f[stage])
    assert (f["intermediate"].min() < 0) == name.startswith("mobilenetv2")


@pytest.mark.parametrize("name", ["vgg8", "vgg11"])
def test_vgg_pools_after_the_fourth_block_only_when_the_image_is_64_high(name):
    model = create_model(name, num_classes=3)
    sizes = {size: probe(model, model.taps, images(model, b=1, size=size))[1] for size in ((32, 64), (64, 64), (96, 64))}
    assert [tuple(f["stage3"].shape[2:]) for f in sizes.values()] == [(4, 8), (8, 8), (12, 8)]
    assert [tuple(f["penultimate"].shape[2:]) for f in sizes.values()] == [(4, 8), (4, 4), (12, 8)]


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
@pytest.mark.parametrize(
    "name", ["resnet14_tiny", "resnet20_a", "resnet29", "wrn_16_1", "vgg8", "shufflenet_v1", "shufflenet_v2"]
)
def test_networks_for_small_images_take_any_size_from_8_pixels_on(name, size):
    model = create_model(name, num_classes=3).eval()
    assert torch.isfinite(model(images(model, size=size))).all()


@pytest.mark.parametrize("size", [(16, 16), (33, 47), (64, 97)])
@pytest.mark.parametrize("name", ["mobilenetv2_half", "resnet18", "mobilenetv1", "mobilenetv2"])
def test_networks_that_shrink_more_take_any_size_too(name, size):
    model = create_model(name, num_classes=3).eval()
    assert model(images(model, size=size)).shape == (2, 3)


def test_resnet_tiny_has_8_8_16_32_channels():
    taps = create_model("resnet8_tiny", num_classes=3).taps
    assert [taps[role].channels for role in ("stem", "stage1", "stage2", "stage3")] == [8, 8, 16, 32]
