"""Teachers from elsewhere: what their files say of them counts, they are measured before they teach, and none is used at chance level."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from letkd.data.loader import normalise
from letkd.distiller.student import load_student, save_student
from letkd.layer import KDLayer
from letkd.models import create_model, save_weights
from letkd.recipes import resolve
from letkd.training import build
from letkd.training.teachers import build_teacher, near_chance

COLOURS = {"blue": (30, 40, 210), "green": (40, 200, 50), "red": (220, 30, 40)}
ORDER = ("red", "blue", "green")  # folders are in the order of the alphabet
MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
QUICK = ("--set", "data.size=32", "--set", "data.workers=0", "--set", "data.batch_size=8", "--epochs", 1)


def picture(name: str, seed: int, size: int) -> np.ndarray:
    noise = np.random.default_rng(seed).integers(-25, 25, (size, size, 3))
    return (np.array(COLOURS[name]) + noise).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Trained on 48-pixel images, another normalisation, another order of the classes."""
    torch.manual_seed(0)
    pictures = np.stack([picture(name, seed, 48) for seed in range(8) for name in ORDER])
    x = normalise(torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous(), MEAN, STD)
    y = torch.arange(len(x)) % 3
    model = create_model("resnet8_tiny", num_classes=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(15):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for _ in range(30):
            model(x)  # statistics of BN
    assert (model.eval()(x).argmax(dim=1) == y).all()
    path = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    save_student(model, path, model="resnet8_tiny", num_classes=3, classes=ORDER, mean=MEAN, std=STD, size=(48, 48))
    return path


@pytest.fixture
def tree(tmp_path):
    for split, n in (("train", 8), ("val", 4), ("test", 2)):
        for name in COLOURS:
            folder = tmp_path / "tree" / split / name
            folder.mkdir(parents=True)
            for k in range(n):
                Image.fromarray(picture(name, 100 + k, 32)).save(folder / f"{k}.png")
    return tmp_path / "tree"


def command(tree, weights, *more):
    networks = ("--teacher", "resnet8_tiny", "--teacher-weights", weights, "--student", "resnet8_tiny")
    return "train", "--data", "folder", "--root", tree, *networks, *QUICK, "--out", "run", *more


def test_a_teacher_of_another_order_normalisation_and_size_teaches_what_it_knows(letkd, tree, teacher):
    code, _, err = letkd(*command(tree, teacher, "--method", "kd"))
    assert code == 0, err
    assert "mean 0.1/0.2/0.3 and std 0.5/0.6/0.7 instead of 0.485/0.456/0.406" in err
    assert "images of 48x48 instead of 32x32; its classes in another order, matched by name" in err
    assert "teacher resnet8_tiny: 100.00 % on 12 validation images" in err
    assert "warning" not in err
    result = json.loads(Path("run/result.json").read_text())
    first = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])
    assert result["teacher_top1"] == first["teacher_top1"] == 100.0


def test_without_its_facts_the_same_teacher_is_at_chance_and_a_warning_says_what_may_be_wrong(letkd, tree, teacher, tmp_path):
    save_weights(load_student(teacher), tmp_path / "plain.safetensors")
    code, _, err = letkd(*command(tree, tmp_path / "plain.safetensors", "--method", "kd"))
    assert code == 0
    (warning,) = [line for line in err.splitlines() if line.startswith("warning")]
    for cause in ("mean 0.485/0.456/0.406", "32x32: teacher.size", "as in the data: teacher.classes", "plain.safetensors"):
        assert cause in warning
    code, _, err = letkd(
        *command(tree, tmp_path / "plain.safetensors", "--method", "kd", "--out", "told"),
        *("--set", f"teacher.mean={list(MEAN)}", "--set", f"teacher.std={list(STD)}", "--set", "teacher.size=48"),
        *("--set", f"teacher.classes={list(ORDER)}"),
    )
    assert code == 0
    assert "100.00 % on 12 validation images" in err


