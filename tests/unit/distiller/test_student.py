"""A student file opens to the same network, whatever a method changed in it; and a hostile one to an error, not to code or memory."""

import copy
import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from letkd import KDLayer
from letkd.distiller import Distiller
from letkd.distiller import student as student_file
from letkd.distiller.student import LAYERS, load_student, read_header, save_student
from letkd.errors import CheckpointError, TapError
from letkd.layer.folded import FoldedKDLayer, fold_student
from letkd.methods import LetKD, Site, letkd1, letkd2
from letkd.methods.simkd import FrozenLinear, Projector, SimKD
from letkd.models import create_model, list_models
from letkd.supervision import KMeansSupervision
from letkd.taps import Tap, Taps, replace_module
from tests.support.pair import Net, a_net, images, same_state

X = images(2, size=(32, 32), seed=5)[0]
SMALL_MAPS = {"penultimate": "last", "pooled": Tap("fc", io="input")}


def lively(student: nn.Module) -> nn.Module:
    """As after training: no value is what a fresh network would have."""
    torch.manual_seed(7)
    for name, tensor in student.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.1 if name.endswith("var") else 0.3 * torch.randn_like(tensor))
    return student.eval()


def distilled(method, teacher: nn.Module | None = None, **options) -> nn.Module:
    student = create_model("resnet8_tiny", num_classes=3)
    return lively(Distiller(student, teacher or create_model("resnet14", num_classes=3), method, **options).export())


def sites(role: str, **settings) -> LetKD:
    return LetKD([Site(role, KMeansSupervision(4), **settings)])


STUDENTS = {
    "nothing": lambda: lively(create_model("resnet8_tiny", num_classes=3)),
    "letkd-1": lambda: distilled(letkd1(6)),
    "letkd-2": lambda: distilled(letkd2(6, 2, alpha_penult=0.25, alpha_inter=0.5)),
    "letkd, settings": lambda: distilled(sites("penultimate", alpha=-2.0, scale_omega=7.0, normalize_value_input=False)),
    "letkd behind a module with a hook": lambda: distilled(sites("stem")),
    "two behind one module": lambda: distilled(
        LetKD([Site("again", KMeansSupervision(5)), Site("penultimate", KMeansSupervision(6))]),
        student_taps={"again": "layer3"},
        teacher_taps={"again": "layer3"},
    ),
    "letkd-2, folded": lambda: lively(fold_student(distilled(letkd2(6, 2)))),
    "simkd": lambda: distilled(SimKD(), create_model("resnet14_tiny", num_classes=3)),
    "simkd, other classifier": lambda: distilled(SimKD(4)),
    "simkd, pooling": lambda: distilled(SimKD(), Net(5, stride=4), teacher_taps=SMALL_MAPS),
    "simkd and letkd": lambda: distilled([letkd1(6), SimKD()]),
}


def kinds(student: nn.Module) -> dict[str, type]:
    return {path: type(module) for path, module in student.named_modules()}


@pytest.mark.parametrize("name", STUDENTS)
def test_a_student_comes_back_as_it_was(name, tmp_path):
    student = STUDENTS[name]()
    save_student(student, tmp_path / "s.safetensors", model="resnet8_tiny", num_classes=3)
    loaded = load_student(tmp_path / "s.safetensors")
    assert kinds(loaded) == kinds(student)
    assert same_state(loaded.state_dict(), student.state_dict())
    assert not any(module.training for module in loaded.modules())
    with torch.no_grad():
        assert torch.equal(loaded(X), student(X))
        assert not torch.equal(loaded(X), STUDENTS["nothing"]()(X)) or name == "nothing"
    trained = [{key for key, p in net.named_parameters() if p.requires_grad} for net in (student, loaded)]
    assert trained[0] == trained[1]
    save_student(loaded, tmp_path / "again.safetensors", model="resnet8_tiny", num_classes=3)
    assert read_header(tmp_path / "again.safetensors") == read_header(tmp_path / "s.safetensors")


