"""CIFAR-10 and CIFAR-100 from their official files: the binary or the python version, unpacked or still in the archive."""

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from letkd.data.archives import ARCHIVES
from letkd.data.base import Dataset, Reading, Split, register_data
from letkd.data.pickles import Array, as_text, read_pickle
from letkd.data.pictures import printable
from letkd.data.unpack import CHUNK, open_tar, to_the_end
from letkd.errors import DataError

# Of CIFAR-100; the authors normalise both data sets with them.
MEAN = (0.5071, 0.4867, 0.4408)
STD = (0.2675, 0.2565, 0.2761)
PIXELS = 3 * 32 * 32
LARGEST = ARCHIVES["cifar10"].unpacked  # total bytes of the files of either data set


@dataclass(frozen=True)
class Layout:
    """File names and formats of one official version of a data set; file names are those inside the archive.

    Args:
        labels: binary version: number of classes of each label byte before the pixels; the last byte is used. None for the
            python version.
        label_key: python version: key of the labels.
        name_key: python version: key of the class names in `meta`.
    """

    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: tuple[int, ...] | None = None
    label_key: str = ""
    name_key: str = ""


BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))
CIFAR10 = (
    Layout(
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin",
        tuple(f"{name}.bin" for name in BATCHES),
        "test_batch.bin",
        "batches.meta.txt",
        labels=(10,),
    ),
    Layout(
        "cifar-10-python.tar.gz",
        "cifar-10-batches-py",
        BATCHES,
        "test_batch",
        "batches.meta",
        label_key="labels",
        name_key="label_names",
    ),
)
CIFAR100 = (
    Layout(
        "cifar-100-binary.tar.gz",
        "cifar-100-binary",
        ("train.bin",),
        "test.bin",
        "fine_label_names.txt",
        labels=(20, 100),
    ),
    Layout(
        "cifar-100-python.tar.gz",
        "cifar-100-python",
        ("train",),
        "test",
        "meta",
        label_key="fine_labels",
        name_key="fine_label_names",
    ),
)
CLASSES10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLASSES100 = tuple(str(c) for c in range(100))


@register_data("cifar10")
def read_cifar10(root: Path | None, reading: Reading) -> Dataset:
    """The ten classes of CIFAR-10."""
    return _read("cifar10", CIFAR10, root, CLASSES10)


@register_data("cifar100")
def read_cifar100(root: Path | None, reading: Reading) -> Dataset:
    """The hundred fine classes of CIFAR-100."""
    return _read("cifar100", CIFAR100, root, CLASSES100)


def _read(name: str, layouts: tuple[Layout, ...], root: Path | None, classes: tuple[str, ...]) -> Dataset:
    layout, source = _find(name, layouts, root)
    parts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for file, where, content in _contents(layout, source):
        if file == layout.meta:
            classes = _class_names(layout, where, content, len(classes))
        elif layout.labels is not None:
            parts[file] = _binary(where, content, layout.labels)
        else:
            parts[file] = _python(where, content, layout.label_key, len(classes))
    missing = [file for file in (*layout.train, layout.test) if file not in parts]
    if missing:
        raise DataError(
            f"{printable(source)} lacks {', '.join(missing)} of {name}; download {layout.archive} again: it contains all files"
        )
    train = _split([parts[file] for file in layout.train])
    test = _split([parts[layout.test]])
    return Dataset(name, train, train.subset(torch.arange(0)), test, classes=classes, mean=MEAN, std=STD, flip=True)


def _split(parts: list[tuple[np.ndarray, np.ndarray]]) -> Split:
    images = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32)
    return Split(torch.from_numpy(images), torch.from_numpy(np.concatenate([labels for _, labels in parts])))


def _find(name: str, layouts: tuple[Layout, ...], root: Path | None) -> tuple[Layout, Path]:
    """The first version found in `root`: unpacked there, unpacked in its own sub-folder, or as its archive."""
    archives = " or ".join(layout.archive for layout in layouts)
    get = (
        f"get it with `letkd data get {name}`, or download {archives} from https://www.cs.toronto.edu/~kriz/cifar.html, "
        "unpacked or not, and name its folder with `root=FOLDER`"
    )
    if root is None:
        raise DataError(f"{name} is read from its official files, and no folder was named; {get}")
    if not root.exists():
        raise DataError(f"{printable(root)} does not exist, so {name} cannot be read from it; {get}")
    for layout in layouts:
        for folder in (root, root / layout.folder):
            if any((folder / file).is_file() for file in (*layout.train, layout.test)):
                return layout, folder
    for layout in layouts:
        for archive in (root, root / layout.archive):
            if archive.name == layout.archive and archive.is_file():
                return layout, archive
    raise DataError(f"{printable(root)} has neither the files of {name} nor its archive; {get}")


