"""Networks of one's own: what in their code fixes the batch is told and does not hinder export; they must take RGB images."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from letkd import create_model, save_student
from letkd.data.loader import normalise
from letkd.deploy.export import FORMATS, trace
from letkd.deploy.runners import open_model
from letkd.distiller.facts import Facts
from letkd.errors import ExportError, TapError

FACTS = Facts(num_classes=3, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25), size=(16, 16), input="uint8")
BATCH_FIXED = (
    "the batch is fixed to 1: torch.export can only trace the network at one batch size (len(x) in its code fixes the batch; "
    "x.shape[0] does not)\n"
)
SIZE_FIXED = "the image size is fixed to 16x16: at other sizes the network does not run, or computes something else\n"

NETS = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes=3, channels=3):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        f = self.body(x)
        return self.fc(f.view(self.count(f), -1))

    def count(self, f):
        return len(f)


class Shape(Net):
    def count(self, f):
        return f.shape[0]


class One(Net):
    def count(self, f):
        return 1


class Flat(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.fc = nn.Linear(3 * 16 * 16, num_classes)

    def forward(self, x):
        return self.fc(x.view(len(x), -1))


class ViT(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.patches, self.fc = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, num_classes)
        self.cls_token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        f = self.patches(x).flatten(2).transpose(1, 2)
        f = torch.cat([self.cls_token.expand(len(x), -1, -1), f], dim=1) + self.positions
        return self.fc(self.block(f)[:, 0])


class Patches(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        return self.fc(nn.functional.unfold(x, 4, stride=4).transpose(1, 2)).mean(dim=1)


class Corners(nn.Module):
    # Four values per channel at every image size; torch.onnx writes the pool for one size.
    def __init__(self, num_classes=3):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x):
        return self.fc(self.body(x).flatten(1))


class CornersOfOne(Corners):
    def forward(self, x):
        return self.fc(self.body(x).view(len(x), -1))


class MeanOfCorners(Corners):
    # At multiples of the image size, the pool for one size gives the same mean.
    def forward(self, x):
        return self.fc(self.body(x).mean(dim=(2, 3)).repeat(1, 4))


class ReadsStatistics(Net):
    # Reads the statistics of its BN, not the BN.
    def forward(self, x):
        conv, bn, *rest = self.body
        f = F.batch_norm(conv(x), bn.running_mean, bn.running_var, bn.weight, bn.bias)
        return self.fc(nn.Sequential(*rest)(f).flatten(1))


class ReadsKernel(Net):
    # Reads the kernel of its convolution, not the convolution.
    def __init__(self, num_classes=3):
        super().__init__(num_classes)
        self.body[1].running_mean.fill_(0.5)

    def forward(self, x):
        conv, *rest = self.body
        f = F.conv2d(F.pad(x, (0, 1, 0, 1)), conv.weight, stride=2)
        return self.fc(nn.Sequential(*rest)(f).flatten(1))


def takes(n):
    return lambda num_classes: Shape(num_classes, n)


one_channel, four_channels, thirteen_channels = takes(1), takes(4), takes(13)
"""


@pytest.fixture
def own(tmp_path):
    """`own(name)`: a network of a file of one's own, in eval mode."""
    (tmp_path / "nets.py").write_text(NETS)
    return lambda name: create_model(f"{tmp_path / 'nets.py'}:{name}", num_classes=3).eval()


@pytest.fixture
def own_file(own, tmp_path):
    """`own_file(name)`: its student file, and the name to open it with."""

    def file(name: str) -> tuple[Path, str]:
        path, full = tmp_path / "s.safetensors", f"{tmp_path / 'nets.py'}:{name}"
        save_student(own(name), path, model=full, num_classes=3, size=FACTS.size, mean=FACTS.mean, std=FACTS.std)
        return path, full

    return file


@pytest.mark.parametrize(
    ("name", "any_size", "dynamic", "message"),
    [
        ("Net", None, ("height", "width"), BATCH_FIXED),
        ("Net", True, ("height", "width"), BATCH_FIXED),
        ("Net", False, (), BATCH_FIXED),
        ("One", None, ("height", "width"), BATCH_FIXED),
        ("ViT", None, (), BATCH_FIXED + SIZE_FIXED),
        ("Flat", None, (), BATCH_FIXED + SIZE_FIXED),
        ("Shape", None, ("batch", "height", "width"), ""),
    ],
)
def test_len_of_the_images_fixes_the_batch_and_not_the_size(own, said, name, any_size, dynamic, message):
    facts = trace(own(name), FACTS, any_size=any_size).facts
    assert (facts.dynamic, facts.batch) == (dynamic, 1)
    assert said() == message


@pytest.mark.parametrize("name", ["Net", "Shape"])
def test_a_batch_that_was_asked_for_is_kept(own, said, name):
    facts = trace(own(name), FACTS, batch=3).facts
    assert (facts.dynamic, facts.batch, said()) == (("height", "width"), 3, "")