def test_other_classes_are_refused_where_logits_are_read_and_told_elsewhere(letkd, tree, teacher, tmp_path):
    facts = {"mean": MEAN, "std": STD, "size": (32, 32), "classes": ("cat", "dog", "owl")}
    save_student(load_student(teacher), tmp_path / "pets.safetensors", model="resnet8_tiny", num_classes=3, **facts)
    code, _, err = letkd(*command(tree, tmp_path / "pets.safetensors", "--method", "kd"))
    assert code == 2
    assert "kd reads the teacher's logits, and the teacher's classes are not those of folder" in err
    assert "3 (cat, dog, owl) and the data 3 (blue, green, red)" in err
    code, _, err = letkd(*command(tree, tmp_path / "pets.safetensors", "--method", "fitnet"))
    assert code == 0, err
    assert "classes of its own (its logits are not used" in err
    assert json.loads(Path("run/result.json").read_text())["teacher_top1"] is None
    code, _, err = letkd(
        *command(tree, tmp_path / "pets.safetensors", "--method", "kd", "--set", "teacher.classes=data", "--out", "two")
    )
    assert code == 0, err


@pytest.mark.parametrize(
    ("accuracy", "classes", "n", "near"),
    [
        (1.0, 2, 6, False),
        (0.75, 4, 4, False),
        (0.5, 2, 6, True),
        (0.6, 2, 2000, False),
        (0.54, 2, 2000, True),
        (0.05, 10, 10, True),
    ],
)
def test_near_chance(accuracy, classes, n, near):
    assert near_chance(accuracy, 1 / classes, n) == near


def test_a_teacher_is_measured_once_per_run(letkd, tree, teacher, monkeypatch):
    more = command(tree, teacher, "--method", "kd", "--set", "train.epochs=2")
    seen = []
    monkeypatch.setattr("letkd.training.loop.finish", lambda evaluation, steps, state, seconds: seen.append(state.teacher_top1))
    assert "100.00 % on" in letkd(*more)[2]
    assert "100.00 % on" not in letkd(*more)[2]
    assert seen == [100.0, 100.0]


def test_without_validation_images_training_images_serve_and_a_line_says_so(letkd, tree, teacher):
    (tree / "val").rename(tree.parent / "elsewhere")
    code, _, err = letkd(*command(tree, teacher, "--method", "kd", "--set", "data.val=0"))
    assert code == 0, err
    assert "100.00 % on 24 training images (there is no validation split)" in err


OWN = """
import torch
from letkd.models import create_model, load_weights
def loads_its_own(num_classes):
    return create_model("resnet8_tiny", num_classes=num_classes, weights={path!r})
"""


def test_a_callable_that_loads_its_own_weights_is_asked_for_no_file(letkd, tree, teacher, tmp_path):
    (tmp_path / "nets.py").write_text(OWN.format(path=str(teacher)))
    one = ("train", "--data", "folder", "--root", tree, "--teacher", "nets.py:loads_its_own", "--student", "resnet8_tiny")
    code, _, err = letkd(*one, "--method", "kd", *QUICK)
    assert (code, "--teacher-weights own if your callable loads them itself" in err) == (2, True)
    code, _, err = letkd(*one, "--method", "kd", *QUICK, "--teacher-weights", "own", "--out", "run")
    assert code == 0, err
    code, _, err = letkd(*command(tree, "own", "--method", "kd", "--out", "zoo"))
    assert (code, "weights=own was given for 'resnet8_tiny', which does not load weights itself" in err) == (2, True)


def test_a_student_starts_from_weights_of_other_classes(letkd, tree, teacher):
    five = create_model("resnet8_tiny", num_classes=5)
    save_weights(five, "five.safetensors")
    code, _, err = letkd(
        *("train", "--data", "folder", "--root", tree, "--student", "resnet8_tiny", "--method", "ce"),
        *(*QUICK, "--student-weights", "five.safetensors", "--out", "run"),
    )
    assert code == 0, err
    assert "five.safetensors: fc has other classes and is trained from scratch" in err
    recipe = resolve("run/recipe.toml")
    student = build.build_student(recipe.student, build.read_data(recipe))
    assert torch.equal(student.layer1[0].conv1.weight, five.layer1[0].conv1.weight)


