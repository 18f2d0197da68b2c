"""Splits, data sets, the digits, and what load_data holds out and keeps."""

import hashlib

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from letkd.data import Dataset, Split, load_data
from letkd.data.base import READERS
from letkd.data.loader import eval_batch
from letkd.errors import DataError
from letkd.recipes import resolve
from letkd.training.build import eval_loader


def a_split(n: int = 6, label: int = 0, size: int = 4) -> Split:
    return Split(torch.zeros(n, 3, size, size, dtype=torch.uint8), torch.full((n,), label))


def a_dataset(**splits: Split) -> Dataset:
    parts = {"train": a_split(), "val": a_split(0), "test": a_split()} | splits
    return Dataset("toy", **parts, classes=("a", "b", "c"), mean=(0.5,) * 3, std=(0.2,) * 3, flip=True)


def rows(split: Split) -> set[tuple[bytes, int]]:
    return {(image.numpy().tobytes(), int(label)) for image, label in zip(split.images, split.labels, strict=True)}


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2).long(), r"must be uint8 \[n 3 h w\]; these are torch.float32 \[2, 3, 4, 4\]"),
        (torch.zeros(2, 1, 4, 4).byte(), torch.zeros(2).long(), r"must be uint8 \[n 3 h w\]; these are .* \[2, 1, 4, 4\]"),
        (torch.zeros(3, 4, 4).byte(), torch.zeros(3).long(), r"must be uint8 \[n 3 h w\]"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(2).int(), r"must be int64 \[n\]; these are torch.int32 \[2\]"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(2, 1).long(), r"must be int64 \[n\]; these are torch.int64 \[2, 1\]"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(3).long(), "2 images but 3 labels"),
        (torch.zeros(3, 3, 4, 4).byte(), torch.tensor([0, -2, -1]), "label at index 1 of a split is -2"),
    ],
)
def test_a_split_checks_what_it_is_given(images, labels, message):
    with pytest.raises(DataError, match=message):
        Split(images, labels)


def test_subset_by_positions_and_by_mask():
    split = Split(torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 3, 2, 2), torch.arange(4))
    assert len(split) == 4
    assert split.subset(torch.tensor([2, 0])).labels.tolist() == [2, 0]
    picked = split.subset(torch.tensor([True, False, False, True]))
    assert picked.labels.tolist() == picked.images[:, 0, 0, 0].tolist() == [0, 3]


def test_fingerprint_names_the_content_and_nothing_else():
    split = Split(torch.arange(96, dtype=torch.uint8).reshape(2, 3, 4, 4), torch.tensor([0, 1]))
    assert split.fingerprint() == Split(split.images.clone(), split.labels.clone()).fingerprint()
    strided = split.images.repeat_interleave(2, dim=0)[::2]
    assert not strided.is_contiguous()
    assert Split(strided, split.labels).fingerprint() == split.fingerprint()
    other = split.images.clone()
    other[1, 2, 3, 3] += 1
    variants = [
        Split(other, split.labels),
        Split(split.images, torch.tensor([1, 0])),
        Split(split.images.reshape(2, 3, 2, 8), split.labels),
        split.subset(torch.tensor([1, 0])),
        split.subset(torch.arange(1)),
        split.subset(torch.arange(0)),
    ]
    assert len({split.fingerprint(), *(v.fingerprint() for v in variants)}) == 7


def test_fingerprint_is_worked_out_once(monkeypatch):
    split = a_split()
    first = split.fingerprint()
    monkeypatch.setattr(hashlib, "sha256", lambda: pytest.fail("hashed again"))
    assert split.fingerprint() == first


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_labels_out_of_range_name_split_index_and_value(name):
    bad = Split(torch.zeros(4, 3, 4, 4, dtype=torch.uint8), torch.tensor([2, 0, 3, 7]))
    with pytest.raises(DataError, match=f"index 2 of the {name} split of toy is 3, but 3 classes have the labels 0 to 2"):
        a_dataset(**{name: bad})


def test_a_dataset_counts_its_classes():
    assert a_dataset(train=a_split(label=2)).num_classes == 3


def test_digits_are_sklearn_s_images_scaled_up():
    data = load_data("digits", val=0.0)
    grey, labels = load_digits(return_X_y=True)
    # Bilinear, each output pixel a weighting of the input pixels whose centres lie around its own, border pixels repeated.
    centre = np.clip((np.arange(32) + 0.5) / 4 - 0.5, 0, 7)
    weight = np.maximum(0, 1 - np.abs(centre[:, None] - np.arange(8)))
    large = np.einsum("yi,nij,xj->nyx", weight, grey.reshape(-1, 8, 8) * 255 / 16, weight)
    by_label = {c: large[labels == c] for c in range(10)}
    assert data.test.images.shape == (720, 3, 32, 32)
    for image, label in zip(data.test.images[::20].numpy(), data.test.labels[::20].tolist(), strict=True):
        assert (image == image[0]).all()
        assert np.abs(by_label[label] - image[0]).max(axis=(1, 2)).min() <= 0.5 + 1e-6


