"""Tokens and maps with channels last: read as maps, layers put into them, places proposed, and what is said where that cannot be done."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from letkd import KDLayer
from letkd.cli.show import lines
from letkd.errors import RecipeError, TapError
from letkd.methods import letkd1
from letkd.recipes import resolve, resolve_with_sources
from letkd.taps import Tap, Taps, as_taps, graft, probe
from letkd.taps.find import find_taps
from letkd.taps.layouts import ChannelsLast, TokenFacts, Tokens, layout_of
from tests.support.pair import SIZE, a_distiller, a_teacher, images
from tests.support.tokens import ChannelsLastNet, ViT

X = torch.zeros(1, 3, *SIZE)


# ------------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize(
    ("n", "image", "given", "facts", "expected"),
    [
        (16, (16, 16), {}, {}, Tokens(0, (4, 4))),
        (17, (16, 16), {}, {}, Tokens(1, (4, 4))),
        (201, (224, 224), {}, {}, Tokens(5, (14, 14))),
        (25, (32, 48), {}, {}, Tokens(1, (4, 6))),
        (25, (48, 32), {}, {}, Tokens(1, (6, 4))),
        (15, (30, 46), {}, {}, Tokens(0, (3, 5))),  # patches of 8 that leave a rest
        (24, (30, 46), {}, {}, Tokens(0, (4, 6))),  # padded
        (25, (32, 32), {}, {"prefix": 9}, Tokens(9, (4, 4))),
        (25, (32, 32), {}, {}, Tokens(0, (5, 5))),
        (16, (32, 32), {}, {"prefix": 1}, Tokens(0, (4, 4))),  # before the class token is there
        (33, (32, 32), {}, {"prefix": 1, "patch": (8, 4)}, Tokens(1, (4, 8))),
        (16, (3, 3), {}, {}, Tokens(0, (4, 4))),  # of an image that the model itself enlarges
        (21, (16, 16), {"prefix": 5}, {"prefix": 1}, Tokens(5, (4, 4))),
        (10, (16, 16), {"grid": (2, 4)}, {}, Tokens(2, (2, 4))),
        (10, (16, 16), {"grid": (2, 4), "prefix": 1}, {}, None),
        (10, (16, 16), {"grid": (4, 4)}, {}, None),
        (12, (16, 16), {"prefix": 0}, {}, None),
        (18, (16, 16), {"prefix": 20}, {}, None),
    ],
)
def test_where_the_pixels_are_among_the_tokens(n, image, given, facts, expected):
    assert TokenFacts(**facts).place(n, image, **given) == expected


def test_a_model_says_how_many_tokens_stand_before_its_patches():
    assert TokenFacts.of(ViT(registers=4)) == TokenFacts(prefix=5)
    said = ViT()
    said.num_prefix_tokens, said.patch_size = 7, 4
    assert TokenFacts.of(said) == TokenFacts(7, (4, 4))
    assert TokenFacts.of(nn.Sequential(said)) == TokenFacts(7, (4, 4))
    configured = nn.Linear(2, 2)
    configured.config = SimpleNamespace(patch_size=[8, 4])
    assert TokenFacts.of(configured) == TokenFacts(None, (8, 4))


@pytest.mark.parametrize("layout", [Tokens(0, (2, 3)), Tokens(3, (2, 3)), ChannelsLast()])
def test_to_a_map_and_back(layout):
    f = torch.randn(2, 2, 3, 5) if isinstance(layout, ChannelsLast) else torch.randn(2, layout.prefix + 6, 5)
    x = layout.to_map(f)
    assert x.shape == (2, 5, 2, 3)
    for row in range(2):
        for column in range(3):
            token = f[:, row, column] if isinstance(layout, ChannelsLast) else f[:, layout.prefix + 3 * row + column]
            assert torch.equal(x[:, :, row, column], token)
    assert torch.equal(layout.from_map(x, f), f)
    assert layout_of(str(layout)) == layout


def test_tokens_of_larger_images_have_the_same_proportions():
    layout = Tokens(1, (2, 3))
    assert layout.to_map(torch.zeros(1, 25, 4)).shape == (1, 4, 4, 6)
    with pytest.raises(TapError, match=r"but gets 13, which do not form a grid with the same proportions"):
        layout.to_map(torch.zeros(1, 13, 4))


TAPS = {
    "a.b": Tap("a.b"),
    "fc:input": Tap("fc", io="input"),
    "blocks.11:tokens": Tap("blocks.11", layout="tokens"),
    "norm:channels-last": Tap("norm", layout="channels-last"),
    "norm:input:tokens:prefix=2:grid=14x7": Tap("norm", io="input", layout="tokens", prefix=2, grid=(14, 7)),
}


@pytest.mark.parametrize("text", TAPS)
def test_a_layout_is_written_and_read_as_text(text):
    assert Tap.of(text) == TAPS[text]
    assert str(TAPS[text]) == text


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Tap("a", layout="rows"), "has the layout 'rows'; write map, tokens or channels-last"),
        (lambda: Tap("a", prefix=1), "has a prefix or a grid, which only tokens have"),
        (lambda: Tap.of("a:grid=2x2"), "has a prefix or a grid, which only tokens have"),
        (lambda: Tap("a", layout="tokens", prefix=-1), "prefix=-1; write a number of tokens, 0 or more"),
        (lambda: as_taps(ViT(), {"x": "blocks.1:token"}), "no module 'blocks.1:token'; .*after a colon, write input, tokens"),
    ],
)
def test_taps_that_cannot_be(make, sentence):
    with pytest.raises(TapError, match=sentence):
        make()


# ------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("size", [(16, 16), (8, 24)])
def test_tokens_come_out_as_maps(size):
    net, (x, _) = ViT().eval(), images(2, size=size)
    taps = Taps(net, {"raw": Tap("blocks.1"), "map": Tap("blocks.1", layout="tokens"), "in": Tap.of("blocks.2:input:tokens")})
    _, f = taps(x)
    h, w = size[0] // 4, size[1] // 4
    assert f["map"].shape == (2, 8, h, w)
    assert torch.equal(f["map"].flatten(2).transpose(1, 2), f["raw"][:, 3:])
    assert torch.equal(f["in"], f["map"])
    assert taps.layouts == dict.fromkeys(["map", "in"], Tokens(3, (h, w)))


def test_channels_last_come_out_as_maps():
    net, (x, _) = ChannelsLastNet().eval(), images(2)
    _, f = Taps(net, {"raw": Tap("norm"), "map": Tap("norm", layout="channels-last")})(x)
    assert torch.equal(f["map"], f["raw"].permute(0, 3, 1, 2))


def test_a_map_is_handed_out_as_it_is():
    """Not a copy, not a view: what was there before layouts costs nothing more."""
    net, seen = a_teacher(), []
    net.last.register_forward_hook(lambda module, args, output: seen.append(output))
    _, f = Taps(net, {"last": Tap("last")})(images(2)[0])
    assert f["last"] is seen[0]


class Dropping(ViT):
    """Drops tokens in training, as some vision transformers do."""

    def forward(self, x):
        tokens = self.blocks(self.patches(x).flatten(2).transpose(1, 2)[:, torch.randperm(16)[: 9 if self.training else 16]])
        return self.head(tokens.mean(dim=1))


@pytest.mark.parametrize(
    ("tap", "sentence"),
    [
        ("blocks.1:tokens:prefix=40", r"has 19 tokens for images of 16x16, and prefix=40 leaves none for the patches"),
        (
            "blocks.1:tokens:prefix=2",
            r"has 19 tokens for images of 16x16, and their positions in the image cannot be inferred with prefix=2; write "
            r"blocks.1:tokens:prefix=N:grid=HxW, in Python Tap\('blocks.1', layout='tokens', prefix=N, grid=\(H, W\)\), so that "
            r"N \+ H·W = 19",
        ),
        (
            "head:tokens",
            r"the output of module 'head' of ViT is \[2, 3\], but tokens have the shape \[b n d\]; correct the layout",
        ),
        ("blocks.1:channels-last", r"is \[2, 19, 8\], but channels-last have the shape \[b h w d\]"),
    ],
)
def test_tokens_that_are_no_grid_get_a_sentence(tap, sentence):
    with pytest.raises(TapError, match=sentence) as caught:
        Taps(ViT(), {"here": Tap.of(tap)})(images(2)[0])
    assert "\n" not in str(caught.value)


def test_a_tap_that_changes_its_shape_between_batches_gets_a_sentence():
    net, (x, _) = Dropping(), images(2)
    taps = Taps(net, {"here": Tap("blocks.1")})
    net.eval()
    taps(x)
    taps(x[:1])
    taps(images(2, size=(32, 32))[0])
    net.train()
    with pytest.raises(
        TapError,
        match=r"'blocks.1' of Dropping changes its shape between batches: for images \[3, 16, 16\] it was \[16, 8\], then "
        r"\[9, 8\]; name a tap with a constant shape",
    ):
        taps(x)


# ------------------------------------------------------------------------------------------------ grafting


def a_layer(d: int, K: int = 5) -> KDLayer:
    torch.manual_seed(1)
    layer = KDLayer(d, K).double()
    nn.init.normal_(layer.bn.weight)
    nn.init.normal_(layer.bn.bias)
    return layer


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("where", ["blocks.2", "blocks", "stage2", "merge"])
def test_a_layer_among_tokens_is_the_layer_on_the_map(where, training, fused):
    """In float64: the same numbers, statistics and gradients as the map form; class and register tokens pass by."""
    torch.manual_seed(0)
    net = (ViT() if where.startswith("blocks") else ChannelsLastNet()).double()
    layout = "tokens" if where.startswith("blocks") else "channels-last"
    x = images(3)[0].double()
    taps = Taps(net, {"raw": Tap(where), "map": Tap(where, layout=layout)})
    before = taps(x)[1]
    inside, outside = a_layer(before["map"].shape[1]).train(training), a_layer(before["map"].shape[1]).train(training)
    inside.fused = fused
    graft(net, inside, after=where, name="kd", layout=taps.layouts["map"])
    output, f = Taps(net, {"raw": Tap(where), "map": Tap(where, layout=layout)})(x)
    by_map = outside(before["map"].detach())
    torch.testing.assert_close(f["map"], by_map, rtol=1e-10, atol=1e-12)
    if layout == "tokens":
        assert torch.equal(f["raw"][:, :3], before["raw"][:, :3])
    torch.testing.assert_close(inside.bn.running_var, outside.bn.running_var, rtol=1e-10, atol=1e-12)
    (f["map"] ** 2).sum().backward()
    (by_map**2).sum().backward()
    for one, two in zip(inside.parameters(), outside.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-8, atol=1e-10)
    assert torch.isfinite(output).all()


def test_a_graft_among_tokens_comes_off_and_copies_are_independent():
    net, (x, _) = ViT().eval(), images(2)
    before, keys = net(x), list(net.state_dict())
    added = graft(net, a_layer(8).float().eval(), after="blocks", name="kd", layout=Tokens(3, (4, 4)))
    assert added.path == "blocks.3.kd"
    assert [key for key in net.state_dict() if ".kd." not in key] == keys
    twin = copy.deepcopy(net)
    assert torch.equal(twin(x), net(x))
    twin.blocks[3].kd.nu.weight.data.neg_()
    patches = [Taps(one, {"f": Tap("blocks")})(x)[1]["f"][:, 3:] for one in (net, twin)]
    assert not torch.allclose(*patches)
    added.remove()
    assert torch.equal(net(x), before)


def test_a_layer_that_would_do_nothing_is_refused():
    """A network that classifies by its class token does not read the patches behind its last block."""
    for path in ("blocks.3", "blocks", "norm"):
        with pytest.raises(
            TapError, match=rf"the patch tokens at '{path}' do not reach the output of ViT, .*name an earlier block"
        ):
            a_distiller(letkd1(6), student=ViT(), student_taps={"penultimate": f"{path}:tokens"})
    for student, path in ((ViT(), "blocks.2"), (ViT(pool="mean"), "norm")):
        nn.init.zeros_(student.head.weight)  # hides nothing
        a_distiller(letkd1(6), student=student, student_taps={"penultimate": f"{path}:tokens"})


def test_images_of_other_proportions_are_refused_by_a_layer_among_tokens():
    distiller = a_distiller(letkd1(6), student=ViT(), student_taps={"penultimate": "blocks.2:tokens"})
    distiller.fit([images(6)])
    distiller(images(6, size=(32, 32)))
    with pytest.raises(TapError, match=r"built for images of 16x16, but a batch has images of 8x32"):
        distiller(images(6, size=(8, 32)))


# ------------------------------------------------------------------------------------------------ proposals


PROPOSED = {
    "class token": (
        lambda: ViT(depth=12),
        {
            "penultimate": "blocks.10:tokens",
            "intermediate": "blocks.9:tokens",
            "pooled": "head:input",
            "stage1": "blocks.2:tokens",
            "stage2": "blocks.5:tokens",
            "stage3": "blocks.8:tokens",
            "stage4": "blocks.10:tokens",
        },
    ),
    "mean": (
        lambda: ViT(pool="mean"),
        {
            "penultimate": "norm:tokens",
            "intermediate": "blocks.3:tokens",
            "pooled": "head:input",
            "stage1": "blocks.0:tokens",
            "stage2": "blocks.1:tokens",
            "stage3": "blocks.2:tokens",
            "stage4": "norm:tokens",
        },
    ),
    "backbone": (
        lambda: ViT(num_classes=0),
        {
            "penultimate": "norm:tokens",
            "intermediate": "blocks.3:tokens",
            "stage1": "blocks.0:tokens",
            "stage2": "blocks.1:tokens",
            "stage3": "blocks.2:tokens",
            "stage4": "norm:tokens",
        },
    ),
    "channels last": (
        ChannelsLastNet,
        {
            "penultimate": "norm:channels-last",
            "intermediate": "stage2.blocks.0:channels-last",
            "pooled": "head:input",
            "stage1": "stage1:channels-last",
            "stage2": "norm:channels-last",
        },
    ),
}


@pytest.mark.parametrize("name", PROPOSED)
@pytest.mark.parametrize("size", [(16, 16), (16, 32)])
def test_places_are_proposed_with_their_layout(name, size):
    make, expected = PROPOSED[name]
    torch.manual_seed(0)
    model, x = make(), torch.zeros(1, 3, *size)
    found = find_taps(model, x)
    assert {role: str(tap) for role, tap in found.items()} == expected
    _, f = probe(model, found, x)
    for role, tap in found.items():
        if role != "pooled":
            d, h, w = f[role].shape[1:]
            assert (tap.channels, tap.stride, h / w) == (d, size[0] // h, size[0] / size[1])


# ------------------------------------------------------------------------------------------------ recipes


def test_a_recipes_tap_is_a_text_or_a_table(tmp_path):
    """Both are the same recipe, and `letkd show` has a source for each."""
    named = {"data.name": "digits", "student.model": "resnet8_tiny"}
    texts = {"penultimate": "blocks.1:tokens:prefix=2:grid=4x6", "pooled": "fc:input", "stage1": "a.b"}
    tables = [
        '[student]\ntaps = {penultimate = "blocks.1:tokens:prefix=2:grid=4x6", pooled = "fc:input", stage1 = "a.b"}',
        '[student.taps]\npenultimate = {path = "blocks.1", layout = "tokens", prefix = 2, grid = [4, 6]}\n'
        'pooled = {path = "fc", io = "input"}\nstage1 = {path = "a.b"}',
    ]
    for text in tables:
        (tmp_path / "mine.toml").write_text(text)
        recipe, sources = resolve_with_sources(tmp_path / "mine.toml", overrides=named)
        assert recipe.student.taps == texts
        assert all(sources[f"student.taps.{role}"] == str(tmp_path / "mine.toml") for role in texts)
        assert 'student.taps.pooled = "fc:input"' in "\n".join(lines(recipe, sources))


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ('{path = "a", layuot = "tokens"}', r"student.taps.x has no key 'layuot' \(nearest: layout"),
        ('{layout = "tokens"}', r"student.taps.x needs a path, as in \{path = "),
        ("3", "'student.taps.x' is 3"),
    ],
)
def test_a_recipes_tap_that_cannot_be(table, sentence, tmp_path):
    (tmp_path / "mine.toml").write_text(f"[student]\ntaps = {{x = {table}}}")
    with pytest.raises(RecipeError, match=sentence):
        resolve(tmp_path / "mine.toml", overrides={"data.name": "digits", "student.model": "resnet8_tiny"})