def _contents(layout: Layout, source: Path) -> Iterator[tuple[str, str, bytes]]:
    """Name, name for error messages, and bytes of every file of the layout that exists. An archive is read without unpacking it."""
    wanted = (*layout.train, layout.test, layout.meta)
    try:
        if source.is_dir():
            files = [file for file in wanted if (source / file).is_file()]
            if sum((source / file).stat().st_size for file in files) > LARGEST:
                raise DataError(
                    f"{printable(source)} has files of more than {LARGEST:,} bytes in all, which CIFAR does not: download it again"
                )
            for file in files:
                yield file, printable(source / file), (source / file).read_bytes()
            return
        by_member = {f"{layout.folder}/{file}": file for file in wanted}
        with open_tar(source, limit=LARGEST) as archive:
            for member in archive:  # in the archive's order: seeking back would decompress it again
                file = by_member.get(member.name.removeprefix("./"))
                stream = archive.extractfile(member) if file and member.isreg() else None
                if file and stream:
                    pieces = iter(partial(stream.read, CHUNK), b"")  # a single read would trust the length in the header
                    yield file, f"{printable(source)}:{member.name}", b"".join(pieces)
            to_the_end(archive)
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        raise DataError(
            f"{printable(source)} cannot be read ({printable(str(error)[:200])}); it is damaged or cut short: "
            f"download {layout.archive} again"
        ) from error


def _binary(where: str, content: bytes, labels: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels from records of label bytes and 3,072 pixel bytes."""
    record = len(labels) + PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{where} has {len(content):,} bytes, not a whole number of records of {record:,} bytes: "
            "it is cut short or another file; download it again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    for column, C in enumerate(labels):
        _check_labels(where, records[:, column].astype(np.int64), C)
    return records[:, len(labels) :], records[:, len(labels) - 1].astype(np.int64)


def _python(where: str, content: bytes, key: str, C: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels from a pickled batch."""
    batch = read_pickle(where, content)
    pixels, labels = batch.get("data"), batch.get(key)
    if not isinstance(pixels, Array) or not isinstance(labels, list):
        raise DataError(f"{where} has {_keys(batch)}, not the array 'data' and the list {key!r}: it is not a CIFAR batch")
    values = pixels.values
    if not labels or values.shape != (len(labels), PIXELS):
        raise DataError(
            f"{where} has data of shape {list(values.shape)} and {len(labels)} labels; "
            f"a CIFAR batch has data [n {PIXELS}] and n labels: download it again"
        )
    if not all(type(label) is int and abs(label) < 2**63 for label in labels):
        raise DataError(f"{where} has labels that are not integers of up to 64 bits: it is not a CIFAR batch")
    return values, _check_labels(where, np.array(labels, np.int64), C)


def _check_labels(where: str, labels: np.ndarray, C: int) -> np.ndarray:
    bad = np.flatnonzero((labels < 0) | (labels >= C))
    if len(bad):
        raise DataError(
            f"{where} has the label {labels[bad[0]]} at image {bad[0]}, but {C} classes have the labels 0 to {C - 1}: "
            "it is damaged or another file"
        )
    return labels


def _class_names(layout: Layout, where: str, content: bytes, C: int) -> tuple[str, ...]:
    if layout.labels is None:
        meta = read_pickle(where, content)
        found = meta.get(layout.name_key)
        if not isinstance(found, list):
            raise DataError(f"{where} has {_keys(meta)}, not the list {layout.name_key!r}: it is not a CIFAR file")
    else:
        found = content.split()
    names = tuple(printable(as_text(name)) for name in found if isinstance(name, (bytes, str)))
    if len(names) != C:
        raise DataError(f"{where} has {len(names)} class names for {C} classes; download it again or delete it")
    return names


def _keys(batch: dict[str, Any]) -> str:
    return f"the entries {', '.join(f'{key!r:.60}' for key in list(batch)[:8])}" if batch else "no entries"