def test_the_size_is_named_as_the_reason_only_if_it_is(own):
    with pytest.raises(ExportError, match=r"cannot trace the network at any size: .*size\(\)\[2\].*; omit `size=dynamic`$"):
        trace(own("Flat"), FACTS, any_size=True)


def test_tries_that_fail_are_not_logged(own, caplog):
    trace(own("One"), FACTS)
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.parametrize("name", ["Net", "ViT"])
@pytest.mark.parametrize("to", FORMATS)
def test_a_file_whose_batch_was_fixed_takes_any_number_of_images(letkd, own_file, tmp_path, name, to):
    path, full = own_file(name)
    out = tmp_path / f"s{FORMATS[to].suffix}"
    code, printed, err = letkd("export", path, "--to", to, "--student", full, "--out", out)
    assert (code, err) == (0, BATCH_FIXED + (SIZE_FIXED if name == "ViT" else ""))
    assert f"input: uint8 [1, 3, {'16, 16' if name == 'ViT' else 'height, width'}]" in printed
    student = open_model(path, student=full)
    assert student.facts.mean == FACTS.mean
    x = torch.randint(256, (5, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        wanted = student.run(normalise(x, FACTS.mean, FACTS.std))
    torch.testing.assert_close(open_model(out, trust=True)(x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "message", "dynamic"),
    [
        ("Corners", SIZE_FIXED, ("batch",)),
        ("MeanOfCorners", SIZE_FIXED, ("batch",)),
        ("CornersOfOne", BATCH_FIXED + SIZE_FIXED, ()),
    ],
)
def test_an_onnx_file_that_is_right_at_one_size_takes_only_that_size(letkd, own_file, tmp_path, name, message, dynamic):
    path, full = own_file(name)
    out = tmp_path / "s.onnx"
    code, _, err = letkd("export", path, "--to", "onnx", "--student", full, "--out", out)
    assert (code, err) == (0, message)
    assert open_model(out).facts.dynamic == dynamic
    code, _, err = letkd("export", path, "--to", "onnx", "--student", full, "--out", out, "--size", "dynamic")
    assert (code, err.splitlines()[-1]) == (
        2,
        "letkd: any image size was asked for, but the ONNX file is right only at one; omit --size dynamic, or use --to torch-export",
    )
    assert letkd("export", path, "--to", "torch-export", "--student", full, "--out", tmp_path / "s.pt2")[0] == 0
    assert "height" in open_model(tmp_path / "s.pt2", trust=True).facts.dynamic


@pytest.mark.parametrize("name", ["ReadsStatistics", "ReadsKernel"])
def test_a_network_that_reads_parameters_itself_keeps_its_batch_norms(letkd, own_file, tmp_path, name):
    path, full = own_file(name)
    code, out, err = letkd("export", path, "--to", "onnx", "--student", full, "--out", tmp_path / "s.onnx")
    assert code == 0, err
    assert err == (
        "the BNs are not folded into convolutions: without them, the network fails or differs, as it reads parameters itself\n"
    )
    assert "max difference from the student on 32 random images: " in out


@pytest.mark.parametrize("to", [*FORMATS, "safetensors"])
@pytest.mark.parametrize(("name", "channels"), [("one_channel", "1 channel"), ("four_channels", "4 channels")])
def test_networks_of_other_channels_are_told(letkd, own_file, name, channels, to):
    path, full = own_file(name)
    code, out, err = letkd("export", path, "--to", to, "--student", full)
    assert (code, out) == (2, "")
    assert err == (
        f"letkd: {full} takes images with {channels}, but letkd's commands read RGB images; export it with torch.export, or add a "
        "first layer that converts RGB\n"
    )


@pytest.mark.parametrize("takes", ["uint8", "normalised"])
@pytest.mark.parametrize(("name", "channels"), [("thirteen_channels", "13 channels"), ("Patches", "1 channel")])
def test_channels_are_found_with_and_without_convolutions(own, name, channels, takes):
    with pytest.raises(ExportError, match=f"^the network takes images with {channels}, but"):
        trace(own(name), FACTS.replace(input=takes))


@pytest.mark.parametrize(
    ("name", "batch", "says"),
    [
        ("Flat", None, r"^the network does not run on images of shape \[1, 3, 8, 8\]: RuntimeError: .*; check `size=`$"),
        ("One", 3, r"^the network does not run on images of shape \[3, 3, 8, 8\]: .*; check `size=` and `batch=`$"),
    ],
)
def test_channels_are_not_blamed_for_a_wrong_size_or_batch(own, said, name, batch, says):
    with pytest.raises(ExportError, match=says):
        trace(own(name), FACTS.replace(size=(8, 8)), batch=batch)
    assert said() == ""


def test_what_is_not_a_classifier_is_told_by_the_sentence_for_it():
    with pytest.raises(TapError, match=r"^Conv2d must return logits \[b C\], but it returned a tensor"):
        trace(nn.Conv2d(3, 3, 3).eval(), FACTS)
