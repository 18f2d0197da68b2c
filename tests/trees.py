"""Small trees of images for the tests."""

from pathlib import Path

import numpy as np
from PIL import Image


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
