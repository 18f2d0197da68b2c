"""Trees of image files: what is found in them, what is refused, and batches that do not depend on who decodes."""

import os

import numpy as np
import pytest
import torch

from letkd.data import Augment, CropFlip, FileSplit, Loader, ResizedCropFlip, RotateFlip, Split, load_data
from letkd.data.check import check_data
from letkd.data.listing import check_files
from letkd.data.pictures import as_tensor, centred, read_picture
from letkd.data.workers import in_workers
from letkd.errors import DataError, RunError
from tests.support.trees import a_tree, save_image, spoil

COUNTS = {"bee": 10, "ant": 5, "cat": 5}


@pytest.fixture
def tree(tmp_path):
    return a_tree(tmp_path / "tree", COUNTS)


@pytest.fixture
def parts(tmp_path):
    for part, n in (("train", 4), ("val", 2), ("test", 3)):
        a_tree(tmp_path / "parts" / part, {"ant": n, "bee": n})
    return tmp_path / "parts"


def names(split) -> list[str]:
    return [split.path(i).relative_to(split.root).as_posix() for i in range(len(split))]


def batches(split, augment=None, workers=None, epoch=2, start=0, **options):
    loader = Loader(split, 4, mean=(0.5,) * 3, std=(0.2,) * 3, augment=augment, shuffle=True, seed=3, **options)
    loader.set_epoch(epoch, start=start)
    return list(loader)


def same(one, two) -> bool:
    return all(
        torch.equal(p.x, q.x) and torch.equal(p.y, q.y) and torch.equal(p.index, q.index) for p, q in zip(one, two, strict=True)
    )


def test_one_tree_holds_out_the_same_fifth_every_time(tree, said):
    data, again = (load_data("folder", root=tree, val=0.0, size=16, workers=w) for w in (0, 2))
    assert "no test folder, so 4 images, a fixed fifth of each class, are the test split" in said()
    assert data.classes == ("ant", "bee", "cat")
    assert data.train.labels.bincount().tolist() == [4, 8, 4]
    assert data.test.labels.bincount().tolist() == [1, 2, 1]
    assert sorted(names(data.train) + names(data.test)) == sorted(
        f"{c}/{k:03d}.png" for c, n in COUNTS.items() for k in range(n)
    )
    for split in (data.train, data.test):
        assert [name.split("/")[0] for name in names(split)] == [data.classes[c] for c in split.labels]
    for part in ("train", "test"):
        assert getattr(data, part).fingerprint() == getattr(again, part).fingerprint()
    assert data.image_size == (16, 16)


def test_train_val_and_test_as_they_are(parts):
    data = load_data("folder", root=parts, val=0.5)
    assert [len(split) for split in (data.train, data.val, data.test)] == [8, 4, 6]
    assert all(name.startswith("val/") for name in names(data.val))
    assert data.image_size == (224, 224)
    assert (data.train.resize, data.train.workers) == (None, 0)


def test_val_is_the_test_split_where_there_is_no_other(parts, said):
    os.rename(parts / "test", parts.parent / "away")
    data = load_data("folder", root=parts, val=0.25)
    assert "no test folder, so val is used as the test split" in said()
    assert [len(split) for split in (data.train, data.val, data.test)] == [6, 2, 4]
    assert all(name.startswith("val/") for name in names(data.test))


def test_images_are_the_files_in_the_view_of_evaluation(tree):
    split = load_data("folder", root=tree, val=0.0, size=12, resize=14).test
    (images,) = split.read([(torch.arange(len(split)), ())], Augment())
    for i, image in enumerate(images):
        assert torch.equal(image, as_tensor(centred(read_picture(split.path(i)), (12, 12), 14)))


def test_files_that_have_the_size_are_left_as_they_are(tree):
    """Unless the recipe asks for scaling; others get the margin of 8/7. Crops and rotations start from the same pixels."""
    files = load_data("folder", root=tree, val=0.0, size=(16, 20)).train
    (images,) = files.read([(torch.arange(len(files)), ())], Augment())
    asked = load_data("folder", root=tree, val=0.0, size=(16, 20), resize=18).train
    (scaled,) = asked.read([(torch.arange(len(files)), ())], Augment())
    kept = 0
    for i, image in enumerate(images):
        picture = read_picture(files.path(i))
        assert torch.equal(scaled[i], as_tensor(centred(picture, (16, 20), 18)))
        if picture.size == (20, 16):
            kept += 1
            assert torch.equal(image, as_tensor(picture))
            assert not torch.equal(image, scaled[i])
        else:
            assert torch.equal(image, scaled[i])
    assert 0 < kept < len(files)
    for augment in (CropFlip(pad=0), RotateFlip(degrees=0, flip=False)):
        draws = augment.draw(len(files), torch.Generator().manual_seed(0))
        (got,) = files.read([(torch.arange(len(files)), draws)], augment)
        flip = draws[-1]
        assert torch.equal(got[~flip], images[~flip])