def test_digits_splits_are_disjoint_and_together_the_whole():
    data = load_data("digits")
    parts = [data.train, data.val, data.test]
    assert sum(map(len, parts)) == 1797 == len(set().union(*map(rows, parts)))
    assert data.test.labels.bincount().tolist() == [72] * 10
    everything = torch.cat([part.labels for part in parts]).bincount()
    rest = everything - 72
    assert (data.val.labels.bincount() - 0.1 * rest).abs().max() <= 0.5
    assert data.classes == tuple("0123456789")
    assert not data.flip


def test_digits_constants_are_those_of_the_training_images():
    data = load_data("digits", val=0.0)
    x = data.train.images.double() / 255
    torch.testing.assert_close(torch.tensor(data.mean).double(), x.mean((0, 2, 3)), rtol=0, atol=5e-5)
    torch.testing.assert_close(torch.tensor(data.std).double(), x.std((0, 2, 3), correction=0), rtol=0, atol=5e-5)


def test_splits_are_the_same_every_time_and_differ_by_their_own_seed():
    torch.manual_seed(1)
    np.random.seed(1)
    one = load_data("digits", fraction=0.5)
    torch.manual_seed(2)
    np.random.seed(2)
    two, other = load_data("digits", fraction=0.5), load_data("digits", fraction=0.5, seed=1)
    for name in ("train", "val", "test"):
        assert getattr(one, name).fingerprint() == getattr(two, name).fingerprint()
    assert one.train.fingerprint() != other.train.fingerprint()
    assert one.val.fingerprint() != other.val.fingerprint()
    assert one.test.fingerprint() == other.test.fingerprint()


def test_the_fraction_is_drawn_by_the_seed_too():
    one, other = (load_data("digits", val=0.0, fraction=0.5, seed=seed) for seed in (0, 1))
    assert rows(one.train) != rows(other.train)


def test_the_digits_splits_never_change():
    # Published numbers are comparable only on the same images; these hold for every version of numpy and torch.
    data = load_data("digits")
    order = {name: getattr(data, name).labels.numpy().tobytes() for name in ("train", "val", "test")}
    assert {name: hashlib.sha256(labels).hexdigest()[:12] for name, labels in order.items()} == {
        "train": "11fe85eb4eb1",
        "val": "951c56849e8b",
        "test": "c22d74d57bb1",
    }


def test_no_validation_split_on_request():
    data = load_data("digits", val=0.0)
    assert len(data.val) == 0
    assert data.val.images.shape == (0, 3, 32, 32)
    assert len(data.train) == 1077


def test_fractions_keep_validation_and_test_and_lie_in_each_other():
    whole, half, tenth = (load_data("digits", fraction=f) for f in (1.0, 0.5, 0.1))
    assert rows(tenth.train) < rows(half.train) < rows(whole.train)
    assert (tenth.train.labels.bincount() - 0.1 * whole.train.labels.bincount()).abs().max() <= 0.5
    for part in (half, tenth):
        assert part.val.fingerprint() == whole.val.fingerprint()
        assert part.test.fingerprint() == whole.test.fingerprint()


def test_every_class_keeps_an_image():
    assert load_data("digits", fraction=1e-9).train.labels.bincount().tolist() == [1] * 10
    assert load_data("digits", val=0.9999).train.labels.bincount().tolist() == [1] * 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val": 1.0}, "val=1.0 for digits"),
        ({"val": -0.1}, "val=-0.1 for digits"),
        ({"fraction": 0.0}, "fraction=0.0 for digits"),
        ({"fraction": 1.5}, "fraction=1.5 for digits"),
        ({"fraction": float("nan")}, "fraction=nan for digits"),
        ({"seed": -1}, "seed=-1 for digits"),
    ],
)
def test_shares_out_of_range(options, message):
    with pytest.raises(DataError, match=message):
        load_data("digits", **options)


def test_unknown_name_gets_the_nearest():
    with pytest.raises(DataError, match="no data set 'cifar1000'; nearest: cifar100, cifar10"):
        load_data("cifar1000")
    assert {"digits", "cifar10", "cifar100"} <= set(READERS)


def test_evaluation_batches_are_large_for_small_images_alone():
    """So that memory does not grow with the images' size where the recipe asks for small batches."""
    assert eval_batch((32, 32), 16) == eval_batch((64, 64), 16) == 128
    assert eval_batch((224, 224), 8) == 10
    assert eval_batch((224, 224), 256) == 256
    assert eval_batch((4096, 4096)) == 1
    recipe = resolve("digits/tiny/ce", settings=["data.batch_size=2"])
    large = Split(torch.zeros(9, 3, 512, 512, dtype=torch.uint8), torch.zeros(9).long())
    data = Dataset("large", large, large, large, classes=("a",), mean=(0.5,) * 3, std=(0.5,) * 3, flip=True)
    assert eval_loader(recipe, data, large).batch_size == 2
    assert eval_loader(recipe, data, large, world=4).batch_size == 4
    assert eval_loader(recipe, data, load_data("digits").test).batch_size == 128
