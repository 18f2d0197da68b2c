"""Networks of timm, torchvision and transformers, from `create_model` to a trained student; `make test-extras` installs all three."""

import contextlib
import importlib.util
import json
import re
import sys

import pytest
import torch
from torch import nn

import letkd
from letkd.distiller.student import load_student
from letkd.errors import LetkdError
from letkd.models import create_model, save_weights
from letkd.models.cost import macs, parameters
from letkd.taps import as_logits, probe
from tests.support import networks as small  # it also makes torchvision import
from tests.support.pair import images
from tests.support.runs import save_pictures


def needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: `make test-extras`, or pip install 'letkd[{library}]'")


@pytest.fixture
def folder(tmp_path):
    """A configuration as transformers writes it: a small ResNet."""
    table = {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 2],
        "layer_type": "basic",
        "num_labels": 7,
    }
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(table))
    return tmp_path / "small"


# Parameters with 1000 classes, as published.
PUBLISHED = {
    "timm:resnet18": 11_689_512,
    "timm:mobilenetv3_small_100": 2_542_856,
    "torchvision:resnet18": 11_689_512,
    "torchvision:mobilenet_v2": 3_504_872,
    "transformers:ResNetConfig": 25_557_032,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_networks_have_the_published_size_and_two_sites(name):
    needs(name.partition(":")[0])
    model, example = create_model(name, num_classes=1000), torch.zeros(1, 3, 64, 64)
    assert parameters(model) == PUBLISHED[name]
    found = letkd.find_taps(model, example)
    assert set(found) == {"penultimate", "intermediate", "stage1", "stage2", "stage3", "stage4", "pooled"}
    assert found["pooled"].io == "input"
    output, f = probe(model, found, example)
    assert as_logits(output, model).shape == (1, 1000)
    assert all(value.ndim == (2 if role == "pooled" else 4) for role, value in f.items())
    assert macs(model, example) > 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("timm:resnet19", "timm has no model 'resnet19'; nearest: .*resnet18"),
        ("timm:hf-hub:some/model", "timm has no model 'hf-hub:some/model'"),
        ("torchvision:resnet19", "torchvision has no classifier 'resnet19'; nearest: .*resnet18"),
        ("torchvision:fcn_resnet50", "torchvision has no classifier 'fcn_resnet50'"),
        ("transformers:ResNettConfig", "transformers has no configuration 'ResNettConfig'; nearest: .*ResNetConfig"),
        ("transformers:BertConfig", "transformers:BertConfig could not be built: ValueError: Unrecognized configuration class"),
        ("transformers:some/name", "nor a folder with a config.json, nor in the local cache; nothing is downloaded"),
    ],
)
def test_names_that_are_not_there(name, sentence, monkeypatch):
    needs(name.partition(":")[0])
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("somebody asked the network"))
    with pytest.raises(LetkdError, match=sentence) as caught:
        create_model(name, num_classes=3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_state_dicts_of_torchvision_load_into_the_zoo_and_back(name, tmp_path):
    """All three have the same names for the same weights, bare or under a key, with `module.` or without."""
    needs(name.partition(":")[0])
    foreign = create_model(name, num_classes=5).eval()
    torch.save(foreign.state_dict(), tmp_path / "bare.pth")
    torch.save(
        {"state_dict": {f"module.{key}": value for key, value in foreign.state_dict().items()}}, tmp_path / "ddp.pth.tar"
    )
    x = torch.randn(2, 3, 64, 64)
    for file in ("bare.pth", "ddp.pth.tar"):
        ours = create_model("resnet18", num_classes=5, weights=tmp_path / file).eval()
        torch.testing.assert_close(ours(x), foreign(x))
    save_weights(ours, tmp_path / "ours.safetensors")
    torch.testing.assert_close(create_model(name, num_classes=5, weights=tmp_path / "ours.safetensors").eval()(x), ours(x))


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18", "transformers:ResNetConfig"])
def test_a_head_of_another_size_never_loads_silently(name, tmp_path):
    needs(name.partition(":")[0])
    save_weights(create_model(name, num_classes=10), tmp_path / "ten.safetensors")
    with pytest.raises(
        LetkdError, match=r"2 wrong shapes \((fc|classifier\.1)\.weight is \[10, \d+\] in the file and \[7, \d+\] in the model"
    ):
        create_model(name, num_classes=7, weights=tmp_path / "ten.safetensors")


def test_transformers_from_a_folder_answer_with_logits(folder):
    needs("transformers")
    model = create_model(f"transformers:{folder}", num_classes=5)
    x, _ = images(2, size=(32, 32))
    output = model(x)
    assert not isinstance(output, torch.Tensor)
    assert as_logits(output, model).shape == (2, 5)
    assert torch.equal(model(pixel_values=x).logits, output.logits)


def test_transformers_of_another_image_size_get_a_sentence(letkd):
    needs("transformers")
    code, _, err = letkd("taps", "transformers:ViTConfig", "--input", "32x32")
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(r"failed on a tensor \[1, 3, 32, 32\] with ValueError: .*224", err)
    code, _, err = letkd("train", "digits/tiny/ce", "--student", "transformers:ViTConfig", "--quick")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("name", "taps"),
    [
        ("timm:vit_tiny_patch16_224", "penultimate=blocks.10:tokens --tap intermediate=blocks.9:tokens"),
        ("timm:deit_tiny_distilled_patch16_224", "penultimate=blocks.10:tokens --tap intermediate=blocks.9:tokens"),
        (
            "timm:swin_tiny_patch4_window7_224",
            "penultimate=norm:channels-last --tap intermediate=layers.3.blocks.0:channels-last",
        ),
        ("transformers:ViTConfig", "penultimate=vit.layers.10:tokens --tap intermediate=vit.layers.9:tokens"),
        (
            "transformers:SwinConfig",
            "penultimate=swin.layernorm:tokens --tap intermediate=swin.encoder.layers.3.blocks.0:tokens",
        ),
        (
            "torchvision:vit_b_16",
            "penultimate=encoder.layers.encoder_layer_10:tokens --tap intermediate=encoder.layers.encoder_layer_9:tokens",
        ),
        ("torchvision:swin_t", "penultimate=permute --tap intermediate=features.7.0:channels-last"),
    ],
)
def test_transformers_of_images_get_places_with_their_layout(letkd, name, taps):
    """At their published sizes."""
    needs(name.partition(":")[0])
    code, out, _ = letkd("taps", name)
    assert code == 0
    assert f"--tap {taps} --tap stage1=" in out
    assert re.findall(r"--tap (\w+)=", out)[:7] == [
        *("penultimate", "intermediate", "stage1", "stage2", "stage3", "stage4", "pooled")
    ]


