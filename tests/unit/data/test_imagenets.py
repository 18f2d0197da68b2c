"""Tiny-ImageNet and ImageNet in their official layouts: which file is of which class, in which order."""

import pytest
import torch

from letkd.data import FileSplit, Split, load_data
from letkd.data.pictures import as_tensor, read_picture
from letkd.data.wordnet import named
from letkd.errors import DataError
from tests.support.trees import a_tiny_imagenet, an_imagenet, spoil


@pytest.mark.slow
@pytest.mark.parametrize("sorted_val", [False, True])
def test_tiny_imagenet_by_annotations_or_class_folders(tmp_path, sorted_val):
    home = a_tiny_imagenet(tmp_path, sorted_val=sorted_val)
    data = load_data("tiny-imagenet", root=tmp_path, val=0.0)
    assert isinstance(data.train, Split)
    assert data.classes == ("goldfish", "crane (n02)", "crane (n03)")
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.image_size == (64, 64)
    first = home / "train" / "n01" / "images" / "n01_0.JPEG"
    assert torch.equal(data.train.images[0], as_tensor(read_picture(first)))
    for k in range(6):  # the k-th validation image is found once, with the label of its class
        image = as_tensor(read_picture(next(home.glob(f"val/*/val_{k}.JPEG"))))
        (at,) = (data.test.images == image).all(dim=(1, 2, 3)).nonzero()
        assert data.test.labels[at] == [1, 0, 2][k % 3]
    again = load_data("tiny-imagenet", root=home, workers=2, val=0.25)
    assert again.test.fingerprint() == data.test.fingerprint()
    assert (len(again.train), len(again.val)) == (9, 3)
    assert load_data("tiny-imagenet", root=home, size=32).image_size == (32, 32)


def test_the_margin_of_tiny_imagenet_is_known_in_every_split(tmp_path):
    a_tiny_imagenet(tmp_path)
    for given, resize in ((72, 72), (None, 64)):
        data = load_data("tiny-imagenet", root=tmp_path, val=0.25, resize=given)
        assert [split.resize for split in (data.train, data.val, data.test)] == [resize] * 3


def test_tiny_imagenet_that_is_not_whole(tmp_path):
    with pytest.raises(DataError, match=r"tiny-imagenet is read from the unpacked tiny-imagenet-200\.zip"):
        load_data("tiny-imagenet")
    with pytest.raises(DataError, match="has no folder train"):
        load_data("tiny-imagenet", root=tmp_path)
    home = a_tiny_imagenet(tmp_path)
    spoil(home / "train" / "n01" / "images" / "n01_2.JPEG")
    with pytest.raises(DataError, match=r"n01_2\.JPEG cannot be decoded"):
        load_data("tiny-imagenet", root=tmp_path)
    assert load_data("tiny-imagenet", root=tmp_path, val=0.0, corrupt="skip").train.labels.bincount().tolist() == [3, 4, 4]
    (home / "val" / "images" / "val_3.JPEG").unlink()
    with pytest.raises(DataError, match=r"lacks 1 of the 6 images in val_annotations\.txt, the first is val_3\.JPEG"):
        load_data("tiny-imagenet", root=tmp_path)
    for line in ("val_0.JPEG n01", "../x.JPEG\tn01", "\tn01"):
        (home / "val" / "val_annotations.txt").write_text(f"val_0.JPEG\tn01\n{line}\n")
        with pytest.raises(DataError, match=r"line 2 of .* is not a file name, a tab and a class"):
            load_data("tiny-imagenet", root=tmp_path)


def test_imagenet_by_devkit_and_by_class_folders(tmp_path):
    flat, sorted_ = (an_imagenet(tmp_path / name, flat=name == "flat") for name in ("flat", "sorted"))
    by_kit, by_folder = (load_data("imagenet", root=root, val=0.0, size=21, workers=1) for root in (flat, sorted_))
    assert by_kit.classes == ("goldfish", "crane", "dog")
    assert by_folder.classes == ("n01", "n02", "n03")
    assert isinstance(by_kit.train, FileSplit)
    for data in (by_kit, by_folder):
        assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
        found = {data.test.path(i).name[-6]: int(label) for i, label in enumerate(data.test.labels)}
        assert found == {"1": 2, "2": 1, "3": 0, "4": 0, "5": 2}
    assert (by_kit.train.size, by_kit.train.resize) == ((21, 21), None)


def test_imagenet_that_is_not_whole(tmp_path):
    with pytest.raises(DataError, match=r"imagenet is read from a folder with train/<wnid>/\*\.JPEG and val"):
        load_data("imagenet")
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="has no folder val"):
        load_data("imagenet", root=tmp_path)
    root = an_imagenet(tmp_path / "flat", flat=True)
    kit = root / "ILSVRC2012_devkit_t12" / "data"
    truth = kit / "ILSVRC2012_validation_ground_truth.txt"
    truth.write_text("1\n7\n")
    with pytest.raises(DataError, match=r"line 2 of .* is '7', which is not a class"):
        load_data("imagenet", root=root)
    truth.write_text("1\n3\n2\n2\n1\n1\n")
    with pytest.raises(DataError, match=r"lacks 1 of the 6 images .* the first is ILSVRC2012_val_00000006\.JPEG"):
        load_data("imagenet", root=root)
    (kit / "meta.mat").write_bytes(b"MATLAB 7.3 MAT-file" + bytes(200))
    with pytest.raises(DataError, match=r"meta\.mat is not the meta\.mat of ILSVRC2012_devkit_t12"):
        load_data("imagenet", root=root)
    truth.unlink()
    with pytest.raises(DataError, match=r"val has no class folders, and ILSVRC2012_devkit_t12 .* is not in"):
        load_data("imagenet", root=root)


def test_names_in_words_stay_apart():
    assert named(["n1", "n2", "n3"], {"n1": "crane", "n2": "crane"}) == ("crane (n1)", "crane (n2)", "n3")
