"""Classes that are WordNet ids, n01440764 and the like: their names in words, and lists of which file is of which class."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from letkd.data.listing import Listing
from letkd.data.pictures import shown
from letkd.errors import DataError


def read_words(path: Path) -> dict[str, str]:
    """The ids' first names from a `words.txt`: an id, a tab and names on each line. Empty where there is no such file."""
    if not path.is_file():
        return {}
    lines = (line.partition("\t") for line in path.read_text("utf-8", "replace").splitlines())
    return {wnid: words.split(",")[0].strip() for wnid, _, words in lines if words.strip()}


def named(wnids: Sequence[str], words: Mapping[str, str]) -> tuple[str, ...]:
    """A name for each id, with the id beside it where two have the same (there are two cranes)."""
    names = [shown(words.get(wnid, wnid)) for wnid in wnids]
    return tuple(name if names.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True))


def list_flat(root: Path, folder: Path, owners: Mapping[str, str], where: str) -> Listing:
    """The files of a folder that holds all classes.

    Args:
        owners: the class of each file, by the file's name.
        where: which file says so.
    """
    classes = tuple(sorted(set(owners.values())))
    number = {c: k for k, c in enumerate(classes)}
    names = sorted(owners)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{shown(folder)} lacks {len(missing):,} of the {len(names):,} images of {where}, {shown(missing[0])} first: unpack it again"
        )
    return Listing(
        root,
        classes,
        tuple(os.fsencode((folder / name).relative_to(root)) for name in names),
        tuple((folder / name).stat().st_size for name in names),
        tuple(number[owners[name]] for name in names),
    )