def test_these_students_hold_every_layer_that_a_file_can_name():
    used = {kind for make in STUDENTS.values() for kind in kinds(make()).values()}
    assert set(LAYERS.values()) <= used
    simkd = kinds(STUDENTS["simkd, other classifier"]())
    assert (simkd["layer3.kd_projector"], simkd["fc"]) == (Projector, FrozenLinear)
    assert (
        STUDENTS["simkd, other classifier"]().fc.in_features == 64 != create_model("resnet8_tiny", num_classes=3).fc.in_features
    )
    assert STUDENTS["simkd, pooling"]().layer3.kd_projector.size == (4, 4)


@pytest.mark.parametrize("cls", LAYERS.values())
def test_a_layers_settings_make_it_again(cls):
    layer = {
        KDLayer: lambda: KDLayer(3, 5, alpha=0.5, normalize_value_input=False),
        FoldedKDLayer: lambda: FoldedKDLayer(3, 5, normalize_value_input=False),
        Projector: lambda: Projector(3, 8, f=4, size=(2, 5)),
        FrozenLinear: lambda: FrozenLinear(3, 5, bias=False),
    }[cls]()
    again = cls(**layer.settings())
    assert again.settings() == layer.settings()
    again.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3) if cls is FrozenLinear else torch.randn(2, 3, 6, 6)
    assert torch.equal(again.eval()(x), layer.eval()(x))


def test_facts_travel_and_cannot_overrule_the_header(tmp_path):
    path = tmp_path / "s.safetensors"
    save_student(STUDENTS["nothing"](), path, model="resnet8_tiny", num_classes=3, note=[0.5], changes="none", format="x")
    header = read_header(path)
    assert (header["note"], header["changes"], header["model"], header["num_classes"]) == ([0.5], [], "resnet8_tiny", 3)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("mean", [0.5]),
        ("std", [1, 1, 0]),
        ("std", ["1", 1, 1]),
        ("classes", ["a"]),
        ("size", [32]),
        ("size", [10**6, 2]),
        ("resize", -1),
    ],
)
def test_a_student_is_not_written_with_facts_that_could_not_be_read(fact, value, tmp_path):
    path = tmp_path / "s.safetensors"
    with pytest.raises(CheckpointError, match=f"s.safetensors was not written: invalid value at {fact}"):
        save_student(STUDENTS["nothing"](), path, model="resnet8_tiny", num_classes=3, **{fact: value})
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
def test_every_zoo_network_can_be_sized_without_memory(name):
    with torch.device("meta"):
        model = create_model(name, num_classes=1_000_000)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


# ------------------------------------------------------------------------------------------------ networks of one's own

OWN = """
from pathlib import Path
from torch import nn
from letkd import KDLayer
Path({touched!r}).touch()
def small(num_classes):
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU())
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
def with_layer(num_classes):
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), KDLayer(8, 4, alpha=0.5))
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
"""


@pytest.fixture
def own(tmp_path) -> Path:
    (tmp_path / "nets.py").write_text(OWN.format(touched=str(tmp_path / "touched")))
    return tmp_path / "nets.py"


@pytest.mark.parametrize("method", [None, SimKD])
def test_a_network_of_ones_own_opens_where_the_caller_names_it(own, method, tmp_path):
    model, path = f"{own}:small", tmp_path / "s.safetensors"
    student = create_model(model, num_classes=3)
    if method is not None:
        taps = {"penultimate": "0", "pooled": Tap("3", io="input")}
        options = {"student_taps": taps, "example": torch.zeros(1, 3, 32, 32)}
        student = Distiller(student, create_model("resnet8_tiny", num_classes=3), method(), **options).export()
    save_student(lively(student), path, model=model, num_classes=3)
    (tmp_path / "touched").unlink()
    own.write_text(own.read_text() + "\n# edited, so that it would be read anew\n")
    with pytest.raises(CheckpointError, match=r"nets.py:small', which is not in the zoo, .*`model='.*small'`"):
        load_student(path)
    assert not (tmp_path / "touched").exists()
    loaded = load_student(path, model=model)
    with torch.no_grad():
        assert torch.equal(loaded(X), student(X))


def test_a_network_that_came_with_a_layer_gets_no_second_one(own, tmp_path):
    student = lively(create_model(f"{own}:with_layer", num_classes=3))
    save_student(student, tmp_path / "s.safetensors", model="own", num_classes=3)
    loaded = load_student(tmp_path / "s.safetensors", model=f"{own}:with_layer")
    with torch.no_grad():
        assert torch.equal(loaded(X), student(X))