@pytest.mark.parametrize("augment", [CropFlip(pad=2), RotateFlip(), ResizedCropFlip()])
def test_rectangular_images_in_every_augmentation(tree, augment):
    data = load_data("folder", root=tree, val=0.0, size=(12, 24))
    assert data.image_size == (12, 24)
    assert all(batch.x.shape[1:] == (3, 12, 24) for batch in batches(data.train, augment))
    assert data.test.in_memory("decoding").image_size == (12, 24)


@pytest.mark.slow
@pytest.mark.parametrize("augment", [None, CropFlip(pad=2), RotateFlip(), ResizedCropFlip()])
def test_batches_do_not_depend_on_who_decodes(tree, augment):
    here, there = (load_data("folder", root=tree, val=0.0, size=16, workers=w).train for w in (0, 2))
    state = torch.get_rng_state()
    one = batches(here, augment)
    assert same(one, batches(there, augment))
    assert torch.equal(state, torch.get_rng_state())
    assert same(one[2:], batches(there, augment, start=2))
    ranks = [batches(there, augment, rank=rank, world=3) for rank in range(3)]
    assert all(torch.equal(b.x, torch.cat([part.x for part in parts])) for b, *parts in zip(one, *ranks, strict=True))


def test_files_augmented_are_memory_augmented(tree):
    split = load_data("folder", root=tree, val=0.0, size=16, resize=16).train
    held = split.in_memory("decoding")
    assert isinstance(held, Split)
    for augment in (CropFlip(pad=2), RotateFlip()):
        assert same(batches(split, augment), batches(held, augment))


def test_a_split_of_files_has_the_face_of_a_split(tree):
    split = load_data("folder", root=tree, val=0.0, size=16).train
    assert len(split) == len(split.labels) == 16
    picked = split.subset(torch.tensor([3, 1]))
    assert names(picked) == [names(split)[3], names(split)[1]]
    assert len(split.subset(split.labels == 1)) == 8
    assert list(Loader(split.subset(torch.arange(0)), 2, mean=(0.5,) * 3, std=(0.2,) * 3)) == []
    with pytest.raises(DataError, match="a split has 1 files but 2 labels"):
        FileSplit(tree, np.array([b"x"]), np.array([1]), torch.zeros(2).long(), size=(1, 1), resize=1, workers=0)


def test_the_fingerprint_names_files_lengths_labels_and_view(tree):
    def prints(**options):
        return load_data("folder", root=tree, val=0.0, **options).train.fingerprint()

    first = prints(size=16)
    assert first == prints(size=16, workers=1)
    others = {prints(size=17), prints(size=16, resize=20), load_data("folder", root=tree, size=16, val=0.2).train.fingerprint()}
    path = tree / names(load_data("folder", root=tree, val=0.0).train)[0]
    path.write_bytes(path.read_bytes() + b"0")
    others.add(prints(size=16))
    assert len({first, *others}) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_cannot_be_decoded_is_refused_by_name_when_it_is_read(tree, workers):
    split = load_data("folder", root=tree, val=0.0, size=16, workers=workers).train
    bad = spoil(split.path(5))
    with pytest.raises(DataError) as caught:
        batches(split)
    told = str(caught.value)
    assert "\n" not in told
    assert str(bad) in told
    assert "replace the file, or skip such files with `data.corrupt=skip` (`letkd data check` lists them)" in told


@pytest.mark.slow
def test_skipping_is_as_if_the_files_were_not_there(tree, said):
    bad = [spoil(tree / "ant" / "001.png"), spoil(tree / "bee" / "007.png")]
    skipped = load_data("folder", root=tree, val=0.2, size=16, corrupt="skip", workers=1)
    told = said()
    assert "2 of 20 files of its train part cannot be decoded and are left out" in told
    assert all(str(path) in told for path in bad)
    for path in bad:
        path.unlink()
    without = load_data("folder", root=tree, val=0.2, size=16)
    for part in ("train", "val", "test"):
        assert getattr(skipped, part).fingerprint() == getattr(without, part).fingerprint()
    assert same(batches(skipped.train, ResizedCropFlip()), batches(without.train, ResizedCropFlip()))