# ------------------------------------------------------------------------------------------------ folders of transformers

SMALL = {
    "ViTConfig": {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 32,
    },
    "SwinConfig": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "image_size": 32, "patch_size": 4},
    "Dinov2Config": {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
    "ResNetConfig": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
}


@pytest.fixture
def saved(tmp_path):
    """A classifier of three classes as `save_pretrained` writes it, and the classifier."""

    def save(kind="ViTConfig", classes=("red", "blue", "green"), size=32):
        needs("transformers")
        import transformers  # pyright: ignore[reportMissingImports]

        labels = dict(enumerate(classes))
        config = getattr(transformers, kind)(**SMALL[kind], id2label=labels, label2id={name: k for k, name in labels.items()})
        model = transformers.AutoModelForImageClassification.from_config(config).eval()
        model.save_pretrained(tmp_path / "saved")
        fed = {
            "do_normalize": True,
            "image_mean": [0.1, 0.2, 0.3],
            "image_std": [0.5, 0.6, 0.7],
            "size": {"height": size, "width": size},
        }
        (tmp_path / "saved" / "preprocessor_config.json").write_text(json.dumps(fed))
        return tmp_path / "saved", model

    return save


@pytest.mark.parametrize("kind", SMALL)
def test_a_folder_of_transformers_loads_whatever_its_keys_on_disk(saved, kind, monkeypatch):
    folder, model = saved(kind)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("somebody asked the network"))
    x = torch.rand(2, 3, 32, 32)
    for name, weights in [
        (f"transformers:{folder}", folder),
        (f"transformers:{folder}", "own"),
        (f"transformers:{kind}", folder / "model.safetensors"),
    ]:
        loaded = create_model(name, num_classes=3, weights=weights).eval()
        torch.testing.assert_close(as_logits(loaded(x), loaded), as_logits(model(x), model))


def test_a_folder_of_transformers_with_another_head(saved, said):
    folder, _ = saved()
    with pytest.raises(
        LetkdError, match=r"does not fit ViTForImageClassification with 5 classes: 2 weights .*classifier.bias \[3\] for \[5\]"
    ):
        create_model(f"transformers:{folder}", num_classes=5, weights=folder)
    model = create_model(f"transformers:{folder}", num_classes=5, weights=folder, new_head=True)
    assert as_logits(model(torch.rand(1, 3, 32, 32)), model).shape == (1, 5)
    assert "its classifier has other classes and is trained from scratch" in said()


@pytest.fixture
def backbone(saved):
    """A folder as released DINOv2 checkpoints are, without the classifier that transformers by itself would draw at random."""
    import safetensors.torch

    folder, model = saved("Dinov2Config")
    path = folder / "model.safetensors"
    held = {key: value for key, value in safetensors.torch.load_file(path).items() if not key.startswith("classifier")}
    safetensors.torch.save_file(held, path, {"format": "pt"})
    return folder, model


