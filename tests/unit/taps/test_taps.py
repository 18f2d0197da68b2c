"""Reading features at named places, putting layers there, and what is said where that cannot be done."""

import copy
import io
import pickle
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from letkd.errors import TapError
from letkd.models import create_model, list_models
from letkd.taps import Tap, Taps, as_logits, as_taps, graft, probe, trace
from letkd.taps.find import find_taps
from tests.support.pair import Block, Net, a_net, images, same_state


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


class Odd(nn.Module):
    """All that a tap can trip over."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.unused = nn.Conv2d(3, 3, 1)
        self.blocks = nn.ModuleList([nn.Conv2d(3, 3, 1)])
        self.pair = Pair()
        self.named = Named()

    def forward(self, x):
        x = self.blocks[0](self.conv(self.conv(x)))
        x, _ = self.pair(x)
        return self.named(x=x).mean(dim=(2, 3))


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Named(nn.Module):
    def forward(self, *, x):
        return x


# ------------------------------------------------------------------------------------------------ taps


def test_taps_give_the_output_and_the_features_by_role():
    net, (x, _) = a_net(4, seed=0).eval(), images(2)
    taps = {"block": Tap("last.0"), "stage": Tap("last"), "pooled": Tap("fc", io="input"), "logits": Tap("fc")}
    output, f = Taps(net, taps)(x)
    block = net.last[0](net.first(x))
    assert set(f) == set(taps)
    assert torch.equal(f["block"], block)
    assert torch.equal(f["stage"], net.last[1](block))
    assert torch.equal(f["pooled"], f["stage"].mean(dim=(2, 3)))
    assert torch.equal(f["logits"], output)
    assert torch.equal(output, net(x))


def test_taps_leave_no_hook_behind_even_when_the_model_fails():
    net = Net(4)
    taps = Taps(net, {"here": Tap("last")})
    taps(images(2)[0])
    assert hooks(net) == 0
    with pytest.raises(RuntimeError):
        taps(torch.zeros(1, 99, 8, 8))
    assert hooks(net) == 0


def test_taps_carry_gradients():
    net = Net(4)
    _, f = Taps(net, {"here": Tap("last.0")})(images(2)[0])
    f["here"].sum().backward()
    assert net.first[0].weight.grad.abs().max() > 0
    assert net.fc.weight.grad is None


@pytest.mark.parametrize("make", [lambda net: Taps(net, {"here": Tap("last.2")}), lambda net: as_taps(net, {"here": "last.2"})])
def test_an_unknown_path_gets_the_nearest_names(make):
    with pytest.raises(TapError, match=r"^Net has no module 'last\.2'; nearest: last\.[01], last\.[01]"):
        make(Net(4))


@pytest.mark.parametrize(
    ("tap", "sentence"),
    [
        (
            Tap("conv"),
            r"tap 'here': the output of module 'conv' of Odd was computed twice in one forward pass; name a module that runs once",
        ),
        (
            Tap("pair"),
            r"tap 'here': the output of module 'pair' of Odd is a tuple, not a tensor; name a module inside it that returns one",
        ),
        (Tap("named", io="input"), r"tap 'here': the input of module 'named' of Odd is a NoneType, not a tensor"),
        (Tap("unused"), r"tap 'here': module 'unused' of Odd did not run in its forward pass; name a module that does"),
        (
            Tap("blocks"),
            r"module 'blocks' of Odd did not run in its forward pass; .*\(a ModuleList, for example, never runs itself\)",
        ),
    ],
)
def test_a_tap_that_cannot_be_read_says_why(tap, sentence):
    odd = Odd()
    with pytest.raises(TapError, match=sentence):
        Taps(odd, {"here": tap})(torch.zeros(1, 3, 4, 4))
    assert hooks(odd) == 0


def test_the_callers_taps_come_before_the_models_own():
    model = create_model("resnet8_tiny", num_classes=3)
    table = as_taps(model, {"penultimate": "layer2", "mine": Tap("layer1", io="input")})
    assert table["penultimate"] == Tap("layer2")
    assert table["mine"] == Tap("layer1", io="input")
    assert table["intermediate"] == model.taps["intermediate"]
    assert model.taps["penultimate"].path == "layer3"
    assert as_taps(Net(4)) == {}


@pytest.mark.parametrize("own", ["last", 3, ["last"], {"last": 3}, {0: "last"}, {"here": Tap("last"), "there": 3}])
def test_a_models_taps_with_another_meaning_are_ignored(own):
    net = Net(4)
    net.taps = own
    assert as_taps(net) == {}
    assert as_taps(net, {"mine": "last"}) == {"mine": Tap("last")}


def test_a_models_own_taps_may_be_written_as_text():
    net = Net(4)
    net.taps = {"mine": "last:input", "pooled": Tap("fc", io="input")}
    assert as_taps(net) == {"mine": Tap("last", io="input"), "pooled": Tap("fc", io="input")}


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        (
            lambda net: {"here": net.last},
            "the tap 'here' of Net is a Sequential, but must be the path of a module; write it as in",
        ),
        (lambda net: {"here": None}, "the tap 'here' of Net is a NoneType, but must be the path of a module"),
        (lambda net: {"here": Tap(net.last)}, "a tap has a Sequential as its path; write the path of a module as text"),
        (lambda net: "last", "the taps of Net were given as a str; pass a dictionary"),
        (lambda net: ["last"], "the taps of Net were given as a list; pass a dictionary"),
    ],
)
def test_wrong_taps_of_the_caller_are_told(named, sentence):
    net = Net(4)
    with pytest.raises(TapError, match=sentence) as caught:
        as_taps(net, named(net))
    assert "\n" not in str(caught.value)


def test_probe_leaves_no_trace():
    net = a_net(4, seed=0).train()
    net.last[0].bn.eval()
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    output, f = probe(net, {"here": Tap("last")}, images(2)[0])
    assert not output.requires_grad
    assert not f["here"].requires_grad
    assert same_state(net.state_dict(), before)
    assert [m.training for m in net.modules()] == modes
    assert hooks(net) == 0
    with pytest.raises(TapError, match=r"Net failed on a tensor \[1, 99, 8, 8\] with RuntimeError: "):
        probe(net, {}, torch.zeros(1, 99, 8, 8))
    assert [m.training for m in net.modules()] == modes


def test_as_logits_takes_a_tensor_or_an_answer_with_logits():
    logits = torch.zeros(2, 3)
    assert as_logits(logits, Net(4)) is logits
    assert as_logits(SimpleNamespace(logits=logits), Net(4)) is logits
    with pytest.raises(
        TapError,
        match=r"Net must return logits \[b C\], but it returned a tensor \[2, 3, 1\]; wrap it so that it returns logits",
    ):
        as_logits(torch.zeros(2, 3, 1), Net(4))
    with pytest.raises(TapError, match=r"Net must return logits \[b C\], but it returned a tuple"):
        as_logits((logits, logits), Net(4))


# ------------------------------------------------------------------------------------------------ grafts

HOSTS = pytest.mark.parametrize("after", ["last", "last.0", "last.1.bn", "fc"])


def twice(after: str) -> nn.Module:
    """A layer with a parameter that doubles what it gets."""
    d = {"fc": 3}.get(after, 8)
    layer = nn.Linear(d, d, bias=False) if after == "fc" else nn.Conv2d(d, d, 1, bias=False)
    layer.weight.data.copy_(2 * torch.eye(d).reshape(layer.weight.shape))
    return layer


@HOSTS
def test_a_graft_takes_the_modules_output_and_its_removal_restores_the_model(after):
    net, (x, _) = a_net(4, seed=0).eval(), images(2)
    keys, (_, before) = list(net.state_dict()), probe(net, {"here": Tap(after), "logits": Tap("fc")}, x)
    handle = graft(net, twice(after), after=after, name="added")
    _, f = Taps(net, {"here": Tap(after), "inside": Tap(f"{after}.added"), "logits": Tap("fc")})(x)
    torch.testing.assert_close(f["here"], 2 * before["here"])
    assert torch.equal(f["here"], f["inside"])
    assert not torch.equal(f["logits"], before["logits"])
    assert [key for key in net.state_dict() if ".added." not in key] == keys
    assert [key for key in net.state_dict() if ".added." in key] == [f"{after}.added.weight"]

    handle.remove()
    assert list(net.state_dict()) == keys
    assert hooks(net) == 0
    assert torch.equal(net(x), before["logits"])


@HOSTS
def test_a_bare_checkpoint_loads_into_a_grafted_model(after):
    bare, grafted = a_net(4, seed=1), a_net(4, seed=2)
    graft(grafted, twice(after), after=after, name="added")
    missing = grafted.load_state_dict(bare.state_dict(), strict=False)
    assert missing.missing_keys == [f"{after}.added.weight"]
    assert missing.unexpected_keys == []


@HOSTS
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_a_grafted_model_are_independent(after, way):
    net, (x, _) = a_net(4, seed=0).eval(), images(2)
    graft(net, twice(after), after=after, name="added")
    if way == "deepcopy":
        twin = copy.deepcopy(net)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(net))
    else:
        torch.save(net, stored := io.BytesIO())
        stored.seek(0)
        twin = torch.load(stored, weights_only=False)
    expected = net(x)
    assert torch.equal(twin(x), expected)
    nn.init.zeros_(twin.get_submodule(f"{after}.added").weight)
    assert torch.equal(net(x), expected)
    assert not torch.equal(twin(x), expected)


def test_two_grafts_at_one_place_run_in_turn_and_come_off_in_any_order():
    net, (x, _) = a_net(4, seed=0).eval(), images(2)
    _, before = probe(net, {"here": Tap("last.0")}, x)
    one, two = (graft(net, twice("last.0"), after="last.0", name=name) for name in ("one", "two"))
    torch.testing.assert_close(probe(net, {"here": Tap("last.0")}, x)[1]["here"], 4 * before["here"])
    one.remove()
    torch.testing.assert_close(probe(net, {"here": Tap("last.0")}, x)[1]["here"], 2 * before["here"])
    two.remove()
    assert torch.equal(probe(net, {"here": Tap("last.0")}, x)[1]["here"], before["here"])


def test_graft_says_what_is_in_the_way():
    net = Net(4)
    with pytest.raises(TapError, match=r"Net has no module 'lost'; nearest: last"):
        graft(net, nn.Identity(), after="lost")
    with pytest.raises(
        TapError, match=r"module 'last.0' of Net already has a child 'conv', such as a layer .*; choose another name"
    ):
        graft(net, nn.Identity(), after="last.0", name="conv")
    assert list(net.state_dict()) == list(Net(4).state_dict())


def test_graft_at_the_whole_model():
    net, (x, _) = a_net(4, seed=0).eval(), images(2)
    before = net(x)
    graft(net, twice("fc"), after="")
    torch.testing.assert_close(net(x), 2 * before)


# ------------------------------------------------------------------------------------------------ find_taps


def conv(d_in: int, d_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(d_in, d_out, 3, stride=stride, padding=1), nn.BatchNorm2d(d_out), nn.ReLU())


class Inverted(nn.Module):
    """A block whose parts are numbered containers themselves, as in mobile networks."""

    def __init__(self, d_in: int, d_out: int, stride: int):
        super().__init__()
        self.conv = nn.Sequential(conv(d_in, 2 * d_in), conv(2 * d_in, 2 * d_in, stride), nn.Conv2d(2 * d_in, d_out, 1))

    def forward(self, x):
        return self.conv(x)


def head(d: int) -> list[tuple[str, nn.Module]]:
    return [("pool", nn.AdaptiveAvgPool2d(1)), ("flat", nn.Flatten()), ("fc", nn.Linear(d, 3))]


def named(*parts: tuple[str, nn.Module], d: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict([*parts, *head(d)]))


HAND_MADE = {
    "plain": (lambda: Net(4), "last", "last.0"),
    "no containers": (
        lambda: named(("a", nn.Conv2d(3, 4, 3, 2)), ("b", nn.Conv2d(4, 5, 3)), ("relu", nn.ReLU()), d=5),
        "relu",
        None,
    ),
    "stages as attributes": (
        lambda: named(
            ("s1", nn.Sequential(Block(3, 4, 2), Block(4, 4, 1))), ("s2", nn.Sequential(Block(4, 6, 2), Block(6, 6, 1))), d=6
        ),
        "s2",
        "s2.0",
    ),
    "stages in a list of stages": (
        lambda: named(
            ("stages", nn.Sequential(nn.Sequential(Block(3, 4, 2)), nn.Sequential(Block(4, 6, 2), Block(6, 6, 1)))), d=6
        ),
        "stages",
        "stages.1.0",
    ),
    "one long list of mobile blocks": (
        lambda: named(
            ("features", nn.Sequential(conv(3, 4), Inverted(4, 6, 2), Inverted(6, 8, 2), Inverted(8, 8, 1), conv(8, 16))), d=16
        ),
        "features",
        "features.2",
    ),
    "a last stage of one block": (
        lambda: named(("s1", nn.Sequential(Block(3, 4, 2))), ("s2", nn.Sequential(Block(4, 6, 2))), d=6),
        "s2",
        "s2.0",
    ),
    "a layer behind the last stage": (
        lambda: named(
            ("s2", nn.Sequential(Block(3, 6, 2), Block(6, 6, 1))), ("bn", nn.BatchNorm2d(6)), ("relu", nn.ReLU()), d=6
        ),
        "relu",
        "s2.0",
    ),
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_find_taps_proposes_the_last_map_and_the_first_block_of_the_last_stage(name):
    make, penultimate, intermediate = HAND_MADE[name]
    model, x = make(), images(2)[0]
    before = copy.deepcopy(model.state_dict())
    found = find_taps(model, x)
    assert {role: tap.path for role, tap in found.items() if role in ("penultimate", "intermediate")} == {
        role: path for role, path in [("penultimate", penultimate), ("intermediate", intermediate)] if path
    }
    assert found.pop("pooled") == Tap("fc", io="input")
    _, f = probe(model, found, x)
    for role, tap in found.items():
        assert (tap.channels, tap.stride) == (f[role].shape[1], 16 // f[role].shape[2])
    assert hooks(model) == 0
    assert same_state(model.state_dict(), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
def test_find_taps_agrees_with_the_zoos_own_table(name):
    model = create_model(name, num_classes=3)
    found = find_taps(model, torch.zeros(1, *model.input_size))
    expected = {role: model.taps[role] for role in ("penultimate", "intermediate")}
    if name.startswith("vgg"):  # the stride there depends on the image
        expected = {role: Tap(tap.path, 512, 8) for role, tap in expected.items()}
    if name == "vgg8":  # its last stage is one convolution, so both sites would be the same
        del expected["intermediate"]
    if name == "mobilenetv2_half":  # with two rows of blocks of the last size, the rows are taken for the blocks
        expected["intermediate"] = Tap("blocks.5", 80, 16)
    assert {role: tap for role, tap in found.items() if role in ("penultimate", "intermediate")} == expected
    assert found["pooled"] == model.taps["pooled"]


STAGES_OF_THEIR_OWN = (
    "vgg",
    "wrn",
    "shufflenet_v2",
    "mobilenet",
)  # the table has another map of the last size, or another first one


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in list_models() if not name.startswith(STAGES_OF_THEIR_OWN)])
def test_find_taps_finds_the_stages_of_the_zoo(name):
    model = create_model(name, num_classes=3)
    found = find_taps(model, torch.zeros(1, *model.input_size))
    stages = {role: tap for role, tap in model.taps.items() if role.startswith("stage") and role[5:].isdigit()}
    assert {role: tap for role, tap in found.items() if role.startswith("stage")} == stages


class Position(nn.Module):
    """A table that looks like a map and knows nothing of the image, as the relative positions of Swin."""

    def __init__(self, d: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, d, 4, 4))

    def forward(self, x):
        return self.table.expand(len(x), -1, -1, -1)


class Sides(nn.Module):
    """A network with maps after its last one that lead nowhere, or come from nowhere."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = conv(3, 4, 4), nn.Linear(4, 3)
        self.unread, self.cut, self.position = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), Position(4)
        nn.init.zeros_(self.fc.weight)  # hides nothing

    def forward(self, x):
        f = self.body(x)
        self.unread(f)
        return self.fc((f + self.cut(f).detach() + self.position(f)).mean(dim=(2, 3)))


