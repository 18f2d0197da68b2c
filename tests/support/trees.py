"""Small trees of images for the tests."""

from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

WNIDS = ("n02", "n01", "n03")  # not in order, as in wnids.txt


def save_image(path: Path, seed: int = 0, size: tuple[int, int] = (20, 16)) -> None:
    """Noise of one colour, another for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.RandomState(seed)
    values = random.randint(0, 256, 3) * 0.7 + random.randint(0, 77, (*size[::-1], 3))
    Image.fromarray(values.astype(np.uint8)).save(path, format="PNG" if path.suffix.lower() == ".png" else "JPEG")


def a_tree(folder: Path, counts: dict[str, int], *, suffix: str = ".png", size: tuple[int, int] = (20, 16)) -> Path:
    """`counts[class]` images in a folder for each class."""
    for c, (name, n) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for k in range(n):
            save_image(folder / name / f"{k:03d}{suffix}", seed=1000 * c + k, size=(size[0] + k % 3, size[1]))
    return folder


def spoil(path: Path) -> Path:
    """Cuts a file in half."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def a_tiny_imagenet(root, *, sorted_val=False):
    home = root / "tiny-imagenet-200"
    for c, wnid in enumerate(WNIDS):
        for k in range(4):
            save_image(home / "train" / wnid / "images" / f"{wnid}_{k}.JPEG", seed=10 * c + k, size=(64, 64))
        (home / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t9\t9\n")
    lines = []
    for k in range(6):
        wnid = WNIDS[k % 3]
        place = home / "val" / wnid if sorted_val else home / "val" / "images"
        save_image(place / f"val_{k}.JPEG", seed=100 + k, size=(64, 64))
        lines.append(f"val_{k}.JPEG\t{wnid}\t0\t0\t9\t9\n")
    if not sorted_val:
        (home / "val" / "val_annotations.txt").write_text("".join(lines))
    (home / "wnids.txt").write_text("\n".join(WNIDS))
    (home / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tcrane\nn03\tcrane\nn99\tnothing\n")
    return home


def an_imagenet(root, *, flat):
    for c, wnid in enumerate(WNIDS):
        for k in range(2):
            save_image(root / "train" / wnid / f"{wnid}_{k}.JPEG", seed=10 * c + k, size=(40, 30))
    # The kit's own numbers: 1 is n03, 2 is n01, 3 is n02, 4 is a branch of the tree and no class.
    kit = root / "ILSVRC2012_devkit_t12" / "data"
    truth = [1, 3, 2, 2, 1]
    for k, number in enumerate(truth, start=1):
        wnid = {1: "n03", 2: "n01", 3: "n02"}[number]
        place = root / "val" if flat else root / "val" / wnid
        save_image(place / f"ILSVRC2012_val_{k:08d}.JPEG", seed=50 + k, size=(30, 40))
    if flat:
        kit.mkdir(parents=True)
        fields = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("num_children", object)]
        rows = [(1, "n03", "dog, hound", 0), (2, "n01", "goldfish", 0), (3, "n02", "crane", 0), (4, "n90", "animal", 3)]
        savemat(kit / "meta.mat", {"synsets": np.array(rows, dtype=fields)})
        (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{n}\n" for n in truth))
    return root