def test_the_callers_network_is_not_filled_with_weights_of_another(tmp_path):
    save_student(STUDENTS["nothing"](), tmp_path / "s.safetensors", model="resnet8_tiny", num_classes=3)
    with pytest.raises(CheckpointError, match="contains 'resnet8_tiny', not 'resnet8'; name another file, or this network"):
        load_student(tmp_path / "s.safetensors", model="resnet8")


# ------------------------------------------------------------------------------------------------ hostile files


@pytest.fixture(scope="module")
def files() -> dict[str, tuple[dict, dict]]:
    """Tensors and header of an honest file for two of the students."""
    found = {}
    for name in ("letkd-1", "simkd, other classifier"):
        student = STUDENTS[name]()
        header = {"format": student_file.FORMAT, "model": "resnet8_tiny", "num_classes": 3}
        found[name] = (student.state_dict(), {**header, "changes": student_file._changes(student)})
    return found


def forged(path: Path, tensors: dict, header: str | None) -> Path:
    metadata = {"format": "pt"} if header is None else {"format": "pt", "letkd": header}
    safetensors.torch.save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata=metadata)
    return path


def refused(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        load_student(path)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    text.encode()


def test_the_files_are_honest_before_they_are_forged(files, tmp_path):
    for tensors, header in files.values():
        load_student(forged(tmp_path / "s.safetensors", tensors, json.dumps(header)))


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "null",
        "3",
        "[]",
        "{}",
        "no json",
        "[" * 100_000,
        '{"format": ' * 5000,
        '{"format": "letkd-student-1"}',
        '"\\ud800"',
    ],
)
def test_a_file_without_our_header(files, header, tmp_path):
    tensors, _ = files["letkd-1"]
    refused(forged(tmp_path / "s.safetensors", tensors, header), "s.safetensors is not a student file")


def test_what_is_no_safetensors_file(tmp_path):
    refused(tmp_path / "missing.safetensors", "missing.safetensors is not a student file: ")
    (tmp_path / "s.safetensors").write_bytes(b"\x80\x02cos\nsystem\n")
    refused(tmp_path / "s.safetensors", "s.safetensors is not a student file: ")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("model", "os:abort", "'os:abort', which is not in the zoo, and code is not run only because a file names it"),
        ("model", "evil.py:run", "not in the zoo"),
        ("model", "resnet9000", "not in the zoo"),
        ("model", "line\nbreak", "not in the zoo"),
        ("model", "\ud800", "wrong at model"),
        ("model", 3, "wrong at model"),
        ("model", "", "wrong at model"),
        ("model", "x" * 10_000, "wrong at model"),
        ("model", ["resnet8"], "wrong at model"),
        ("num_classes", None, "wrong at num_classes"),
        ("num_classes", True, "wrong at num_classes"),
        ("num_classes", 0, "wrong at num_classes"),
        ("num_classes", -1, "wrong at num_classes"),
        ("num_classes", 3.0, "wrong at num_classes"),
        ("num_classes", "3", "wrong at num_classes"),
        ("num_classes", 10**12, "wrong at num_classes"),
        (
            "num_classes",
            1_000_000,
            r"does not fit its network and layers: 'fc.weight' is \[3, 32\] but should be \[1000000, 32\]",
        ),
        ("num_classes", 4, r"'fc.weight' is \[3, 32\] but should be \[4, 32\]"),
        ("changes", None, "wrong at changes"),
        ("changes", {}, "wrong at changes"),
        ("changes", [3], r"wrong at changes\[0\]"),
        ("changes", [{}], r"wrong at changes\[0\]"),
        ("changes", [None] * 9, r"wrong at changes\[0\], .*changes\[3\] and 5 more; get it again"),
    ],
)
def test_a_wrong_header(files, key, value, match, tmp_path):
    tensors, header = files["letkd-1"]
    refused(forged(tmp_path / "s.safetensors", tensors, json.dumps({**header, key: value})), match)


