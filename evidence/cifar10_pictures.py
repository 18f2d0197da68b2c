"""CIFAR-10's training images as files without labels: `python evidence/cifar10_pictures.py DATA_FOLDER pictures/cifar10`

The tenth that recipes hold out for validation (`data.val = 0.1`) and the test images are not among them.
"""

import sys
from pathlib import Path

from PIL import Image

from letkd.data import load_data


def main(root: str, out: str, most: int | None = None) -> int:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    images = load_data("cifar10", root=root, val=0.1).train.images[:most]  # pyright: ignore[reportAttributeAccessIssue]
    for k, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{k:05}.png")
    return len(images)


if __name__ == "__main__":
    print(f"{main(*sys.argv[1:3]):,} images")
