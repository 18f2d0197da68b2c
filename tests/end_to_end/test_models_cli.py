"""`letkd models`, `letkd taps` and `letkd eval` of any network: what they print, and what a wrong input gets."""

import importlib.util
import json
import re
import sys

import pytest
import torch

from letkd.models import create_model, list_models, save_weights
from letkd.models.cost import macs, parameters
from letkd.taps import as_taps, probe


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A file of one's own with a network that `find_taps` can read, and one that gives too many logits."""
    monkeypatch.delitem(sys.modules, "nets", raising=False)  # another test's, from another folder
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def block(d): return nn.Sequential(nn.Conv2d(d, 8, 3, 1, 1), nn.ReLU())\n"
        "def small(num_classes):\n"
        "    body = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.Sequential(block(8), block(8)))\n"
        "    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))\n"
        "def fixed(): return small(17)\n"
    )
    return tmp_path / "nets.py"


# ------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("columns", ["80", "200"])
def test_models_lists_the_zoo_and_cuts_nothing(letkd, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, err = letkd("models", "resnet20", "resnet50_cifar", "mobilenetv2")
    assert code == 0, err
    assert "…" not in out
    rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines() if line.strip()][2:]
    assert rows == [
        ["resnet20", "3×32²", "100", "278,324", "40.8 M", "16×32², 16×32², 32×16², 64×8²", "64×8²", "64×8²"],
        [
            *("resnet50_cifar", "3×32²", "100", "23,705,252", "1,298.0 M"),
            *("64×32², 256×32², 512×16², 1024×8², 2048×4²", "2048×4²", "2048×4²"),
        ],
        [
            *("mobilenetv2", "3×224²", "1000", "3,504,872", "300.8 M"),
            *("32×112², 24×56², 32×28², 96×14², 320×7²", "160×7²", "1280×7²"),
        ],
    ]


def test_models_as_json_are_all_of_the_zoo_and_true(letkd):
    code, out, err = letkd("models", "--json", "--input", "64x48", "--num-classes", 7)
    assert code == 0, err
    found = {item["name"]: item for item in json.loads(out)}
    assert list(found) == list_models()
    for name in ("resnet8_tiny", "vgg8", "shufflenet_v1"):
        model, example = create_model(name, num_classes=7), torch.zeros(1, 3, 64, 48)
        _, f = probe(model, as_taps(model), example)
        item = found[name]
        assert (item["input"], item["classes"]) == ([3, 64, 48], 7)
        assert (item["parameters"], item["macs"]) == (parameters(model), macs(model, example))
        assert {"stem", "stage1", "intermediate", "penultimate"} <= item["maps"].keys()
        assert item["maps"] == {role: list(f[role].shape[1:]) for role in item["maps"]}


# ------------------------------------------------------------------------------------------------ taps


@pytest.mark.parametrize("name", ["nets.py:small", "nets:small"])
def test_taps_of_ones_own_model_name_the_options_that_train_takes(letkd, nets, name):
    code, out, err = letkd("taps", name, "--input", "3x32x32", "--num-classes", 10)
    assert code == 0, err
    assert re.search(r"^0\.1\.0\.0 +Conv2d +\[b 8 8 8\]$", out, re.M)
    assert re.search(r"^0 +Sequential +\[b 8 8 8\] +← penultimate, stage1, proposed$", out, re.M)
    assert re.search(r"^0\.1\.0 +Sequential +\[b 8 8 8\] +← intermediate, proposed$", out, re.M)
    assert re.search(r"^3 +Linear +\[b 10\] +← pooled \(its input\), proposed$", out, re.M)
    (command,) = re.findall(r"^as student: letkd (train) … (.*)$", out, re.M)
    save_weights(create_model("resnet8_tiny", num_classes=10), "t.safetensors")
    teacher = ["--teacher", "resnet8_tiny", "--teacher-weights", "t.safetensors"]
    code, _, err = letkd("train", "digits/tiny/letkd-2", *command[1].split(), *teacher, "--quick", "--out", "run")
    assert code == 0, err


def test_taps_of_the_zoo_are_its_own(letkd):
    code, out, err = letkd("taps", "vgg11")
    assert code == 0, err
    assert "one image 3×32×32" in out
    assert re.search(r"^relu4 +ReLU +\[b 512 4 4\] +← penultimate$", out, re.M)
    assert "proposed" not in out
    assert "--teacher vgg11 --teacher-weights FILE --teacher-tap intermediate=block4.2 --teacher-tap penultimate=relu4" in out
    assert re.search(r"^pool3 +MaxPool2d +– +does not run$", out, re.M)


# ------------------------------------------------------------------------------------------------ eval