def test_a_folder_without_its_classifier_is_a_backbone_or_refused(backbone):
    folder, whole = backbone
    with pytest.raises(LetkdError, match=r"2 weights are missing or of another shape \(classifier.bias, classifier.weight\)"):
        create_model(f"transformers:{folder}", num_classes=3, weights=folder)
    model = create_model(f"transformers:{folder}", num_classes=3, weights=folder, headless=True).eval()
    x = torch.rand(2, 3, 32, 32)
    assert model.num_classes == 0
    assert letkd.find_taps(model, x[:1])["penultimate"] == letkd.Tap("layernorm", 24, 8, layout="tokens")
    torch.testing.assert_close(model(x).last_hidden_state, whole.dinov2(x).last_hidden_state)


def test_a_bare_vision_tower_is_a_backbone(tmp_path):
    """SigLIP's has no classifier in transformers at all."""
    needs("transformers")
    tower = small.transformers_siglip(0).eval()
    tower.save_pretrained(tmp_path / "siglip")
    model = create_model(f"transformers:{tmp_path / 'siglip'}", num_classes=3, weights="own", headless=True).eval()
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model(x).pooler_output, tower(x).pooler_output)
    found = letkd.find_taps(model, x[:1])
    assert (str(found["penultimate"]), str(found["pooled"])) == ("post_layernorm:tokens", "head")


def test_a_backbone_of_transformers_teaches_features_and_kd_is_refused(letkd, backbone):
    folder, _ = backbone
    teacher = ("--teacher", f"transformers:{folder}", "--teacher-weights", "own", "--quick", "--set", "teacher.size=32")
    code, _, err = letkd("train", "digits/tiny/letkd-1", *teacher, "--out", "run")
    assert code == 0, err
    assert "penultimate=layernorm:tokens" in err
    code, _, err = letkd("train", "digits/tiny/kd", *teacher, "--out", "kd")
    assert (code, "kd reads the teacher's logits, and" in err, "has no classifier; use a teacher" in err) == (2, True, True)


def test_weights_of_timm_without_a_classifier_are_a_backbone(letkd, tmp_path):
    needs("timm")
    save_weights(create_model("timm:vit_tiny_patch16_224", num_classes=10), tmp_path / "whole.safetensors")
    import safetensors.torch

    held = safetensors.torch.load_file(tmp_path / "whole.safetensors")
    bare = {key: value for key, value in held.items() if not key.startswith("head.")}
    safetensors.torch.save_file(bare, tmp_path / "bare.safetensors")
    model = create_model(
        "timm:vit_tiny_patch16_224", num_classes=10, weights=tmp_path / "bare.safetensors", headless=True
    ).eval()
    assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 192)
    assert str(small.find_taps(model, torch.zeros(1, 3, 224, 224))["penultimate"]) == "norm:tokens"


def test_no_pickle_is_read_and_no_code_of_the_folder_runs(saved, tmp_path):
    folder, model = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    remote = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForImageClassification": "evil.Evil"}}
    for table in ({**config, **remote}, {**config, **remote, "model_type": "evil"}):
        (folder / "config.json").write_text(json.dumps(table))
        for weights in (folder, None):
            with contextlib.suppress(LetkdError):
                create_model(f"transformers:{folder}", num_classes=3, weights=weights)
    assert not (tmp_path / "ran").exists()
    for key, value in {
        "quantization_config": {"quant_method": "bitsandbytes"},
        "attn_implementation": "someone/kernel",
    }.items():
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        for weights in (folder, None):
            with pytest.raises(LetkdError, match=f"asks for {key} = .*may fetch or run other code"):
                create_model(f"transformers:{folder}", num_classes=3, weights=weights)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(LetkdError, match="pickled weights are not read"):
        create_model(f"transformers:{folder}", num_classes=3, weights=folder)


def test_a_folder_of_transformers_says_what_it_was_trained_on(saved):
    from letkd.data import Dataset, Split
    from letkd.recipes.schema import Teacher
    from letkd.training.teachers import build_teacher

    folder, _ = saved(size=32)
    split = Split(torch.zeros(3, 3, 24, 24, dtype=torch.uint8), torch.arange(3))
    data = Dataset("x", split, split, split, classes=("blue", "green", "red"), mean=(0.5,) * 3, std=(0.5,) * 3, flip=True)
    _, seen = build_teacher(Teacher(model=f"transformers:{folder}", weights="own"), data)
    assert (seen.mean, seen.std, seen.size) == ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7), (32, 32))
    assert seen.order == (1, 2, 0)