LAYER = r"wrong at changes\[0\]; get it again"
INSIDE = r"wrong at changes\[0\]\.KDLayer\."


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layer": "Conv2d"}, LAYER),
        ({"layer": "os.system"}, LAYER),
        ({"layer": "__class__"}, LAYER),
        ({"layer": None}, LAYER),
        ({"layer": ["KDLayer"]}, LAYER),
        ({"layer": "Projector"}, r"changes\[0\]\.Projector\.settings\.d_S, .*d_T"),
        ({"more": 1}, f"{INSIDE}more"),
        ({"at": 3}, f"{INSIDE}at"),
        ({"at": ""}, f"{INSIDE}at"),
        ({"at": "layer3."}, f"{INSIDE}at"),
        ({"at": "layer3..kd"}, f"{INSIDE}at"),
        ({"at": "layer9.kd_penultimate"}, "'layer9.kd_penultimate.omega.weight' is missing"),
        ({"at": "\ud800.x"}, f"{INSIDE}at"),
        ({"at": "a\n.x"}, r"is missing but should be"),
        ({"settings": None}, f"{INSIDE}settings"),
        ({"settings": []}, f"{INSIDE}settings"),
        ({"settings": {"d": 32}}, f"{INSIDE}settings.K"),
        ({"settings": {"d": 32, "K": 6, "forward": 1}}, f"{INSIDE}settings.forward"),
    ],
)
def test_a_wrong_change(files, change, match, tmp_path):
    tensors, header = files["letkd-1"]
    header = {**header, "changes": [{**header["changes"][0], **change}]}
    refused(forged(tmp_path / "s.safetensors", tensors, json.dumps(header)), match)


@pytest.mark.parametrize("key", ["d", "K"])
@pytest.mark.parametrize("value", [0, -6, True, None, 6.0, "6", [6], 10**9, 10**400])
def test_sizes_that_are_none(files, key, value, tmp_path):
    tensors, header = files["letkd-1"]
    header = copy.deepcopy(header)
    header["changes"][0]["settings"][key] = value
    refused(
        forged(tmp_path / "s.safetensors", tensors, json.dumps(header)),
        rf"changes\[0\]\.KDLayer\.settings\.{key}; get it again",
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, None, "1", True])
def test_an_alpha_that_is_none(files, value, tmp_path):
    tensors, header = files["letkd-1"]
    header = copy.deepcopy(header)
    header["changes"][0]["settings"]["alpha"] = value
    refused(
        forged(tmp_path / "s.safetensors", tensors, json.dumps(header)), r"changes\[0\]\.KDLayer\.settings\.alpha; get it again"
    )


@pytest.mark.parametrize(
    ("layer", "key", "value", "match"),
    [
        ("Projector", "size", [0, 4], r"settings\.size"),
        ("Projector", "size", [4], r"settings\.size"),
        ("Projector", "size", [4, 4, 4], r"settings\.size"),
        ("Projector", "size", [4, "4"], r"settings\.size"),
        ("Projector", "size", 4, r"settings\.size"),
        ("Projector", "f", 0, r"settings\.f"),
        ("Projector", "f", 65, "f must be from 1 to 64"),
        ("Projector", "f", 2, r"transfer.0.weight' is \[16, 32, 1, 1\] but should be \[32, 32, 1, 1\]"),
        ("Projector", "d_S", 10**6, r"should be \[16, 1000000, 1, 1\]"),
        ("Projector", "d_T", 10**6, r"should be \[250000, 32, 1, 1\]"),
        ("FrozenLinear", "bias", 1, r"settings\.bias"),
        ("FrozenLinear", "in_features", 10**6, r"'fc.weight' is \[3, 64\] but should be \[3, 1000000\]"),
        ("FrozenLinear", "out_features", 10**6, r"should be \[1000000, 64\]"),
    ],
)
def test_wrong_settings_of_simkds_layers(files, layer, key, value, match, tmp_path):
    tensors, header = files["simkd, other classifier"]
    header = copy.deepcopy(header)
    next(change for change in header["changes"] if change["layer"] == layer)["settings"][key] = value
    refused(forged(tmp_path / "s.safetensors", tensors, json.dumps(header)), match)