def test_a_student_with_a_kd_layer_keeps_it_when_it_learns_other_classes(letkd, tree, teacher, tmp_path):
    small = ("--set", "methods.letkd.sites.penultimate.supervision.K=4", "--set", "teacher.size=32")
    code, _, err = letkd(*command(tree, teacher, "--method", "letkd-1", *small))
    assert code == 0, err
    for split in ("train", "val", "test"):
        shutil.rmtree(tree / split / "red")
    code, _, err = letkd(
        *("train", "--data", "folder", "--root", tree, "--student", "resnet8_tiny", "--method", "ce", *QUICK),
        *("--student-weights", "run/student.safetensors", "--out", "two"),
    )
    assert code == 0, err
    taught = load_student("two/student.safetensors")
    assert taught(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
    assert isinstance(taught.get_submodule("layer3.kd_penultimate"), KDLayer)


def test_a_student_with_a_kd_layer_may_teach(letkd, tree, teacher):
    small = ("--set", "methods.letkd.sites.penultimate.supervision.K=4", "--set", "teacher.size=32")
    assert letkd(*command(tree, teacher, "--method", "letkd-1", *small))[0] == 0
    recipe = resolve("run/recipe.toml", settings=["teacher.weights=run/student.safetensors"])
    model, _ = build_teacher(recipe.teacher, build.read_data(recipe))
    assert any(name.endswith("kd_penultimate") for name, _ in model.named_modules())


NETS = """
from torch import nn
class Block(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.one, self.two, self.relu = nn.Conv2d(a, b, 3, stride, 1), nn.Conv2d(b, b, 3, 1, 1), nn.ReLU()
    def forward(self, x):
        return self.relu(self.two(self.one(x)))
def net(d, num_classes):
    parts = nn.Sequential(Block(3, d, 2), Block(d, d, 1)), nn.Sequential(Block(d, 2 * d, 2), Block(2 * d, 2 * d, 1))
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * d, num_classes))
def small(num_classes):
    return net(4, num_classes)
def large(num_classes):
    return net(6, num_classes)
"""
SMALL = {
    "crd": ("methods.crd.K=4",),
    "letkd-2": ("methods.letkd.sites.penultimate.supervision.K=4", "methods.letkd.sites.intermediate.supervision.K=2"),
}


@pytest.mark.parametrize("method", ["fitnet", "at", "crd", "letkd-2", "simkd", "kd"])
def test_networks_without_a_table_are_read_where_letkd_taps_would(letkd, tree, tmp_path, method):
    (tmp_path / "nets.py").write_text(NETS)
    save_weights(create_model("nets.py:large", num_classes=3), "large.safetensors")
    networks = ("--teacher", "nets.py:large", "--teacher-weights", "large.safetensors", "--student", "nets.py:small")
    settings = [part for value in SMALL.get(method, ()) for part in ("--set", value)]
    code, _, err = letkd(
        *("train", "--data", "folder", "--root", tree, *networks, "--method", method, *QUICK, *settings, "--out", "run")
    )
    assert code == 0, err
    line = (
        "nets.py:{}: no taps named, using those that `letkd taps` proposes: penultimate=1, intermediate=1.0, stage1=0, stage2=1, "
        "pooled=4:input"
    )
    assert (f"student {line.format('small')}" in err) == (method != "kd")
    assert (f"teacher {line.format('large')}" in err) == (method != "kd")
    code, out, _ = letkd("taps", "nets.py:small", "--input", "32x32")
    assert "--tap penultimate=1 --tap intermediate=1.0 --tap stage1=0 --tap stage2=1 --tap pooled=4:input" in out
