"""An exported student gives what the student gives, anywhere: without teacher, taps and letkd; and what cannot be exported is told."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from letkd import KDLayer, create_model, graft, load_student
from letkd.data import load_data
from letkd.data.loader import normalise
from letkd.deploy.export import FORMATS, as_onnx, is_convolutional, trace
from letkd.deploy.runners import need, open_model
from letkd.deploy.source import open_source
from letkd.distiller.facts import Facts
from letkd.distiller.student import read_header, save_student
from letkd.errors import ExportError, LetkdError
from letkd.layer.folded import FoldedKDLayer, fold_student
from letkd.models.mobilenetv2 import _half_block
from letkd.models.shufflenet import DownUnit2, Unit2
from letkd.models.wrn import PreActBlock
from letkd.progress import set_quiet
from tests.support.pair import images

ROOT = Path(__file__).parents[2]
FACTS = Facts(num_classes=3, classes=("a", "b", "c"), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25), size=(16, 16), input="uint8")


def lively(model: nn.Module) -> nn.Module:
    """As after training: BN has statistics and affine values of its own."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    with torch.no_grad():
        for _ in range(5):
            model.train()(torch.randn(8, 3, 16, 16))
    return model.eval()


def zoo(name: str) -> nn.Module:
    model = create_model(name, num_classes=3)
    tap = model.taps["penultimate"]
    graft(model, KDLayer(tap.channels, 8), after=tap.path)
    return lively(model)


def cut_short(*blocks: nn.Module, d: int) -> nn.Module:
    """A family's blocks, few of them, with a KD layer behind: the whole networks take minutes to convert."""
    body = nn.Sequential(*blocks, KDLayer(d, 8))
    return lively(nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(d, 3)))


STUDENTS = {
    "resnet": lambda: zoo("resnet8_tiny"),
    "wrn": lambda: cut_short(PreActBlock(3, 8, stride=2), PreActBlock(8, 8, stride=1), d=8),
    "vgg": lambda: zoo("vgg8"),
    "shufflenet": lambda: cut_short(DownUnit2(3, 8), Unit2(8), d=8),
    "mobilenetv2": lambda: cut_short(_half_block(3, 8, t=2, stride=2), _half_block(8, 8, t=2, stride=1), d=8),
}


@pytest.mark.parametrize("name", STUDENTS)
def test_exported_families_give_what_they_gave(name):
    student = STUDENTS[name]()
    traced = trace(fold_student(student), FACTS)
    assert traced.folded > 0
    assert traced.facts.dynamic == ("batch", "height", "width")
    for form in FORMATS.values():
        runner = form.run(form.write(traced), name)
        assert runner.facts == traced.facts
        for batch, size in ((1, (16, 16)), (3, (24, 16)), (2, (40, 32))):
            x = torch.randint(256, (batch, 3, *size), dtype=torch.uint8)
            with torch.no_grad():
                wanted = student(normalise(x, FACTS.mean, FACTS.std))
            torch.testing.assert_close(runner(x), wanted, rtol=1e-4, atol=1e-4)


class FixedSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3 * 8 * 8, 3)

    def forward(self, x):
        return self.fc(x.flatten(1))


class Fickle(nn.Module):
    """Takes another path when the image is 16 high."""

    def forward(self, x):
        return x.mean(dim=(2, 3)) if x.shape[2] == 16 else x.amax(dim=(2, 3))


@pytest.mark.parametrize("network", [FixedSize, Fickle])
def test_a_network_of_one_size_is_exported_at_that_size(network, said):
    facts = Facts(num_classes=3, size=(8, 8))
    exported = trace(network().eval(), facts)
    assert exported.facts.dynamic == ("batch",)
    assert "fixed to 8x8" in said()


class Attention(nn.Module):
    """Patches of 4x4 pixels that look at each other: runs at any size, and is no convolution."""

    def __init__(self):
        super().__init__()
        self.patches, self.fc = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.fc((x @ x.transpose(1, 2)).softmax(dim=2) @ x).mean(dim=1)


class Padded(nn.Module):
    """Pads its images to a multiple of 16, with another operation if there is nothing to pad."""

    def forward(self, x):
        if short := -x.shape[2] % 16:
            x = nn.functional.pad(x, (0, 0, 0, short))
        return x.mean(dim=(2, 3))


@pytest.mark.parametrize(
    ("network", "convolutional"), [(Attention, False), (Padded, False), (Fickle, False), (lambda: zoo("resnet8_tiny"), True)]
)
def test_what_is_fully_convolutional(network, convolutional):
    facts = Facts(num_classes=3, size=(16, 16))
    assert is_convolutional(network().eval(), facts, (16, 16)) == convolutional


