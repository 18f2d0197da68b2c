"""Data sets of images without labels, and batches made of both kinds."""

import glob
import os
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from letkd.data import Augment, CropFlip, FileSplit, Loader, Split, load_data
from letkd.data.images import list_images
from letkd.data.joined import Joined
from letkd.errors import DataError

HALVES = (0.5, 0.5, 0.5)


def picture(path, seed: int, size: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.RandomState(seed).randint(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def split(n: int, *, labelled: bool = True, seed: int = 0) -> Split:
    g = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (n, 3, 8, 8), generator=g, dtype=torch.uint8)
    return Split(images, torch.arange(n) % 3 if labelled else torch.full((n,), -1))


def loader(images, batch_size: int = 8, **options) -> Loader:
    return Loader(images, batch_size, mean=HALVES, std=HALVES, **options)


# ------------------------------------------------------------------------------------------------ images alone


@pytest.fixture
def photos(tmp_path):
    for k, name in enumerate(["a.png", "b.PNG", "in/c.png", "in/deeper/d.png"]):
        picture(tmp_path / "photos" / name, k)
    (tmp_path / "photos" / "notes.txt").write_text("no image")
    return tmp_path / "photos"


def paths(images: FileSplit) -> list[str]:
    return [os.fsdecode(path) for path in images.paths]


def test_a_folder_of_images_flat_and_nested_has_no_labels(photos):
    data = load_data("images", root=photos, size=8, val=0.0)
    assert paths(data.train) == ["a.png", "b.PNG", "in/c.png", "in/deeper/d.png"]
    assert data.train.labels.tolist() == [-1] * 4
    assert not data.has_labels
    assert (len(data.val), len(data.test), data.num_classes) == (0, 0, 0)
    assert len(load_data("images", root=photos, size=8, val=0.25).val) == 1


@pytest.mark.parametrize(("pattern", "found"), [("*.png", ["a.png"]), ("**/*.png", ["a.png", "in/c.png", "in/deeper/d.png"])])
def test_a_pattern_of_images(photos, pattern, found):
    assert paths(load_data("images", root=photos / pattern, size=8, val=0.0).train) == found


@pytest.mark.parametrize(
    "pattern", ["*", "**", "in/*", "i[mn]/*.png", "**/in/**/*.png", "**/.h*/*", ".*/*", "?.png", "*/deeper/*", "no/*"]
)
def test_a_pattern_without_links_finds_what_glob_finds(photos, pattern):
    for name in (".h.png", ".hidden/e.png", "in/.hidden/f.png"):
        picture(photos / name, 0)
    found = {os.path.relpath(name, photos) for name in glob.glob(str(photos / pattern), recursive=True) if os.path.isfile(name)}
    wanted = sorted(name for name in found if name.lower().endswith(".png"))
    if not wanted:
        with pytest.raises(DataError, match="has no images"):
            list_images(photos / pattern)
        return
    listing = list_images(photos / pattern)
    assert [os.path.relpath(listing.root / os.fsdecode(path), photos) for path in listing.paths] == wanted
    assert all(length > 0 for length in listing.lengths)


@pytest.mark.parametrize("pattern", ["", "**/*.png", "*/c.png"])
def test_links_to_folders_in_a_folder_or_behind_a_pattern_are_not_followed(photos, pattern):
    every = set(paths(load_data("images", root=photos / pattern, size=8, val=0.0).train))
    (photos / "in" / "again").symlink_to(photos)
    (photos / "other").symlink_to(photos / "in")
    (photos / "linked.png").symlink_to(photos / "a.png")  # a file
    (photos.parent / "link").symlink_to(photos)  # above the pattern
    found = paths(load_data("images", root=photos.parent / "link" / pattern, size=8, val=0.0).train)
    assert found == sorted(every | ({"linked.png"} if pattern != "*/c.png" else set()))


@pytest.mark.parametrize(
    ("root", "sentence"),
    [
        (None, "images are read from a folder or a pattern, and none was named"),
        ("missing", "missing does not exist, so images cannot be read from it; name a folder, or a pattern"),
        ("notes.txt", "notes.txt is a file, and images are read from a folder or a pattern; name one"),
        ("*.jpg", r"\*.jpg has no images, which are files that end in"),
        ("empty", "empty has no images"),
    ],
)
def test_no_images_are_a_sentence(photos, root, sentence):
    (photos / "empty").mkdir()
    with pytest.raises(DataError, match=sentence):
        load_data("images", root=None if root is None else photos / root)


def test_a_damaged_image_is_left_out_if_asked(photos, said):
    (photos / "broken.png").write_bytes(b"no image")
    data = load_data("images", root=photos, size=8, val=0.0, corrupt="skip")
    assert "broken.png" not in paths(data.train)
    assert "1 of 5 files" in said()
    (photos / "only").mkdir()
    (photos / "only" / "broken.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"no image of .*only can be decoded; name a folder with other images"):
        load_data("digits", unlabelled=str(photos / "only"), corrupt="skip")


# ------------------------------------------------------------------------------------------------ beside a data set


def test_the_rest_are_the_training_images_that_fraction_leaves_out():
    few, all_, both = (
        load_data("digits", fraction=0.1),
        load_data("digits"),
        load_data("digits", fraction=0.1, unlabelled="rest"),
    )
    labelled = both.train.labels >= 0
    assert torch.equal(both.train.labels[labelled], few.train.labels)
    assert len(both.train) == len(all_.train)
    pixels = [Counter(image.numpy().tobytes() for image in images) for images in (whole(both.train), all_.train.images)]
    assert pixels[0] == pixels[1]
    assert both.val.fingerprint() == all_.val.fingerprint()
    with pytest.raises(DataError, match=r"and it leaves out none; lower data\.fraction, or name a folder"):
        load_data("digits", unlabelled="rest")


def whole(images) -> torch.Tensor:
    return next(iter(images.read([(torch.arange(len(images)), ())], Augment())))


def test_test_images_among_unlabelled_files_are_told_and_left_out(tmp_path, said):
    for c in ("cat", "dog"):
        for k in range(4):
            picture(tmp_path / "tree" / "train" / c / f"{k}.png", seed=100 * (c == "dog") + k)
            picture(tmp_path / "tree" / "test" / c / f"{k}.png", seed=500 + 100 * (c == "dog") + k)
    for k in range(3):
        picture(tmp_path / "more" / f"{k}.png", seed=900 + k)
    picture(tmp_path / "more" / "another-name.png", seed=501)  # a test image
    data = load_data("folder", root=tmp_path / "tree", size=8, val=0.0, unlabelled=str(tmp_path / "more"))
    assert len(data.train) == 8 + 3
    assert "1 images are also test or validation images (equal bytes) and are left out" in said()
    with pytest.raises(DataError, match="are in the test or validation split of folder; name a folder"):
        load_data("folder", root=tmp_path / "tree", size=8, unlabelled=str(tmp_path / "tree" / "test"))


def test_test_images_of_a_data_set_in_memory_are_found_by_their_pixels(tmp_path, said):
    digits = load_data("digits")
    for k, image in enumerate([*digits.test.images[:2], *digits.train.images[:3]]):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{k}.png")
    data = load_data("digits", unlabelled=str(tmp_path))
    assert len(data.train) == len(digits.train) + 3
    assert "2 images are also test or validation images" in said()


# ------------------------------------------------------------------------------------------------ batches of both


def test_a_joined_split_reads_as_its_parts_do():
    both = Joined(split(5), split(7, labelled=False, seed=1))
    order = torch.tensor([11, 0, 5, 4, 6])
    expected = torch.cat([both.first.images, both.second.images])[order]
    assert torch.equal(next(iter(both.read([(order, ())], Augment()))), expected)
    parts = list(both.read([(torch.tensor([1]), ()), (torch.tensor([9, 8]), ()), (order, ())], Augment()))
    assert [len(part) for part in parts] == [1, 2, 5]
    assert torch.equal(parts[2], expected)
    assert both.subset(both.labels >= 0).labels.tolist() == [0, 1, 2, 0, 1]
    assert both.subset(order).labels.tolist() == [0, 1, -1, -1, -1]
    assert both.fingerprint() != Joined(split(5), split(7, labelled=False, seed=2)).fingerprint()


def test_files_and_memory_join_and_augment_alike(tmp_path):
    for k in range(6):
        picture(tmp_path / f"{k}.png", k)
    files = load_data("images", root=tmp_path, size=8, val=0.0).train
    joined = Joined(split(6), files)
    options = {"augment": CropFlip(pad=2), "shuffle": True, "seed": 3}
    memory = Joined(split(6), files.in_memory("decoding"))
    for one, two in zip(loader(joined, 4, **options), loader(memory, 4, **options), strict=True):
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y, two.y)


def test_sizes_that_differ_are_a_sentence():
    with pytest.raises(DataError, match="images of 8x8 and of 4x4 in one data set"):
        Joined(split(2), Split(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), torch.tensor([-1])))


