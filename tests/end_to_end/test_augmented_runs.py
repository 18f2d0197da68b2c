"""Recipes that augment and mix: what they build, what is refused, and image files decoded by workers."""

import torch

from letkd.data import Chain, CropFlip, Erase, FileSplit, Loader, Mix, RandAugment, ResizedCropFlip, TrivialAugment, load_data
from letkd.data.augment import Augment
from letkd.recipes import resolve
from letkd.training.build import build_distiller, read_data, train_loader
from tests.support.runs import SMALL
from tests.support.trees import a_tree


def built(*settings: str) -> Loader:
    recipe = resolve("digits/tiny/ce", settings=[*SMALL, "data.flip=false", *settings])
    return train_loader(recipe, read_data(recipe))


def test_recipes_build_what_they_name():
    crop = CropFlip(pad=built().augment.pad, flip=False)
    assert built("data.augment=crop").augment == crop
    assert built("data.augment=crop+randaugment").augment == Chain((crop, RandAugment(2, 9)))
    rand = ("data.augment=randaugment", "data.operations=1", "data.magnitude=14")
    assert built(*rand).augment == RandAugment(1, 14)
    chain = built("data.augment=resized-crop+trivial", "data.erase=0.3").augment
    assert chain == Chain((ResizedCropFlip(flip=False), TrivialAugment(), Erase(0.3)))
    assert built("data.augment=none", "data.erase=0.3").augment == Chain((Augment(), Erase(0.3)))
    assert built().mix is None
    assert built("data.mix=mixup").mix == Mix("mixup", 1.0)
    assert built("data.mix=cutmix", "data.mix_alpha=0.5").mix == Mix("cutmix", 0.5)


def test_label_smoothing_reaches_the_loss():
    batch = next(iter(built()))
    for smoothing in (0.0, 0.2):
        recipe = resolve("digits/tiny/ce", settings=[*SMALL, f"train.label_smoothing={smoothing}"])
        step = build_distiller(recipe, read_data(recipe))(batch)
        expected = torch.nn.functional.cross_entropy(step.logits, batch.y, label_smoothing=smoothing)
        assert torch.equal(step.terms["ce"], expected)


def test_what_cannot_be_mixed_is_one_sentence(letkd, tmp_path):
    settings = (*SMALL, "train.epochs=1", "train.steps=1")
    small = [word for text in settings for word in ("--set", text)]
    of_teacher = [word for text in settings if not text.startswith("student.") for word in ("--set", text)]
    assert letkd("train", "digits/tiny/teacher", *of_teacher, "--out", "teacher")[0] == 0
    cases = {
        "crd": ((), "crd cannot learn from mixed images: its memory has one row per image"),
        "kd": (("--cache",), "views=1 and mixup: a mixed image is new in every epoch, so it has no fixed views"),
    }
    for method, (options, sentence) in cases.items():
        weights = ("--teacher-weights", "teacher/student.safetensors")
        command = ("train", f"digits/tiny/{method}", *small, "--set", "data.mix=mixup", *weights, *options)
        code, _, err = letkd(*command, "--out", method)
        assert code == 2
        assert sentence in " ".join(err.split())
        assert not (tmp_path / method / "recipe.toml").exists()


def test_decoded_files_are_the_same_whoever_decodes(tmp_path):
    tree = a_tree(tmp_path / "tree", {"ant": 6, "bee": 6})
    augment = Chain((ResizedCropFlip(), RandAugment(), Erase(0.5)))
    walks = []
    for workers in (0, 2):
        split = load_data("folder", root=tree, val=0.0, size=12, workers=workers).train
        assert isinstance(split, FileSplit)
        walks.append(list(Loader(split, 4, mean=(0.5,) * 3, std=(0.2,) * 3, augment=augment, shuffle=True, mix=Mix("cutmix"))))
    assert len(walks[0]) == 3
    for one, two in zip(*walks, strict=True):
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y2, two.y2)
        assert one.lam == two.lam
