"""`letkd predict` names the classes of image files by the model's file alone, whatever the images are like."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from letkd import create_model, load_student
from letkd.data import load_data
from letkd.data.loader import normalise
from letkd.data.pictures import as_tensor, centred
from letkd.deploy.predict import find_images, predict, read_image
from letkd.deploy.runners import Runner
from letkd.deploy.ship import ship
from letkd.deploy.source import open_source
from letkd.distiller.facts import Facts, facts_from_json
from letkd.distiller.student import save_student
from letkd.errors import CheckpointError

DATA = load_data("digits")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """One student in its three kinds of file."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    student = create_model("resnet8_tiny", num_classes=10)
    path = folder / "student.safetensors"
    save_student(student, path, model="resnet8_tiny", num_classes=10, classes=DATA.classes, mean=DATA.mean, std=DATA.std)
    source = open_source(path)
    return {"safetensors": path, **{to: ship(source, to).path for to in ("torch-export", "onnx")}}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Five digits as files of five kinds, two below the folder, and one file that is no image."""
    pictures = [Image.fromarray(DATA.test.images[i].permute(1, 2, 0).numpy()) for i in range(5)]
    (tmp_path / "images" / "more").mkdir(parents=True)
    pictures[0].save(tmp_path / "images" / "a.png")
    pictures[1].convert("L").save(tmp_path / "images" / "b.png")
    wide = np.array(pictures[2].convert("L")).astype(np.uint16) * 257
    Image.fromarray(wide).save(tmp_path / "images" / "c.png")
    pictures[3].convert("RGBA").save(tmp_path / "images" / "more" / "d.webp", lossless=True)
    pictures[4].convert("CMYK").save(tmp_path / "images" / "more" / "e.tiff")
    (tmp_path / "images" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def wanted(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_student(path)(normalise(DATA.test.images[:5], DATA.mean, DATA.std)).softmax(dim=1)


@pytest.mark.parametrize("kind", ["safetensors", "torch-export", "onnx"])
def test_every_kind_of_file_names_the_same_classes(letkd, models, folder, kind):
    trust = ["--trust"] if kind == "torch-export" else []
    code, out, err = letkd("predict", models[kind], folder, "--top", 3, "--format", "json", *trust)
    assert (code, err) == (0, "")
    rows, truth = json.loads(out), wanted(models["safetensors"])
    assert [Path(row["image"]).name for row in rows] == ["a.png", "b.png", "c.png", "d.webp", "e.tiff"]
    for row, probabilities in zip(rows, truth, strict=True):
        best = probabilities.topk(3)
        assert [part["class"] for part in row["classes"]] == [DATA.classes[k] for k in best.indices]
        assert [part["probability"] for part in row["classes"]] == pytest.approx(best.values.tolist(), abs=2e-3)


def test_hidden_files_are_left_out_unless_named(tmp_path):
    for name in ("a.png", "._a.png", ".trash/y.png", "in/b.PNG", "in/.c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    assert find_images([tmp_path]) == [tmp_path / "a.png", tmp_path / "in" / "b.PNG"]
    assert find_images([tmp_path / ".trash"]) == [tmp_path / ".trash" / "y.png"]
    assert find_images([tmp_path / "._a.png"]) == [tmp_path / "._a.png"]


def test_csv_and_table(letkd, models, folder):
    best = wanted(models["safetensors"])[0].topk(2)
    code, out, _ = letkd("predict", models["safetensors"], folder / "a.png", "--top", 2, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [(row["rank"], row["class"]) for row in rows] == [("1", str(int(best.indices[0]))), ("2", str(int(best.indices[1])))]
    assert float(rows[0]["probability"]) == pytest.approx(float(best.values[0]), abs=1e-4)
    code, out, _ = letkd("predict", models["safetensors"], folder / "a.png", "--top", 1)
    assert code == 0
    assert f"{int(best.indices[0])} {100 * float(best.values[0]):.1f} %" in out


def test_a_damaged_image_is_named_and_the_others_go_on(letkd, models, folder):
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes()[:80])
    code, out, err = letkd("predict", models["safetensors"], folder, "--format", "json")
    assert code == 2
    assert len(json.loads(out)) == 4
    assert f"letkd: {folder / 'b.png'} cannot be decoded (" in err
    assert err.endswith("letkd: 1 of 5 images could not be read\n")


@pytest.mark.parametrize(
    ("model", "image", "says"),
    [
        ("nothing.onnx", "images/a.png", "there is no model file nothing.onnx"),
        ("images", "images/a.png", "images is a folder; name a model file"),
        ("images/notes.txt", "images/a.png", "is not a model file: their names end in .onnx, .pt2, .safetensors"),
        ("bad.onnx", "images/a.png", "bad.onnx is damaged or not in ONNX format"),
        ("bad.pt2", "images/a.png", "bad.pt2 was not opened: opening a torch.export file can run any code that is in it"),
        ("{safetensors}", "images/z.png", "there is no image or folder images/z.png"),
        ("{safetensors}", "empty", "the folder empty has no images"),
    ],
)
def test_wrong_names_are_told(letkd, models, folder, tmp_path, model, image, says):
    (tmp_path / "empty").mkdir()
    for name in ("bad.onnx", "bad.pt2"):
        (tmp_path / name).write_bytes(b"damaged")
    code, out, err = letkd("predict", model.format(**models), image)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_images_come_as_in_evaluation(tmp_path):
    """Scaled until it covers the size, the centre cut out."""
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 255
    path = tmp_path / "wide.png"
    Image.fromarray(wide).save(path)
    assert (read_image(path, Facts(num_classes=2, size=(10, 10), resize=10)) == 255).all()
    assert read_image(path, Facts(num_classes=2)).shape == (3, 10, 30)
    assert torch.equal(read_image(path, Facts(num_classes=2, size=(10, 30))), as_tensor(Image.fromarray(wide)))
    assert torch.equal(read_image(path, Facts(num_classes=2, size=(4, 6))), as_tensor(centred(Image.fromarray(wide), (4, 6))))
    large = read_image(path, Facts(num_classes=2, size=(10, 10), resize=40))
    assert torch.equal(large, as_tensor(centred(Image.fromarray(wide), (10, 10), 40)))


def test_facts_come_back_and_false_ones_do_not():
    facts = Facts(num_classes=2, classes=("a", "b"), mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0), size=(4, 5), input="uint8")
    assert facts_from_json(facts.as_json(), "x") == facts
    table = json.loads(facts.as_json())
    for key, value in (
        ("num_classes", 0),
        ("classes", ["a"]),
        ("mean", [0.1]),
        ("std", [0, 1, 1]),
        ("size", [4]),
        ("input", "grey"),
    ):
        with pytest.raises(CheckpointError, match=f"its header is wrong at {key}"):
            facts_from_json(json.dumps({**table, key: value}), "x")
    for text in (None, "", "{", "[]", json.dumps({**table, "format": "other"})):
        with pytest.raises(CheckpointError, match="x has no metadata of letkd"):
            facts_from_json(text, "x")


def test_large_images_come_in_small_batches(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    sizes = []

    def run(x):
        sizes.append(len(x))
        return torch.zeros(len(x), 2)

    for size, batches in ((64, [32, 1]), (1024, [8, 8, 8, 8, 1])):
        sizes.clear()
        runner = Runner(run, Facts(num_classes=2, size=(size, size), input="uint8"))
        assert len(list(predict(runner, [tmp_path / "a.png"] * 33))) == 33
        assert sizes == batches