def test_a_network_that_is_not_convolutional_is_fixed_unless_asked(said):
    network, facts = Attention().eval(), Facts(num_classes=3, size=(16, 16))
    traced = trace(network, facts)
    assert traced.facts.dynamic == ("batch",)
    assert "fixed to 16x16" in said()
    opened = trace(network, facts, any_size=True)
    assert opened.facts.dynamic == ("batch", "height", "width")
    assert trace(zoo("resnet8_tiny"), facts, any_size=False).facts.dynamic == ("batch",)
    assert said() == ""
    with pytest.raises(ExportError, match=r"cannot trace the network at any size: .*; omit `size=dynamic`"):
        trace(FixedSize().eval(), Facts(num_classes=3, size=(8, 8)), any_size=True)


@pytest.mark.parametrize("to", FORMATS)
def test_a_fixed_batch_takes_any_number_of_images(to):
    student = zoo("resnet8_tiny")
    traced = trace(student, FACTS, batch=4, any_size=False)
    assert (traced.facts.dynamic, traced.facts.batch) == ((), 4)
    runner = FORMATS[to].run(FORMATS[to].write(traced), "x")
    for n in (1, 4, 6):
        x = torch.randint(256, (n, 3, 16, 16), dtype=torch.uint8)
        with torch.no_grad():
            wanted = student(normalise(x, FACTS.mean, FACTS.std))
        torch.testing.assert_close(runner(x), wanted, rtol=1e-4, atol=1e-4)


def test_opsets():
    import onnx

    traced = trace(Fickle(), Facts(num_classes=3, size=(32, 32)), any_size=False)
    versions = [part.version for part in onnx.load_from_string(as_onnx(traced, 20)).opset_import if part.domain == ""]
    assert versions == [20]
    with pytest.raises(ExportError, match=r"opset|without `opset=`"):
        as_onnx(traced, 999)


def test_what_torch_cannot_follow_is_told():
    class Coin(nn.Module):
        def forward(self, x):
            return x.mean(dim=(2, 3)) if float(x.sum()) > 0 else -x.mean(dim=(2, 3))

    with pytest.raises(ExportError, match=r"torch\.export cannot trace the network: "):
        trace(Coin(), Facts(num_classes=3, size=(8, 8)))
    with pytest.raises(ExportError, match="the size of the images is unknown; give their height and width with `size=`"):
        trace(Coin(), Facts(num_classes=3))


def test_what_onnx_has_no_word_for_is_told():
    class Bessel(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x).mean(dim=(2, 3))

    with pytest.raises(ExportError, match=r"torch\.onnx cannot write the network: .*; try `to=torch-export`$"):
        as_onnx(trace(Bessel(), Facts(num_classes=3, size=(8, 8), input="normalised")))


def test_a_missing_extra_is_told_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(LetkdError, match=r"ONNX files need onnxscript, which is not installed: pip install 'letkd\[onnx\]'"):
        as_onnx(trace(Fickle(), Facts(num_classes=3, size=(32, 32))))
    assert need("json") is json


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A finished run: a student with two KD layers, trained for one short epoch."""
    from letkd.recipes import resolve
    from letkd.training.loop import train

    set_quiet(True)
    folder = tmp_path_factory.mktemp("runs")
    settings = ["data.fraction=0.1", "train.epochs=1", "student.model=resnet8_tiny", "teacher.model=resnet8_tiny"]
    train(resolve("digits/tiny", method="teacher", settings=settings), folder / "teacher")
    settings.append(f"teacher.weights={folder / 'teacher' / 'student.safetensors'}")
    settings += ["methods.letkd.sites.penultimate.supervision.K=16"]
    train(resolve("digits/tiny", method="letkd-2", settings=settings), folder / "run")
    return folder / "run"


WITHOUT_LETKD = """
import sys
sys.modules["letkd"] = None
import torch
x = torch.load(sys.argv[2])
if sys.argv[1].endswith(".pt2"):
    extra = {"letkd.json": ""}
    y = torch.export.load(sys.argv[1], extra_files=extra).module()(x)
    facts = extra["letkd.json"]
else:
    import onnxruntime
    session = onnxruntime.InferenceSession(sys.argv[1])
    y = torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])
    facts = session.get_modelmeta().custom_metadata_map["letkd"]
