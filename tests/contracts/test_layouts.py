"""Networks of tokens and with channels last, as teacher and as student: one step, resume, export and the student file for each method."""

import copy
import io

import pytest
import torch
from torch import nn

from letkd.data import Loader, Split
from letkd.deploy.export import as_onnx, as_program, trace
from letkd.distiller import Distiller
from letkd.distiller.cache import TeacherCache
from letkd.distiller.facts import Facts
from letkd.distiller.student import load_student, read_header, save_student
from letkd.errors import TapError, UnsupportedPair
from letkd.layer.folded import fold_student
from letkd.methods import AT, CRD, KD, SP, VID, FitNet, LetKD, Site, letkd1, letkd2, quest
from letkd.models import save_weights
from letkd.supervision import KMeansSupervision
from letkd.taps.find import find_taps
from tests.support.pair import SIZE, TAPS, C, Net, a_net, a_stream, images, same_state, steps
from tests.support.tokens import ChannelsLastNet, ViT

EXAMPLE = torch.zeros(1, 3, *SIZE)
METHODS = {
    "letkd-1": lambda: letkd1(6),
    "letkd-2": lambda: letkd2(6, 2),
    "quest": lambda: quest(6),
    "fitnet": lambda: FitNet("penultimate"),
    "kd": KD,
    "crd": lambda: CRD(K=4, feat_dim=6),
}
NETWORKS = {
    "class token": lambda num_classes=C: ViT(num_classes=num_classes),
    "mean of patches": lambda num_classes=C: ViT(pool="mean", registers=0, num_classes=num_classes),
    "channels last": lambda num_classes=C: ChannelsLastNet(num_classes=num_classes),
}


def class_token(num_classes):
    return NETWORKS["class token"](num_classes)


def channels_last(num_classes):
    return NETWORKS["channels last"](num_classes)


