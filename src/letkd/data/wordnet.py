"""Classes given as WordNet ids such as n01440764: their names, and lists of files with their classes."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from letkd.data.listing import Listing
from letkd.data.pictures import printable
from letkd.errors import DataError


def read_words(path: Path) -> dict[str, str]:
    """The first name of each id from a `words.txt`, whose lines are an id, a tab and names. Empty if there is no such file."""
    if not path.is_file():
        return {}
    lines = (line.partition("\t") for line in path.read_text("utf-8", "replace").splitlines())
    return {wnid: words.split(",")[0].strip() for wnid, _, words in lines if words.strip()}


def named(wnids: Sequence[str], words: Mapping[str, str]) -> tuple[str, ...]:
    """A name for each id, followed by the id if two ids have the same name (ImageNet has two cranes)."""
    names = [printable(words.get(wnid, wnid)) for wnid in wnids]
    return tuple(name if names.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True))


def list_flat(root: Path, folder: Path, owners: Mapping[str, str], where: str) -> Listing:
    """The files of one folder that contains all classes.

    Args:
        owners: class by file name.
        where: name of the file that lists the classes, for messages.
    """
    classes = tuple(sorted(set(owners.values())))
    number = {c: k for k, c in enumerate(classes)}
    names = sorted(owners)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{printable(folder)} lacks {len(missing):,} of the {len(names):,} images in {where}, the first is "
            f"{printable(missing[0])}: unpack it again"
        )
    return Listing(
        root,
        classes,
        tuple(os.fsencode((folder / name).relative_to(root)) for name in names),
        tuple((folder / name).stat().st_size for name in names),
        tuple(number[owners[name]] for name in names),
    )