def test_each_batch_has_its_share_and_an_epoch_every_labelled_image_once():
    both = Joined(split(12), split(50, labelled=False, seed=1))
    batches = loader(both, 8, shuffle=True, drop_last=True, unlabelled_share=0.75)
    assert len(batches) == 6
    seen = []
    for epoch in range(1, 3):
        batches.set_epoch(epoch)
        epochs = list(batches)
        assert all(int((batch.y < 0).sum()) == 6 for batch in epochs)
        assert sorted(i for batch in epochs for i in batch.index.tolist() if i < 12) == list(range(12))
        seen += [i for batch in epochs for i in batch.index.tolist() if i >= 12]
    assert len(seen) == 72
    assert set(seen[:50]) == set(range(12, 62))  # a pass over all of them, over the end of an epoch
    assert seen[:22] != seen[50:]


def test_an_epoch_begun_in_its_middle_has_the_same_batches():
    both = Joined(split(12), split(20, labelled=False, seed=1))
    batches = loader(both, 8, shuffle=True, unlabelled_share=0.5)
    batches.set_epoch(3)
    whole_epoch = [batch.index.tolist() for batch in batches]
    batches.set_epoch(3, start=1)
    assert [batch.index.tolist() for batch in batches] == whole_epoch[1:]


def test_a_share_of_one_shows_every_image_without_a_label_once():
    both = Joined(split(12), split(16, labelled=False, seed=1))
    batches = list(loader(both, 8, shuffle=True, unlabelled_share=1.0))
    assert sorted(i for batch in batches for i in batch.index.tolist()) == list(range(12, 28))


