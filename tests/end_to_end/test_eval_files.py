"""An exported file is evaluated on the split of its run, or a message says that the split is not known to be that one."""

import shutil
from pathlib import Path

import pytest

from letkd.deploy.ship import ship
from letkd.deploy.source import open_source
from letkd.distiller.student import load_student, read_header, save_student
from letkd.progress import set_quiet
from letkd.recipes import resolve
from letkd.training.loop import train
from letkd.training.students import images_for
from tests.support.runs import SMALL, made_once, recipe_for, save_pictures
from tests.support.trees import a_tree

DEFAULT = "split of digits is the data set's default one, not that of a run; the network may have been trained on these images"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run without a validation split, with an exported file; not to be written to."""

    def make(folder: Path) -> None:
        set_quiet(True)
        train(resolve("digits/tiny/ce", settings=[*SMALL, "data.val=0", "train.epochs=1"]), folder)
        ship(open_source(folder), "onnx")

    return made_once(tmp_path_factory, "eval-files", make)


@pytest.mark.parametrize("name", ["student.onnx", "student.safetensors"])
def test_a_file_in_a_run_folder_has_the_splits_of_the_run(letkd, run, name):
    code, out, err = letkd("eval", run / name, "--data", "digits", "--split", "val")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "the val split of digits is empty here" in err
    images = len(open_source(run).data.train)
    for given in (["--data", "digits"], []):
        code, out, err = letkd("eval", run / name, *given, "--split", "train")
        assert (code, err) == (0, "")
        assert out.splitlines()[-2].split()[-2] == str(images)


@pytest.mark.parametrize("name", ["student.onnx", "student.safetensors"])
def test_a_file_elsewhere_has_the_default_splits_which_is_told(letkd, run, tmp_path, name):
    shutil.copy(run / name, tmp_path / name)
    for split, told in (("val", True), ("train", True), ("test", False)):
        code, _, err = letkd("eval", name, "--data", "digits", "--split", split)
        assert code == 0, err
        assert (f"the {split} {DEFAULT}" in err) == told
    code, _, err = letkd("eval", name)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{name} is not in a run folder: name the data set with --data" in err


@pytest.mark.parametrize("split", ["train", "test"])
def test_images_that_a_run_added_without_labels_are_not_needed(letkd, tmp_path, teacher, split):
    extra = save_pictures(tmp_path / "extra")
    train(recipe_for("kd", teacher, f"data.unlabelled={extra}"), tmp_path / "run")
    shutil.rmtree(extra)
    code, out, err = letkd("eval", tmp_path / "run", "--split", split)
    assert code == 0, err
    assert "%" in out


def test_a_network_with_weights_has_the_default_splits_which_is_told(letkd, run):
    words = ["eval", "resnet8_tiny", "--weights", run / "student.safetensors", "--data", "digits", "--split", "val"]
    code, _, err = letkd(*words)
    assert code == 0, err
    assert f"the val {DEFAULT}" in err


def test_a_student_file_named_as_weights_keeps_its_normalisation_and_its_classes(letkd, run, tmp_path):
    normalisation = {"mean": [0.9] * 3, "std": [0.05] * 3}
    header = {**read_header(run / "student.safetensors"), **normalisation}
    save_student(load_student(run / "student.safetensors"), tmp_path / "s.safetensors", **header)
    as_weights = ["eval", "resnet8_tiny", "--weights", "s.safetensors", "--data", "digits"]
    code, out, err = letkd(*as_weights)
    assert code == 0, err
    row = out.splitlines()[-2]
    assert row == letkd("eval", "s.safetensors", "--data", "digits")[1].splitlines()[-2]
    given = ["--mean", "0.1,0.1,0.1", "--std", "0.3,0.3,0.3"]
    of_given = letkd(*as_weights, *given)[1].splitlines()[-2]
    assert of_given == letkd("eval", "s.safetensors", "--data", "digits", *given)[1].splitlines()[-2] != row
    a_tree(tmp_path / "tree", {f"class {k}": 2 for k in range(10)})
    code, out, err = letkd(*as_weights[:-1], "folder", "--root", "tree")
    assert (code, out) == (2, "")
    assert "s.safetensors has the class '0' in place of 'class 0' in folder" in err.splitlines()[-1]


def test_images_of_another_size_show_the_same_part_of_a_picture(tmp_path):
    tree = a_tree(tmp_path / "tree", {"ant": 6, "bee": 6}, size=(40, 32))
    overrides = {"data.name": "folder", "data.root": str(tree), "student.model": "resnet8_tiny"}
    settings = ["data.size=16", "data.resize=20", "data.augment=none", "data.batch_size=4", "train.epochs=1", "train.steps=1"]
    train(resolve(None, method="ce", overrides=overrides, settings=settings), tmp_path / "run")
    in_run = tmp_path / "run" / "student.safetensors"
    alone = shutil.copy(in_run, tmp_path / "s.safetensors")
    trained = open_source(alone).facts
    for size, resize in (((8, 8), 10), ((32, 24), 30), (None, 20)):
        changed = open_source(alone, size=size).facts
        assert changed.resize == resize
        for file in (in_run, alone):
            for facts, asked in ((trained, size), (changed, None)):
                images = images_for(file, facts, data="folder", root=tree, size=asked)
                assert (images.train.image_size, images.train.resize) == (size or (16, 16), resize)


@pytest.mark.parametrize("name", ["student.onnx", "student.safetensors"])
def test_images_whose_classes_are_in_another_order_are_refused(letkd, run, tmp_path, name):
    a_tree(tmp_path / "tree", {f"class {k}": 2 for k in range(10)})
    code, out, err = letkd("eval", run / name, "--data", "folder", "--root", "tree")
    assert (code, out) == (2, "")
    assert (
        f"{name} has the class '0' in place of 'class 0' in folder; name the data set it was trained on" in err.splitlines()[-1]
    )
