"""A model card gives an accuracy only if one was measured, and names the code that is not in its folder."""

import pytest

from letkd.deploy.card import Origin, body, metadata
from letkd.deploy.source import PRUNED, Measured
from letkd.recipes import resolve

hub = pytest.importorskip("huggingface_hub")


def a_config(model: str = "resnet8_tiny") -> dict:
    known = {"num_classes": 3, "classes": [], "size": (32, 32), "mean": [0.5] * 3, "std": [0.2] * 3, "letkd_version": "1"}
    return {**known, "model": model, "teacher": None, "changes": []}


def test_without_a_measurement_the_card_gives_no_accuracy():
    recipe = resolve("digits/tiny/ce", overrides={"data.name": "cifar10"})
    for labelled in (True, False):
        origin = Origin(recipe, labelled=labelled)
        data = metadata(hub, "a title", origin, None).to_dict()
        assert data["datasets"] == ["uoft-cs/cifar10"]
        assert not {"model-index", "metrics"} & data.keys()
        text = body("a title", origin, a_config(), None)
        assert "The accuracy of this model was not measured." in text
        assert text.lower().count("accuracy") == 1
        assert ("trained without labels" in text) != labelled


def test_the_accuracy_is_of_the_data_set_it_was_measured_on():
    origin = Origin(resolve("digits/tiny/ce"), Measured(87.64, "cifar10", PRUNED))
    (result,) = metadata(hub, "a title", origin, None).eval_results
    assert (result.metric_value, result.dataset_name, result.dataset_type) == (0.8764, "cifar10", "uoft-cs/cifar10")
    text = body("a title", origin, a_config(), None)
    assert "| Test accuracy of this checkpoint | 87.64 % on cifar10, after pruning |" in text
    assert "measured on the test split of cifar10" in text
    assert "over seeds" not in text
    assert "last epoch" not in text


@pytest.mark.parametrize(
    ("model", "needs", "argument"),
    [
        ("nets.py:small", "defined in `nets.py`, which is needed and is not part of this folder", ", model='nets.py:small'"),
        ("some/folder/nets.py:small", "defined in `nets.py`, which is needed", ", model='nets.py:small'"),
        ("own.nets:small", "defined in the Python module `own.nets`, which is needed", ", model='own.nets:small'"),
        ("timm:resnet10t", None, ", model='timm:resnet10t'"),
        ("resnet8_tiny", None, ""),
    ],
)
def test_code_that_is_not_in_the_folder_is_named(model, needs, argument):
    text = body("a title", Origin(), a_config(model), None)
    assert (needs is None) == ("which is needed" not in text)
    assert needs is None or needs in text
    assert f'letkd.load_student("."{argument})' in text
    assert "some/folder" not in text


@pytest.mark.parametrize("unknown", [{"mean": None, "std": None}, {"std": None}])
def test_without_mean_and_std_the_card_says_that_the_normalisation_is_not_known(unknown):
    text = body("a title", Origin(), {**a_config("torchvision:resnet18"), **unknown}, None)
    assert "normalised by the mean and std" not in text
    assert "| Input | RGB, 32x32, with an unknown normalisation |" in text
    assert text.count("logits = student(images / 255)  # the normalisation is not known") == 2
    assert "mean, std =" not in text


@pytest.mark.parametrize(("model", "sized"), [("timm:vit_tiny_patch16_224", True), ("torchvision:resnet18", False)])
def test_a_transformer_of_timm_is_loaded_at_the_size_it_was_trained_at(model, sized):
    without = body("a title", Origin(), a_config(model), None).partition("Without letkd")[2]
    assert ("student.set_input_size(img_size=tuple(config[" in without.partition("load_state_dict")[0]) == sized


def test_a_network_of_transformers_is_not_said_to_be_of_the_zoo():
    text = body("a title", Origin(), a_config("transformers:ResNetConfig"), None)
    assert "the network is built by transformers, with `num_labels`;" in text
    assert "zoo" not in text
    assert "the network is part of letkd's zoo;" in body("a title", Origin(), a_config(), None)