def test_processes_share_both_kinds_and_know_the_mean():
    both = Joined(split(12), split(50, labelled=False, seed=1))
    options = {"shuffle": True, "drop_last": True, "unlabelled_share": 0.5}
    one = list(loader(both, 8, **options))
    parts = [list(loader(both, 8, rank=r, world=2, **options)) for r in range(2)]
    for batch, *shares in zip(one, *parts, strict=True):
        assert torch.equal(torch.cat([share.x for share in shares]), batch.x)
        assert [int((share.y >= 0).sum()) for share in shares] == [2, 2]
        assert {share.labelled_per_process for share in shares} == {2.0}


@pytest.mark.parametrize(
    ("images", "share", "sentence"),
    [
        (
            split(4),
            0.5,
            "unlabelled_share is 0.5, and every image has a label; name images without labels with data.unlabelled=FOLDER",
        ),
        (split(4, labelled=False), 0.5, "unlabelled_share is 0.5, and no image has a label; leave it out"),
        (split(4), 1.5, "unlabelled_share is 1.5: the share of each batch must be from 0 to 1"),
        (
            Joined(split(1), split(9, labelled=False)),
            0.5,
            "every batch needs 2 labelled images, and there are 1; choose a smaller",
        ),
        (
            Joined(split(9), split(3, labelled=False)),
            1,
            "every batch needs 4 unlabelled images, and there are 3; choose a smaller",
        ),
    ],
)
def test_a_share_that_cannot_be_is_a_sentence(images, share, sentence):
    with pytest.raises(DataError, match=sentence):
        loader(images, 4, unlabelled_share=share, drop_last=True)