def test_empty_class_folders_are_refused_or_left_out_by_name(tree, said):
    (tree / "bat").mkdir()
    (tree / "dog").mkdir()
    (tree / "dog" / "notes.txt").write_text("no dogs yet")
    with pytest.raises(DataError, match=r"folder has bat, dog without an image to train on .* `data\.corrupt=skip`"):
        load_data("folder", root=tree)
    assert "notes.txt" in said()
    assert load_data("folder", root=tree, corrupt="skip").classes == ("ant", "bee", "cat")
    assert "bat, dog left out" in said()


def test_a_class_whose_files_are_all_corrupt_is_left_out_everywhere(parts):
    for k in range(4):
        spoil(parts / "train" / "bee" / f"{k:03d}.png")
    data = load_data("folder", root=parts, corrupt="skip")
    assert data.classes == ("ant",)
    assert [len(split) for split in (data.train, data.val, data.test)] == [4, 2, 3]


def test_a_class_that_is_not_trained_on_is_refused(parts):
    a_tree(parts / "test", {"beetle": 1})
    with pytest.raises(DataError, match=r"the test part of folder has beetle, .* no such class \(nearest: bee"):
        load_data("folder", root=parts)


def test_a_class_without_test_images_is_said(parts, said):
    (parts / "test" / "bee").rename(parts / "gone")
    (parts / "test" / "bee").mkdir()
    assert load_data("folder", root=parts).test.labels.tolist() == [0, 0, 0]
    assert "bee has no image in the test part" in said()


def test_trees_that_are_none(tmp_path):
    with pytest.raises(DataError, match=r"folder is read from a tree of images .* name it with `root=FOLDER`"):
        load_data("folder")
    with pytest.raises(DataError, match="does not exist"):
        load_data("folder", root=tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is not a folder"):
        load_data("folder", root=tmp_path / "file")
    flat = tmp_path / "flat"
    save_image(flat / "a.png")
    with pytest.raises(DataError, match=r"has no sub-folders; the 1 image\(s\) in it are in no class folder"):
        load_data("folder", root=flat)
    (tmp_path / "hollow" / "ant").mkdir(parents=True)
    with pytest.raises(DataError, match="has no images to train on"):
        load_data("folder", root=tmp_path / "hollow", corrupt="skip")


def test_hidden_files_deep_folders_odd_names_and_capital_suffixes(tmp_path, said):
    root = tmp_path / "tree"
    save_image(root / "ant" / "deep" / "down" / "A.JPG")
    save_image(root / "ant" / "na\u00efve \udcff\n.png")
    save_image(root / "bee" / "1.png")
    (root / "ant" / ".DS_Store").write_bytes(b"x")
    (root / ".git").mkdir()
    (root / "bee" / "circle").symlink_to(root, target_is_directory=True)
    (root / "README").write_text("x")
    data = load_data("folder", root=root, val=0.0)
    assert data.classes == ("ant", "bee")
    assert len(data.train) + len(data.test) == 3
    assert "README" in said()
    assert check_files(root, [b"ant/na\xc3\xafve \xff\n.png"], workers=0, description="")[0] == {}
    spoil(root / "ant" / "na\u00efve \udcff\n.png")
    ((_, told),) = check_files(root, [b"ant/na\xc3\xafve \xff\n.png"], workers=1, description="")[0].items()
    told.encode()


def test_links_that_lead_nowhere_or_in_circles_are_named(tree):
    """As files that cannot be decoded: refused where they are read, listed by a check, left out with corrupt=skip."""
    (tree / "circle").symlink_to("circle")
    (tree / "ant" / "loop.png").symlink_to("loop.png")
    (tree / "ant" / "gone.png").symlink_to("nowhere")
    (tree / "ant" / "up").symlink_to("..")
    os.mkfifo(tree / "ant" / "pipe.png")
    data = load_data("folder", root=tree, val=0.0, size=16)
    assert data.classes == ("ant", "bee", "cat")
    assert len(data.train) + len(data.test) == 22
    (part,) = check_data("folder", tree)
    assert len(part.wrong) == 2
    assert "ant/gone.png cannot be decoded (" in part.wrong[0]
    assert "ant/loop.png cannot be decoded (" in part.wrong[1]
    skipped = load_data("folder", root=tree, val=0.0, size=16, corrupt="skip")
    assert len(skipped.train) + len(skipped.test) == 20


def test_class_names_can_be_printed(tmp_path):
    names = ["a\nb", "a\x1b[31m", "cost_$5_to_$10", "na\u00efve", "[bold]", "\udcff"]
    data = load_data("folder", root=a_tree(tmp_path / "tree", dict.fromkeys(names, 5)), val=0.0)
    expected = ["[bold]", r"a\n" + "b", r"a\x1b[31m", "cost_$5_to_$10", "na\u00efve", r"\udcff"]  # in the order of their bytes
    assert list(data.classes) == expected
    assert all(len(data.train.subset(data.train.labels == c)) == 4 for c in range(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "images of size=0: each side must have 1 pixel or more"),
        ({"size": (0, 4)}, r"images of size=\(0, 4\): each side must have 1 pixel or more"),
        ({"resize": 100}, "size=224 cropped from resize=100: `resize` must be at least"),
        ({"size": 32, "resize": 30}, "size=32 cropped from resize=30: `resize` must be at least"),
        ({"workers": -1}, "workers=-1 to decode images"),
        ({"corrupt": "ignore"}, "corrupt='ignore': choose 'refuse' or 'skip'"),
    ],
)
def test_wrong_reading(tree, options, message):
    with pytest.raises(DataError, match=message):
        load_data("folder", root=tree, **options)


