"""Runs without labels are exported, calibrated and pruned on their images; what needs labels says so, and no accuracy is stated."""

from pathlib import Path

import pytest

from letkd.deploy.prune import folded_layers
from letkd.distiller.student import load_student
from letkd.progress import set_quiet
from letkd.training.loop import train
from tests.support.runs import images_alone, made_once, save_pictures


@pytest.fixture(scope="module")
def run(tmp_path_factory, teacher) -> Path:
    """A run on images without labels, which are in `pictures` beside it; not to be written to."""

    def make(folder: Path) -> None:
        set_quiet(True)
        train(images_alone("letkd-1", teacher, save_pictures(folder / "pictures")), folder / "run")

    return made_once(tmp_path_factory, "unlabelled-export", make) / "run"


def test_the_file_is_compared_on_the_runs_images(letkd, run):
    code, out, err = letkd("export", run, "--to", "onnx", "--out", "s.onnx")
    assert (code, err) == (0, "")
    assert "real images: " in out


@pytest.mark.parametrize("named", [False, True])
def test_int8_is_calibrated_without_labels(letkd, run, named):
    given = ["--data", "images", "--root", run.parent / "pictures"] if named else []
    code, out, err = letkd("export", run, "--to", "onnx", "--int8", "--batch", 64, "--out", "s.onnx", *given)
    assert (code, err) == (0, "")
    assert "INT8, size: " in out
    assert "accuracy" not in out


@pytest.mark.parametrize("prune", ["unused", "2"])
def test_pruning_needs_no_labels_unless_it_measures(letkd, run, prune):
    code, out, err = letkd("export", run, "--to", "safetensors", "--prune", prune, "--out", "s.safetensors")
    assert (code, err) == (0, "")
    assert "pruned " in out
    assert "time per batch of 1: " in out
    assert "accuracy" not in out
    assert folded_layers(load_student("s.safetensors"))


def test_what_needs_labels_says_so(letkd, run):
    code, out, err = letkd("export", run, "--to", "onnx", "--prune", "auto", "--out", "s.onnx")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--prune auto needs labels to measure the accuracy, and images has none; use --prune unused or a number" in err
    assert letkd("export", run, "--to", "onnx", "--out", "s.onnx")[0] == 0
    images = ["--data", "images", "--root", run.parent / "pictures"]
    for words in (
        [run],
        ["s.onnx", *images],
        ["resnet8_tiny", "--weights", run / "student.safetensors", *images],
    ):
        code, out, err = letkd("eval", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "images has no labels, so no accuracy can be computed" in err


@pytest.mark.parametrize("prune", [[], ["--prune", "2"]])
def test_the_model_card_states_no_accuracy(letkd, run, prune):
    hub = pytest.importorskip("huggingface_hub")
    code, _, err = letkd("export", run, "--to", "hub-folder", "--out", "hub", *prune)
    assert (code, err) == (0, "")
    card = hub.ModelCard.load("hub/README.md")
    assert card.data.eval_results is None
    assert "The accuracy of this model was not measured." in card.text
    assert card.text.lower().count("accuracy") == 1
    assert "trained without labels" in card.text