def test_places_that_do_not_depend_on_the_image_or_do_not_reach_the_logits_are_not_proposed():
    model, x = Sides().requires_grad_(True), torch.zeros(1, 3, 16, 16)
    model.fc.bias.requires_grad_(False)
    live = {item.path: item.live for item in trace(model, x)}
    assert [path for path, is_live in live.items() if not is_live] == ["unread", "cut", "position"]
    assert find_taps(model, x)["penultimate"].path == "body"
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["fc.bias"]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert hooks(model) == 0


def test_a_tap_is_written_and_read_as_text():
    for tap in (Tap("a.b"), Tap("fc", io="input")):
        assert Tap.of(str(tap)) == tap
    assert as_taps(Net(4), {"pooled": "fc:input"}) == {"pooled": Tap("fc", io="input")}


def test_find_taps_of_a_model_without_maps():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(TapError, match=r"Sequential has no map \[b d h w\], no tokens .* name the taps yourself"):
        find_taps(model, torch.zeros(1, 3, 2, 2))


def test_what_a_later_module_overwrites_is_read_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
    x = torch.randn(2, 3, 8, 8)
    model.eval()
    before = model[1](model[0](x)).detach()
    taps = Taps(model, {"preact": Tap("2", io="input"), "bn": Tap("1"), "act": Tap("2")})
    seen: dict[str, torch.Tensor] = {}
    for _ in range(2):
        seen = taps(x)[1]
        assert torch.equal(seen["preact"], before)
        assert torch.equal(seen["bn"], before)
        assert torch.equal(seen["act"], before.relu())
    with torch.inference_mode():
        assert torch.equal(taps(x)[1]["act"], before.relu())
    seen["preact"].sum().backward()
    assert model[0].weight.grad is not None