def test_sizes_are_compared_with_the_tensors_before_memory_is_taken(files, own, tmp_path):
    tensors, header = files["letkd-1"]
    header = copy.deepcopy(header)
    header["changes"][0]["settings"] |= {"d": 10**6, "K": 10**6}  # 8 TB
    refused(forged(tmp_path / "s.safetensors", tensors, json.dumps(header)), r"should be \[1000000, 1000000, 1, 1\]")
    tensors, changes = create_model(f"{own}:small", num_classes=3).state_dict(), header["changes"]
    path = forged(tmp_path / "own.safetensors", tensors, json.dumps({**header, "changes": [{**changes[0], "at": "0.kd"}]}))
    with pytest.raises(CheckpointError, match=r"'0.kd.omega.weight' is missing but should be \[1000000, 1000000, 1, 1\]"):
        load_student(path, model=f"{own}:small")


def test_a_layer_where_none_can_be(files, tmp_path):
    tensors, header = files["letkd-1"]
    (change,) = header["changes"]
    of = {key: value for key, value in tensors.items() if ".kd_penultimate." in key}

    def elsewhere(at: str) -> Path:
        moved = {key.replace("layer3.kd_penultimate", at): value.clone() for key, value in of.items()}
        changes = json.dumps({**header, "changes": [{**change, "at": at}]})
        return forged(tmp_path / "s.safetensors", {**tensors, **moved}, changes)

    refused(elsewhere("layer9.kd"), "does not fit its network and layers: ResNet has no module 'layer9'; nearest: ")
    refused(elsewhere("layer3.forward"), "module 'layer3' of ResNet already has a child 'forward'")
    refused(elsewhere("layer3.0"), "module 'layer3' of ResNet already has a child '0'")
    refused(elsewhere("layer2.kd"), "does not fit ResNet: .*unexpected keys|missing keys")


def test_a_classifier_where_none_is(files, tmp_path):
    tensors, header = files["simkd, other classifier"]
    header = copy.deepcopy(header)
    change = next(change for change in header["changes"] if change["layer"] == "FrozenLinear")
    for at, match in (("layer1", "'layer1' is not an nn.Linear"), ("head", "ResNet has no module 'head'")):
        change["at"] = at
        forged_one = {**tensors, f"{at}.weight": tensors["fc.weight"].clone(), f"{at}.bias": tensors["fc.bias"].clone()}
        refused(
            forged(tmp_path / "s.safetensors", forged_one, json.dumps(header)), f"does not fit its network and layers: {match}"
        )


def test_the_same_change_twice(files, tmp_path):
    tensors, header = files["letkd-1"]
    header = {**header, "changes": header["changes"] * 2}
    refused(forged(tmp_path / "s.safetensors", tensors, json.dumps(header)), "already has a child 'kd_penultimate'")


@pytest.mark.parametrize("name", ["letkd-1", "simkd, other classifier"])
def test_tensors_without_their_change(files, name, tmp_path):
    tensors, header = files[name]
    with pytest.raises(CheckpointError):
        load_student(forged(tmp_path / "s.safetensors", tensors, json.dumps({**header, "changes": []})))


# ------------------------------------------------------------------------------------------------ replacing a module


@pytest.mark.parametrize("path", ["fc", "last.0", "last.1.bn"])
def test_a_replacement_stands_in_the_same_place_and_its_removal_restores_the_model(path):
    net, x = a_net(4, seed=0).eval(), images(2)[0]
    old, keys, expected = net.get_submodule(path), list(net.state_dict()), net(x)
    new = copy.deepcopy(old)
    for parameter in new.parameters():
        nn.init.normal_(parameter)
    handle = replace_module(net, path, new)
    assert net.get_submodule(path) is new
    assert list(net.state_dict()) == keys
    output, features = Taps(net, {"here": Tap(path)})(x)
    assert not torch.equal(output, expected)
    assert "here" in features
    handle.remove()
    assert net.get_submodule(path) is old
    assert list(net.state_dict()) == keys
    assert torch.equal(net(x), expected)


def test_a_module_that_cannot_be_replaced():
    net = a_net(4, seed=0)
    with pytest.raises(TapError, match="Net has no module 'head'; nearest: "):
        replace_module(net, "head", nn.Identity())
    with pytest.raises(TapError, match="module '' of Net is the model itself, so it cannot be replaced"):
        replace_module(net, "", nn.Identity())
    net.head = net.fc
    with pytest.raises(TapError, match=r"module 'fc' of Net has several names \(fc, head\), so it cannot be replaced"):
        replace_module(net, "fc", nn.Identity())
    assert net.fc is net.head
