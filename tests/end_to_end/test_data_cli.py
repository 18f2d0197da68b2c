"""`letkd data`, and a run on a tree of image files, as a person meets them."""

import pytest

from letkd.distiller.student import load_student
from letkd.models import save_weights
from tests.support.trees import a_tiny_imagenet, a_tree, an_imagenet, spoil


def row(printed: str, split: str) -> list[str]:
    (line,) = (line for line in printed.splitlines() if line.strip("│").split("│")[0].strip() == split)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_tree_in_order(letkd, tmp_path):
    a_tree(tmp_path / "tree" / "train", {"ant": 3, "bee": 2})
    a_tree(tmp_path / "tree" / "test", {"ant": 1, "bee": 1})
    (tmp_path / "tree" / "train" / "ant" / "notes.txt").write_text("x")
    code, out, err = letkd("data", "check", "folder", "--root", "tree", "--workers", 0)
    assert (code, err) == (0, "")
    assert row(out, "train") == ["train", "5", "2", "20 to 22 x 16 to 16", "1", "0"]
    assert row(out, "test") == ["test", "2", "2", "20x16", "0", "0"]


def test_a_tree_with_everything_wrong(letkd, tmp_path):
    tree = a_tree(tmp_path / "tree" / "train", {"ant": 3, "bee": 2})
    a_tree(tmp_path / "tree" / "test", {"ant": 1, "cow": 1})
    (tree / "dog").mkdir()
    spoil(tree / "ant" / "001.png")
    code, out, err = letkd("data", "check", "folder", "--root", "tree", "--workers", 1)
    assert code == 2
    assert err.splitlines()[-1] == "letkd: folder: 3 problem(s), listed above"
    assert row(out, "train")[1:] == ["5", "2", "20 to 22 x 16 to 16", "0", "2"]
    assert "the class dog has no image in train" in out
    assert "ant/001.png cannot be decoded" in out
    assert "the class cow of test is not in train" in out


def test_images_without_classes(letkd, tmp_path):
    tree = a_tree(tmp_path / "tree", {"ant": 3, "bee": 2})
    spoil(tree / "ant" / "001.png")
    code, out, err = letkd("data", "check", "images", "--root", "tree", "--workers", 0)
    assert (code, err.splitlines()[-1]) == (2, "letkd: images: 1 problem(s), listed above")
    assert row(out, "train")[1:] == ["5", "0", "20 to 22 x 16 to 16", "0", "1"]
    assert "ant/001.png cannot be decoded" in out
    assert "networks get 224x224 (data.size)" in out.replace("\n", " ")


def test_official_sets_are_counted(letkd, tmp_path):
    a_tiny_imagenet(tmp_path)
    an_imagenet(tmp_path / "in", flat=True)
    code, out, _ = letkd("data", "check", "tiny-imagenet", "--root", ".")
    assert code == 2
    assert "tiny-imagenet has 100,000 images of 200 classes in train; found 12 of 3" in out
    code, out, _ = letkd("data", "check", "imagenet", "--root", "in")
    assert code == 2
    assert "imagenet has 50,000 images of 1,000 classes in test; found 5 of 3" in out
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(b"x")
    assert "tiny-imagenet-200.zip has the MD5 9dd4e461268c8034f5c8564e155c67a6, not the published" in letkd(
        "data", "check", "tiny-imagenet", "--root", "."
    )[1].replace("\n", " ")


def test_digits_are_whole(letkd):
    code, out, _ = letkd("data", "check", "digits")
    assert code == 0
    assert row(out, "test") == ["test", "720", "10", "32x32", "0", "0"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["check", "cifar10", "--root", "nowhere"],
            "nowhere does not exist, so cifar10 cannot be read from it; get it with `letkd data get",
        ),
        (["check", "cifar10"], "no folder was named"),
        (["check", "fold"], "there is no data set 'fold'; nearest: folder"),
        (["check", "/"], "'/' is a folder, not a data set; use the data set 'folder' with --root '/'"),
        (["check", "folder", "--root", "."], "has no sub-folders"),
        (["get", "imagenet"], "imagenet can be downloaded only after agreeing to its terms"),
        (["get", "cifar"], "no data set 'cifar' to get; nearest: cifar10"),
    ],
)
def test_wrong_input_is_one_sentence(letkd, arguments, sentence):
    code, _, err = letkd("data", *arguments)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("augment", ["resized-crop", "rotate"])
def test_training_and_evaluating_on_a_tree(letkd, tmp_path, augment):
    a_tree(tmp_path / "tree", {"ant": 10, "bee": 10}, suffix=".jpg", size=(40, 32))
    options = ["--data", "folder", "--root", "tree", "--student", "resnet8_tiny", "--method", "ce", "--epochs", "1"]
    options += [
        "--set",
        "data.size=32",
        "--set",
        f"data.augment={augment}",
        "--set",
        "data.workers=1",
        "--set",
        "data.batch_size=4",
    ]
    code, out, err = letkd("train", *options, "--out", "run")
    assert code == 0, err
    assert "are the test split" in err
    code, out, err = letkd("eval", "run")
    assert code == 0, err
    assert row(out, "test")[-1] == "4"
    spoil(tmp_path / "tree" / "ant" / "003.jpg")
    code, out, err = letkd("train", *options, "--out", "again")
    assert code == 2
    assert "003.jpg cannot be decoded" in err
    assert "Traceback" not in err
    code, out, err = letkd("train", *options, "--set", "data.corrupt=skip", "--out", "skipped")
    assert code == 0, err
    assert "1 of 20 files of its train part cannot be decoded and are left out" in err