def test_images_in_memory_are_not_scaled():
    with pytest.raises(DataError, match="size=64 for digits: its images are 32x32 and cannot be scaled"):
        load_data("digits", size=64)
    assert load_data("digits", size=32).image_size == (32, 32)


def die(request):
    os._exit(9)


def test_a_worker_that_dies_is_a_sentence():
    with pytest.raises(RunError, match=r"a process that decodes images ended \(.*use fewer processes with data\.workers"):
        list(in_workers(die, [1, 2], workers=1))


def test_an_error_of_our_own_in_a_worker_keeps_its_kind():
    with pytest.raises(ZeroDivisionError):
        list(in_workers((1).__floordiv__, [1, 0], workers=1))


@pytest.mark.parametrize(
    ("names", "wrong", "advice"),
    [
        (("Train", "Test"), "Test", "rename it"),
        (("train", "valid"), "valid", "rename it"),
        (("train", "Validation"), "Validation", "rename it"),
        (("training",), "training", "rename it"),
        (("training", "test"), "training", "rename it"),
        (("Train", "test", "val"), "Train", "rename it"),
        (("valid", "test"), "valid", "rename it"),
        (("test", "val"), "test", "add the folder train"),
        (("test",), "test", "add the folder train"),
    ],
)
def test_folders_that_look_like_splits_are_no_classes(names, wrong, advice, tmp_path):
    for name in names:
        a_tree(tmp_path / name, {"ant": 4, "bee": 4})
    says = f"has the folder '{wrong}', which looks like a split; splits are named train, val and test: {advice}$"
    with pytest.raises(DataError, match=says):
        load_data("folder", root=tmp_path, val=0.0, size=16)


def test_what_is_no_split_or_the_only_class_is_told(parts, tmp_path, said):
    a_tree(parts / "extra", {"ant": 1})
    assert load_data("folder", root=parts, val=0.0, size=16).classes == ("ant", "bee")
    assert "'extra' ignored: only train, val and test are read" in said()
    a_tree(tmp_path / "wrapped" / "pictures", {"ant": 4, "bee": 4})
    assert load_data("folder", root=tmp_path / "wrapped", val=0.0, size=16).classes == ("pictures",)
    assert "has only one class, 'pictures'; name the folder that contains the folders of the classes" in said()
    a_tree(tmp_path / "verbs", {"ant": 4, "test": 4})
    assert load_data("folder", root=tmp_path / "verbs", val=0.0, size=16).classes == ("ant", "test")


def test_a_linked_folder_within_a_class_is_counted_as_passed_over(tree, tmp_path):
    a_tree(tmp_path / "more", {"other": 3})
    (tree / "ant" / "linked").symlink_to(tmp_path / "more" / "other")
    (part,) = check_data("folder", tree)
    assert part.ignored == 1