def test_eval_any_network_with_any_weights(letkd, nets):
    model = create_model("resnet8_tiny", num_classes=10)
    torch.save({"state_dict": model.state_dict()}, "w.pth")
    code, out, err = letkd("eval", "resnet8_tiny", "--weights", "w.pth", "--data", "digits")
    assert code == 0, err
    shown = re.search(r"│ +test │ +(\S+) │ +\S+ │ +(\S+) │ +[\d,]+ │", out).groups()
    assert letkd("eval", "w.pth", "--student", "resnet8_tiny", "--data", "digits")[1].splitlines()[1:] == out.splitlines()[1:]
    normalised = ["--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225"]
    code, out, err = letkd("eval", "resnet8_tiny", "--weights", "w.pth", "--data", "digits", *normalised)
    assert code == 0, err
    assert re.search(r"│ +test │ +(\S+) │ +\S+ │ +(\S+) │ +[\d,]+ │", out).groups() != shown
    save_weights(create_model(f"{nets}:small", num_classes=10), "own.safetensors")
    assert letkd("eval", f"{nets}:small", "--weights", "own.safetensors", "--data", "digits")[0] == 0


def test_eval_counts_what_the_network_answers(letkd, tmp_path):
    model = create_model("resnet8_tiny", num_classes=10)
    torch.nn.init.zeros_(model.fc.weight)
    model.fc.bias.data = torch.eye(10)[3]
    save_weights(model, "w.safetensors")
    from letkd.data import load_data

    labels = load_data("digits").test.labels
    _, out, _ = letkd("eval", "resnet8_tiny", "--weights", "w.safetensors", "--data", "digits")
    assert f"{100 * (labels == 3).float().mean().item():.2f} │" in out


# ------------------------------------------------------------------------------------------------ wrong inputs

WRONG = [
    (["models", "vgg9"], "there is no model 'vgg9' in the zoo; nearest: vgg"),
    (["models", "--input", "64"], "--input '64': write height x width, as in 64x64"),
    (["models", "--input", "0x8"], "--input '0x8': write height x width"),
    (["models", "vgg8", "--input", "2x2"], "VGG failed on a tensor [1, 3, 2, 2] with RuntimeError"),
    (["taps", "resnet8", "--input", "1x32x32"], "--input '1x32x32': images must have 3 channels"),
    (["taps", "resnet21"], "timm:NAME, torchvision:NAME, transformers:NAME, your own as package.module:callable"),
    (["eval", "resnet20"], "resnet20 is a network without weights; name them with --weights FILE"),
    (["eval", "resnet20", "--weights", "w.safetensors"], "name the data set with --data"),
    (["eval", "resnet20", "--weights", "no.pth", "--data", "digits"], "there is no weights file no.pth"),
    (["eval", "resnet20", "--weights", "w.safetensors", "--student", "resnet8"], "both name a network; name one"),
    (
        ["eval", "resnet20", "--weights", "w.safetensors", "--data", "digits"],
        "w.safetensors does not fit ResNet: 60 missing keys",
    ),
    (
        ["eval", "resnet8_tiny", "--weights", "w7.safetensors", "--data", "digits"],
        "fc.weight is [7, 32] in the file and [10, 32] in",
    ),
    (
        ["eval", "w.safetensors", "--data", "digits"],
        "is not a student file of letkd; to evaluate plain weights use `letkd eval FILE --student MODEL`",
    ),
    (
        ["eval", "nets.py:fixed", "--weights", "w17.safetensors", "--data", "digits"],
        "gives 17 logits and digits has 10 classes",
    ),
    (
        ["eval", "resnet8_tiny", "--weights", "w.safetensors", "--data", "digits", "--mean", "grey"],
        "--mean 'grey': write comma-separated numbers",
    ),
    (
        ["eval", "resnet8_tiny", "--weights", "w.safetensors", "--data", "digits", "--mean", "0.5"],
        "mean is 0.5, but it must be 3",
    ),
    (["eval", "resnet8_tiny", "--weights", "w.safetensors", "--data", "digits", "--std", "1,1,0"], "one per channel, above 0"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_inputs_get_one_sentence(letkd, nets, arguments, says):
    save_weights(create_model("resnet8_tiny", num_classes=10), "w.safetensors")
    save_weights(create_model("resnet8_tiny", num_classes=7), "w7.safetensors")
    save_weights(create_model("nets.py:fixed", num_classes=7), "w17.safetensors")
    code, out, err = letkd(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("letkd: ")
    assert says in err


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_an_extra_that_is_not_installed_or_does_not_import(letkd, monkeypatch, library):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == library else find(name, *more))
    code, _, err = letkd("taps", f"{library}:resnet18")
    assert (code, err) == (
        2,
        f"letkd: {library}:resnet18 needs {library}, which is not installed: pip install 'letkd[{library}]'\n",
    )

    real = importlib.import_module

    def fails(name, package=None):
        if name == library:
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name, package)

    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: "there" if name == library else find(name, *more))
    monkeypatch.setattr(importlib, "import_module", fails)
    code, _, err = letkd("train", "digits/tiny/ce", "--student", f"{library}:resnet18", "--out", "run")
    assert (code, err.count("\n")) == (2, 1)
    assert (
        f"needs {library}, which is installed but cannot be imported (RuntimeError: operator torchvision::nms does not" in err
    )