def test_eval_takes_the_size_from_the_weights_then_the_network(letkd, tmp_path):
    """A student of 48x32 pixels and plain weights of a 32-pixel network see a folder's images at their own sizes, not at 224."""
    a_tree(tmp_path / "tree", {"ant": 10, "bee": 10}, size=(40, 32))
    settings = [word for text in ("data.size=48x32", "data.workers=0", "data.batch_size=4") for word in ("--set", text)]
    folder = ["--data", "folder", "--root", "tree"]
    code, _, err = letkd("train", *folder, "--student", "resnet8_tiny", "--method", "ce", "--quick", *settings, "--out", "run")
    assert code == 0, err
    (tmp_path / "student.safetensors").write_bytes((tmp_path / "run" / "student.safetensors").read_bytes())
    model = load_student("student.safetensors")
    save_weights(model, "plain.safetensors")
    mean, std = ("--mean", "0.485,0.456,0.406"), ("--std", "0.229,0.224,0.225")

    def found(*arguments):
        code, out, err = letkd("eval", *arguments)
        assert code == 0, err
        return row(out, "test"), err

    by_run, by_facts = found("run")[0], found("student.safetensors", *folder)[0]
    assert by_run == by_facts == found("resnet8_tiny", "--weights", "student.safetensors", *folder)[0]
    by_network, err = found("resnet8_tiny", "--weights", "plain.safetensors", *folder)
    assert "size" not in err
    assert by_network == found("resnet8_tiny", "--weights", "plain.safetensors", *folder, "--size", "32", *mean, *std)[0]
    assert by_run == found("resnet8_tiny", "--weights", "plain.safetensors", *folder, "--size", "48x32")[0]
    assert len({by_run[3], by_network[3], found("run", "--size", "20")[0][3]}) == 3
    (tmp_path / "own.py").write_text("from letkd import create_model as c\n\ndef net(num_classes):\n    m = c('resnet8_tiny', ")
    with (tmp_path / "own.py").open("a") as file:
        file.write("num_classes=num_classes)\n    m.input_size = None\n    return m\n")
    _, err = found("own.py:net", "--weights", "plain.safetensors", *folder)
    assert "does not define its input size: evaluated at 224x224; set another with --size" in err
    _, err = found("resnet8_tiny", "--weights", "plain.safetensors", *folder, "--size", "40")
    code, _, err = letkd("eval", "run", "--size", "a")
    assert (code, err.count("\n")) == (2, 1)
    assert "--size 'a': an image size is one side (32) or height and width" in err


def test_what_networks_get_of_a_tree(letkd, tmp_path):
    a_tree(tmp_path / "tree", {"ant": 3}, size=(32, 32))
    sentences = {
        (): "networks get 224x224 (data.size): 0 images unchanged, 3 scaled, shorter side to 256 (data.resize)",
        ("--size", "32"): "networks get 32x32 (data.size): 1 images unchanged, 2 scaled, shorter side to 37 (data.resize)",
        ("--size", "32", "--resize", "40"): "0 images unchanged, 3 scaled, shorter side to 40 (data.resize)",
        ("--size", "16x32"): "0 images unchanged, 3 scaled, until they cover 18x36 (data.resize), and centre-cropped",
    }
    for options, sentence in sentences.items():
        code, out, err = letkd("data", "check", "folder", "--root", "tree", "--workers", 0, *options)
        assert code == 0, err
        assert sentence in out
    code, _, err = letkd("data", "check", "folder", "--root", "tree", "--size", "32", "--resize", "30")
    assert (code, "`resize` must be at least the shorter side of `size`" in err) == (2, True)


def test_a_tree_of_odd_names(letkd, tmp_path):
    """New lines, escapes, markup and bytes that are no text: through the check, a run, its evaluation and a prediction."""
    names = ("new\nline", "\x1b[31mred", "cost_$5_to_$10", "[bold]", "[/]", "\udcff")
    a_tree(tmp_path / "[/] [red]$x", dict.fromkeys(names, 5), size=(32, 32))
    data = ["--data", "folder", "--root", "[/] [red]$x"]
    empty = tmp_path / "[/] [red]$x" / names[0] / "empty.png"
    empty.write_bytes(b"")
    code, out, err = letkd("data", "check", "folder", *data[2:], "--workers", 0)
    assert code == 2
    assert r"new\nline/empty.png cannot be decoded (the file is empty)" in out
    assert "folder in [/] [red]$x" in out
    settings = [word for text in ("data.size=32", "data.workers=0", "data.batch_size=4") for word in ("--set", text)]
    options = [*data, "--student", "resnet8_tiny", "--method", "ce", "--quick", *settings]
    code, _, err = letkd("train", *options, "--set", "data.corrupt=skip", "--out", "[/]run")
    assert code == 0, err
    code, out, err = letkd("eval", "[/]run")
    assert code == 0, err
    assert "[/]run" in out
    code, out, err = letkd("predict", "[/]run/student.safetensors", tmp_path / "[/] [red]$x" / names[1], "--top", 6)
    assert code == 0, err
    for name in (r"new\nline", r"\x1b[31mred", "cost_$5_to_$10", "[bold]", "[/]", r"\udcff"):
        assert name in out