def a_pair(name: str, role: str, method: str, **options) -> Distiller:
    torch.manual_seed(0)
    network, cnn = NETWORKS[name](), a_net(4, seed=1)
    taps = {"token": find_taps(network, EXAMPLE), "cnn": TAPS}
    pair = (network, cnn) if role == "student" else (cnn, network)
    kinds = ("token", "cnn") if role == "student" else ("cnn", "token")
    given = {"student_taps": taps[kinds[0]], "teacher_taps": taps[kinds[1]], "example": EXAMPLE, **options}
    return Distiller(*pair, METHODS[method](), **given)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("role", ["teacher", "student"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_resume_and_export(name, role, method):
    stream = a_stream()
    whole = a_pair(name, role, method).fit(stream).train()
    before = copy.deepcopy(whole.teacher.state_dict())
    optimizer = torch.optim.SGD((p for p in whole.parameters() if p.requires_grad), lr=0.05, momentum=0.9)
    steps(whole, stream[:1], optimizer)
    held = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    losses = steps(whole, stream[1:], optimizer)
    again = a_pair(name, role, method).train()
    again.load_state_dict(held[0])
    resumed = torch.optim.SGD((p for p in again.parameters() if p.requires_grad), lr=0.05, momentum=0.9)
    resumed.load_state_dict(held[1])
    assert steps(again, stream[1:], resumed) == losses
    assert same_state(whole.state_dict(), again.state_dict())
    assert same_state(whole.teacher.state_dict(), before)
    unmoved = [key for key, p in whole.named_parameters() if p.requires_grad and p.grad is None]
    assert not [key for key in unmoved if ".kd_" in key]
    student = whole.export()
    with torch.no_grad():
        torch.testing.assert_close(student(stream[0].x), whole.student.eval()(stream[0].x), rtol=1e-4, atol=1e-5)


def trained(name: str) -> nn.Module:
    stream = a_stream()
    distiller = a_pair(name, "student", "letkd-2").fit(stream).train()
    steps(distiller, stream, torch.optim.SGD(distiller.parameters(), lr=0.05))
    return distiller.export()


@pytest.mark.slow
@pytest.mark.parametrize("make", [class_token, channels_last])
def test_the_student_ships_with_its_layers(make, tmp_path):
    student, (x, _) = trained(make.__name__.replace("_", " ")), images(5, seed=3)
    model, path = f"{__name__}:{make.__name__}", tmp_path / "s.safetensors"
    with torch.no_grad():
        logits = student(x)
        for sent in (student, fold_student(student)):
            save_student(sent, path, model=model, num_classes=C)
            loaded = load_student(path, model=model)
            assert torch.equal(loaded(x), sent(x))
            torch.testing.assert_close(loaded(x), logits, rtol=1e-4, atol=1e-5)
    said = {change.get("layout") for change in read_header(path)["changes"]}
    assert said == ({"tokens:prefix=3:grid=4x4"} if make is class_token else {"channels-last"})
    traced = trace(fold_student(student), Facts(num_classes=C, size=SIZE))
    program = torch.export.load(io.BytesIO(as_program(traced))).module()
    torch.testing.assert_close(program(x), logits, rtol=1e-4, atol=1e-5)
    import onnxruntime

    session = onnxruntime.InferenceSession(as_onnx(traced))
    (by_onnx,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.tensor(by_onnx), logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layout", ["tokens:prefix=-1:grid=4x4", "rows", "tokens:prefix=1:grid=0x4", "tokens"])
def test_a_student_file_with_another_layout_is_refused(layout, tmp_path):
    import json

    import safetensors.torch

    from letkd.errors import CheckpointError
    from letkd.models.weights import as_safetensors

    path = tmp_path / "s.safetensors"
    save_student(trained("class token"), path, model=f"{__name__}:class_token", num_classes=C)
    header = read_header(path)
    header["changes"][0]["layout"] = layout
    path.write_bytes(as_safetensors(safetensors.torch.load_file(path), {"letkd": json.dumps(header)}))
    with pytest.raises(CheckpointError, match="layout"):
        load_student(path, model=f"{__name__}:class_token")


# ------------------------------------------------------------------------------------------------ fits, caches, grids


def test_fits_and_caches_know_the_layout_and_the_match(tmp_path):
    """Another prefix, another match: fitted again, kept beside."""
    stream, teacher = a_stream(), ViT(registers=2)

    def fitted(tap: str, match: str = "resize", d: int = 4) -> Distiller:
        method = LetKD([Site("penultimate", KMeansSupervision(6), match=match)])
        taps = {"student_taps": TAPS, "teacher_taps": {"penultimate": tap}, "example": EXAMPLE}
        return Distiller(a_net(4, seed=d), teacher, method, **taps).fit(stream, folder=tmp_path, data="noise")

    def files() -> int:
        return len(list(tmp_path.glob("*.safetensors")))

    fitted("blocks.2:tokens")
    fitted("blocks.2:tokens:prefix=3:grid=4x4", match="pool")  # the same pixels, named in full
    assert files() == 1
    fitted("blocks.2:tokens:prefix=11:grid=4x2")
    assert files() == 2


def test_a_cache_serves_a_teacher_of_tokens_at_any_grid(tmp_path):
    x, y = images(12, size=(16, 16))
    split = Split((x.sigmoid() * 255).to(torch.uint8), y)
    teacher = ViT(patch=3)  # 5x5 patches of 16x16 images

    def made() -> Distiller:
        torch.manual_seed(0)
        taps = {"student_taps": TAPS, "teacher_taps": find_taps(teacher, EXAMPLE), "example": EXAMPLE}
        return Distiller(a_net(4, seed=2), teacher, letkd1(6, tau=0.1), **taps)

    loader = Loader(split, 6, mean=(0.5,) * 3, std=(0.5,) * 3, views=1)
    plain, cached = made().fit(loader), made().fit(loader)
    assert str(plain.fittings()["penultimate"].match) == "resized to 4x4"
    cached.cache = TeacherCache(cached, loader, tmp_path)
    for batch in loader:
        torch.testing.assert_close(plain(batch).loss, cached(batch).loss, rtol=1e-3, atol=1e-4)
    assert list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(("d_T", "d_S"), [(3, 4), (4, 3)])
def test_any_grid_trains_both_ways(d_T, d_S):
    """Patches of 3 make 5x5 of 16x16 pixels: 5x5 -> 4x4 is down, 4x4 -> 5x5 is up."""
    torch.manual_seed(0)
    student, teacher = ViT(patch=d_S, pool="mean"), ViT(patch=d_T)
    taps = {"student_taps": find_taps(student, EXAMPLE), "teacher_taps": find_taps(teacher, EXAMPLE), "example": EXAMPLE}
    distiller = Distiller(student, teacher, letkd2(6, 2), **taps).fit(a_stream())
    distiller(a_stream()[0]).loss.backward()
    with pytest.raises(UnsupportedPair, match="use match='resize', or choose taps whose sizes divide"):
        Distiller(
            ViT(patch=d_S, pool="mean"), teacher, LetKD([Site("penultimate", KMeansSupervision(6), match="pool")]), **taps
        )


# ------------------------------------------------------------------------------------------------ backbones


@pytest.mark.parametrize("method", [*(name for name in METHODS if name not in ("kd", "crd")), "at", "sp", "vid"])
def test_a_backbone_teaches_whoever_reads_no_logits(method):
    makes = {**METHODS, "at": AT, "sp": SP, "vid": VID}
    torch.manual_seed(0)
    teacher, student = ViT(num_classes=0), ViT(12, pool="mean")
    taps = {"student_taps": find_taps(student, EXAMPLE), "teacher_taps": find_taps(teacher, EXAMPLE), "example": EXAMPLE}
    taps["student_taps"] = {**taps["student_taps"], "penultimate": "blocks.3:tokens", "stage4": "blocks.3:tokens"}
    if method == "sp":
        for who in ("student_taps", "teacher_taps"):
            taps[who] = {**taps[who], "stage3": taps[who]["stage3"]}
    distiller = Distiller(student, teacher, makes[method](), **taps).fit(a_stream())
    step = distiller(a_stream()[0])
    step.loss.backward()
    assert torch.isfinite(step.loss)


def test_kd_with_a_backbone_gets_a_sentence():
    for teacher in (ViT(num_classes=0), nn.Sequential(ViT(num_classes=0))):
        with pytest.raises(
            UnsupportedPair,
            match=r"kd reads the teacher's logits, and \w+ has no classifier; use a teacher that has one, or a method",
        ):
            Distiller(a_net(4, seed=0), teacher, KD(), example=EXAMPLE)


OWN = """
from torch import nn


def backbone(num_classes):
    body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
"""


@pytest.mark.slow
def test_weights_without_a_classifier_teach_features_and_nothing_else(letkd, tmp_path):
    """From the command line: letkd-1 runs, kd gets a sentence, and the weights of a whole classifier are asked for whole elsewhere."""
    (tmp_path / "own.py").write_text(OWN)
    body = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU()))
    save_weights(body, tmp_path / "body.safetensors")
    teacher = ("--teacher", "own.py:backbone", "--teacher-weights", "body.safetensors")
    code, _, err = letkd("train", "digits/tiny/letkd-1", *teacher, "--quick", "--out", "run")
    assert code == 0, err
    assert "body.safetensors: has no 3, so own.py:backbone is a backbone without a classifier" in err
    assert "teacher own.py:backbone: 1" not in err  # its accuracy is not measured
    code, _, err = letkd("train", "digits/tiny/kd", *teacher, "--quick", "--out", "kd")
    assert (code, err.count("Traceback")) == (2, 0)
    assert "kd reads the teacher's logits, and own.py:backbone with the weights body.safetensors has no classifier; use" in err
    code, _, err = letkd("eval", "own.py:backbone", "--weights", "body.safetensors", "--data", "digits")
    assert (code, "2 missing keys" in err) == (2, True)


def test_projecting_tokens_to_other_channels_gets_a_sentence():
    from letkd.methods import SimKD

    student = ViT(8, pool="mean")
    taps = {**find_taps(student, EXAMPLE), "penultimate": "blocks.3:tokens"}
    with pytest.raises(TapError, match="a layer that turns 8 channels into 10 cannot be used on tokens with 3 prefix tokens"):
        Distiller(student, Net(5), SimKD(), student_taps=taps, teacher_taps=TAPS, example=EXAMPLE)