torch.save({"y": y.detach(), "facts": facts}, sys.argv[3])
"""


@pytest.mark.parametrize(("to", "suffix"), [("torch-export", ".pt2"), ("onnx", ".onnx")])
def test_an_exported_run_needs_no_letkd(letkd, run_folder, tmp_path, to, suffix):
    code, out, err = letkd("export", run_folder, "--to", to, "--out", tmp_path / f"s{suffix}")
    assert code == 0, err
    assert "max difference from the student on 32 random images: " in out
    assert "real images: " in out
    assert f"exported: {tmp_path / f's{suffix}'}" in out
    assert re.search(r"^latency: [\d.]+ ms per batch of 1, [\d.]+ ms per batch of 32$", out, re.M)
    assert re.search(r"\([\d.]+ MB\)$", out, re.M)
    x = load_data("digits").test.images[:5]
    torch.save(x, tmp_path / "x")
    files = [tmp_path / f"s{suffix}", tmp_path / "x", tmp_path / "y"]
    subprocess.run([sys.executable, "-c", WITHOUT_LETKD, *map(str, files)], check=True, cwd=tmp_path)
    answer = torch.load(tmp_path / "y")
    facts = json.loads(answer["facts"])
    student = load_student(run_folder / "student.safetensors")
    with torch.no_grad():
        wanted = student(normalise(x, facts["mean"], facts["std"]))
    torch.testing.assert_close(answer["y"], wanted, rtol=1e-4, atol=1e-4)
    assert (facts["classes"], facts["size"], facts["input"]) == (list("0123456789"), [32, 32], "uint8")
    of_file, of_run = (letkd("eval", what, "--data", "digits", "--trust") for what in (files[0], run_folder))
    assert (of_file[0], of_run[0]) == (0, 0), of_file[2]
    assert of_file[1].splitlines()[-2].split()[:6] == of_run[1].splitlines()[-2].split()[:6]  # split, top-1 and top-5
    code, _, err = letkd("eval", files[0], "--data", "digits", "--mean", "0,0,0")
    assert (code, "leave --mean out" in err) == (2, True)
    content = files[0].read_bytes()
    assert str(ROOT).encode() not in content  # where the code lay when it was exported is nobody's business


def test_safetensors_with_prune(letkd, run_folder, tmp_path):
    code, out, err = letkd("export", run_folder, "--to", "safetensors", "--prune", 6, "--out", tmp_path / "s.safetensors")
    assert code == 0, err
    assert "kd_penultimate: 16 templates, 0 never fired, 6 kept" in out
    assert "accuracy on test: " in out
    assert "time per batch of 1: " in out
    assert "latency: " in out
    assert " MB)" in out
    student = load_student(tmp_path / "s.safetensors")
    assert [len(m.beta) for m in student.modules() if isinstance(m, FoldedKDLayer)] == [6, 6]
    header = read_header(tmp_path / "s.safetensors")
    assert (header["size"], header["classes"][3], header["model"]) == ([32, 32], "3", "resnet8_tiny")
    assert open_model(tmp_path / "s.safetensors").facts.size == (32, 32)


def test_a_run_whose_own_data_is_named_keeps_its_split(run_folder):
    own, named = open_source(run_folder).data, open_source(run_folder, data="digits").data
    assert len(own.train) < len(load_data("digits").train)
    for split in ("train", "val", "test"):
        assert torch.equal(getattr(named, split).images, getattr(own, split).images)


def test_int8(letkd, run_folder, tmp_path):
    code, out, err = letkd("export", run_folder, "--to", "onnx", "--int8", "--out", tmp_path / "s.onnx")
    assert code == 0, err
    assert err == ""
    assert "INT8, accuracy on test: " in out
    assert "INT8, size: " in out
    x = load_data("digits").test.images[:200]
    student = open_model(run_folder / "student.safetensors")
    small, whole = open_model(tmp_path / "s.onnx")(x), student(x)
    assert 1e-4 < (small - whole).norm() / whole.norm() < 0.3
    code, _, err = letkd("export", run_folder, "--to", "onnx", "--int8", "--batch", "3", "--out", tmp_path / "three.onnx")
    assert (code, err) == (0, "")
    three = open_model(tmp_path / "three.onnx")(x[:3])
    assert (three - whole[:3]).norm() / whole[:3].norm() < 0.3


def test_unfinished_runs_are_refused_with_the_way_on(letkd, run_folder, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(run_folder, half)
    (half / "result.json").unlink()
    code, _, err = letkd("export", half, "--to", "onnx")
    assert code == 2
    assert (
        f"{half} is not finished: 1 of 1 epochs are done; finish it with `letkd train {half}/recipe.toml --out {half}`" in err
    )
    assert letkd("train", half / "recipe.toml", "--out", half)[0] == 0
    assert (half / "result.json").exists()
    (half / "result.json").unlink()
    (half / "metrics.jsonl").unlink()
    assert "not trained: none of its 1 epochs is done" in letkd("export", half, "--to", "onnx")[2]


@pytest.mark.parametrize(
    ("what", "more", "says"),
    [
        ("{runs}", [], "is not a run folder: it contains no recipe.toml; it contains the runs run, teacher: name one of them"),
        ("{tmp}", [], "is not a run folder: it contains no recipe.toml"),
        ("{tmp}/nothing", [], "no run folder or student file"),
        ("{tmp}/plain.safetensors", [], "is not a student file"),
        ("{run}", ["--out", "s.bin"], "the file name must end in .onnx for onnx"),
        ("{run}", ["--int8", "--to", "torch-export"], "INT8 is for ONNX files, not for torch-export"),
        ("{run}", ["--prune", "most"], "--prune most: use unused, auto, or the number of templates"),
        ("{run}", ["--to", "safetensors", "--input", "uint8"], "cannot normalise images"),
        ("{run}", ["--to", "safetensors", "--out", "{run}/student.safetensors"], "is the student's own file"),
        ("{run}", ["--to", "torch-export", "--opset", "18"], "--opset 18 is for ONNX files, not for torch-export"),
        ("{run}", ["--to", "safetensors", "--batch", "4"], "its sizes cannot be fixed; omit --batch and --size"),
        ("{run}", ["--batch", "some"], "--batch 'some': write a number, as in 8, or dynamic"),
        ("{run}", ["--batch", "0"], "--batch '0': write a number"),
        ("{run}", ["--size", "large"], "--size 'large': write height x width, as in 64x64, or fixed, or dynamic"),
        ("{run}", ["--size", "fixed,dynamic"], "--size 'fixed,dynamic': write height x width"),
    ],
)
def test_what_cannot_be_exported_is_told(letkd, run_folder, tmp_path, what, more, says):
    (tmp_path / "plain.safetensors").write_bytes(b"weights")
    places = {"runs": run_folder.parent, "run": run_folder, "tmp": tmp_path}
    more = [part.format(**places) for part in more]
    to = [] if "--to" in more else ["--to", "onnx"]
    before = (run_folder / "student.safetensors").read_bytes()
    code, out, err = letkd("export", what.format(**places), *to, *more)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert (run_folder / "student.safetensors").read_bytes() == before


def test_a_student_file_of_ones_own_network(letkd, tmp_path):
    (tmp_path / "own.py").write_text(
        "from torch import nn\ndef net(num_classes):\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))\n"
    )
    name = f"{tmp_path / 'own.py'}:net"
    save_student(create_model(name, num_classes=3), tmp_path / "s.safetensors", model=name, num_classes=3)
    arguments = ["export", tmp_path / "s.safetensors", "--to", "torch-export"]
    assert "code is not run only because a file names it" in letkd(*arguments)[2]
    assert "give their height and width with --size" in letkd(*arguments, "--student", name)[2]
    code, out, err = letkd(*arguments, "--student", name, "--size", 12)
    assert code == 0, err
    assert "input: normalised [batch, 3, height, width]" in out
    run = torch.export.load(tmp_path / "s.pt2").module()
    x = images(2, size=(20, 12))[0]
    torch.testing.assert_close(run(x), load_student(tmp_path / "s.safetensors", model=name)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "shape"),
    [
        (["--batch", 2, "--size", "fixed"], "[2, 3, 32, 32]"),
        (["--size", "48x40,fixed", "--batch", 3], "[3, 3, 48, 40]"),
    ],
)
def test_sizes_of_the_exported_graph(letkd, run_folder, tmp_path, more, shape):
    code, out, err = letkd("export", run_folder, "--to", "onnx", "--out", tmp_path / "s.onnx", *more)
    assert code == 0, err
    assert f"input: uint8 {shape}" in out
    x = load_data("digits").test.images[:5]
    student = open_model(run_folder / "student.safetensors")
    assert ("real images: " in out) == ("48" not in shape)
    assert ("compared only on random images" in err) == ("48" in shape)
    if "48" not in shape:
        torch.testing.assert_close(open_model(tmp_path / "s.onnx")(x), student(x), rtol=1e-4, atol=1e-4)