def test_trace_says_what_every_module_gave_and_how_often():
    odd = Odd()
    odd.again = odd.unused
    ran = {item.path: item for item in trace(odd, torch.zeros(1, 3, 4, 4))}
    assert [item for item, _ in odd.named_modules()] == list(ran)
    assert ran["conv"].shapes == ((1, 3, 4, 4),) * 2
    assert ran["pair"].shapes == ("tuple",)
    assert ran[""].shapes == ((1, 3),)
    assert (ran["unused"].shapes, ran["unused"].order, ran["unused"].names) == ((), -1, ("again",))
    done = sorted((item for item in ran.values() if item.shapes), key=lambda item: item.order)
    assert [item.path for item in done] == ["conv", "blocks.0", "pair", "named", ""]
    assert hooks(odd) == 0


class Centred(nn.Module):
    """Overwrites its input, as networks that normalise it themselves may do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        x -= 0.5
        return self.conv(x).mean(dim=(2, 3))


@pytest.mark.parametrize("train", [True, False])
def test_images_stay_as_they_are_if_a_model_overwrites_its_input(train):
    model, x = Centred().train(train), torch.rand(2, 3, 8, 8)
    before, expected = x.clone(), model(x.clone())
    taps = Taps(model, {"map": Tap("conv")})
    for _ in range(3):
        assert torch.equal(taps(x)[0], expected)
        assert torch.equal(x, before)


def test_what_is_overwritten_in_training_alone_costs_a_pass_that_is_undone():
    """Otherwise BN would count the batch twice, and dropout would draw twice: a resumed run would differ."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5, inplace=True))
    taps, x = Taps(model, {"bn": Tap("1")}), torch.randn(2, 3, 8, 8)
    model.eval()
    taps(x)
    model.train()
    twin = copy.deepcopy(model)
    for steps in (1, 2):
        torch.manual_seed(steps)
        expected = twin(x)
        torch.manual_seed(steps)
        output, seen = taps(x)
        assert model[1].num_batches_tracked == steps
        assert torch.equal(output, expected)
        assert same_state(model.state_dict(), twin.state_dict())
        assert (seen["bn"] == 0).sum() == 0


class Merging(nn.Linear):
    """Merges in eval mode and splits in training mode, like layers of LoRA."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_modes_are_restored_by_the_modules_own_train():
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            return self.get_submodule("0").eval() and self

    model = Frozen(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12)), Merging(12, 3))
    model.train()
    model.get_submodule("0.1").train()
    probe(model, {"x": Tap("1", io="input")}, torch.randn(2, 3, 2, 2))
    assert not model.get_submodule("1").merged
    modes = {path: module.training for path, module in model.named_modules()}
    assert modes == {"": True, "0": False, "0.0": False, "0.1": True, "1": True}