def test_timm_says_what_its_networks_were_trained_on(tmp_path):
    needs("timm")
    from letkd.data import Dataset, Split
    from letkd.recipes.schema import Teacher
    from letkd.training.teachers import build_teacher

    split = Split(torch.zeros(3, 3, 64, 64, dtype=torch.uint8), torch.arange(3))
    data = Dataset("x", split, split, split, classes=("a", "b", "c"), mean=(0.5,) * 3, std=(0.5,) * 3, flip=True)
    save_weights(create_model("timm:mobilenetv3_small_050", num_classes=3), tmp_path / "w.safetensors")
    weights = str(tmp_path / "w.safetensors")
    _, seen = build_teacher(Teacher(model="timm:mobilenetv3_small_050", weights=weights), data)
    assert (seen.mean, seen.std, seen.size) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), (224, 224))
    _, seen = build_teacher(
        Teacher(model="timm:mobilenetv3_small_050", weights=weights, size=64, mean=(0.5,) * 3, std=(0.5,) * 3), data
    )
    assert seen.differences() == {}


def test_transformers_of_timm_take_images_of_any_size(letkd, tmp_path):
    """As teacher by `teacher.size`, as student by `data.size`: in training, in a file, and from a file of another size."""
    needs("timm")
    name = "timm:vit_tiny_patch16_224"
    save_weights(create_model(name, num_classes=10), tmp_path / "teacher.safetensors")
    teacher = ["--teacher", name, "--teacher-weights", "teacher.safetensors", "--quick"]
    code, _, err = letkd("train", "digits/tiny/letkd-1", *teacher, "--set", "teacher.size=64", "--out", "taught")
    assert code == 0, err
    code, _, err = letkd("train", "digits/tiny/ce", "--student", name, "--quick", "--out", "small")
    assert code == 0, err
    student = load_student(tmp_path / "small" / "student.safetensors", model=name)
    assert student.pos_embed.shape[1] == 1 + 2 * 2, "digits have 32x32 pixels, patches 16x16"
    again = ["--student", name, "--student-weights", "small/student.safetensors", "--quick", "--set", "data.size=48"]
    for split in ("train", "test"):
        for k in range(10):
            save_pictures(tmp_path / "pictures" / split / f"class-{k}", n=4)
    code, _, err = letkd("train", "--data", "folder", "--root", "pictures", "--method", "ce", *again, "--out", "larger")
    assert code == 0, err
    code, _, err = letkd("eval", "larger", "--student", name)
    assert code == 0, err
    for given in ([], ["--input", "3x32x64"]):
        code, out, err = letkd("taps", name, *given)
        assert (code, "penultimate=blocks.10:tokens" in out) == (0, True), err


@pytest.mark.parametrize("method", ["fitnet", "at", "crd"])
def test_feature_methods_run_on_foreign_networks_without_a_word(letkd, folder, method):
    needs("timm")
    needs("transformers")
    save_weights(create_model("timm:resnet18", num_classes=10), "w.safetensors")
    networks = ("--teacher", "timm:resnet18", "--teacher-weights", "w.safetensors", "--student", "torchvision:mobilenet_v2")
    code, _, err = letkd(
        *("train", f"digits/tiny/{method}", *networks, "--quick", "--out", "run"),
        *("--set", "teacher.size=64", "--set", "train.steps=1", "--set", "data.batch_size=8"),
    )
    assert code == 0, err
    assert "no taps named, using those that `letkd taps` proposes: penultimate=" in err


OWN = """
from torch import nn

def big(num_classes):
    body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU())
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, num_classes))
"""


@pytest.mark.parametrize(
    "student",
    ["timm:mobilenetv3_small_100", "torchvision:shufflenet_v2_x0_5", "transformers:small"],
)
def test_train_and_eval_a_student_from_elsewhere_with_a_teacher_of_ones_own(letkd, folder, tmp_path, monkeypatch, student):
    needs(student.partition(":")[0])
    package = f"letkd_test_{student.partition(':')[0]}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "models.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    teacher = f"{package}.models:big"
    code, out, err = letkd("taps", student, "--input", "3x32x32", "--num-classes", 10)
    assert code == 0, err
    (taps,) = re.findall(rf"^as student: letkd train … --student {re.escape(student)} (.*)$", out, re.M)
    (penultimate,) = re.findall(r"--tap (penultimate=\S+)", taps)
    assert isinstance(create_model(student, num_classes=10).get_submodule(penultimate.partition("=")[2]), nn.Module)
    save_weights(create_model(teacher, num_classes=10), "w.safetensors")
    given = ["--teacher", teacher, "--teacher-weights", "w.safetensors", "--teacher-tap", "penultimate=0"]
    code, _, err = letkd(
        "train", "digits/tiny/letkd-1", "--student", student, "--tap", penultimate, *given, "--quick", "--out", "run"
    )
    assert code == 0, err
    code, _, err = letkd("eval", "run")
    assert (code, "code is not run only because a file names it" in err) == (2, True)
    code, out, err = letkd("eval", "run", "--student", student)
    assert code == 0, err
    assert re.search(r"│ +test │ +\d", out)
