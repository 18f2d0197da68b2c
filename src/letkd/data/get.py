"""A data set from its authors' server to a folder."""

from pathlib import Path

from letkd.data.archives import ARCHIVES
from letkd.data.base import READERS
from letkd.data.download import download, md5_of
from letkd.data.unpack import sweep_unpacked, unpack
from letkd.errors import DataError, nearest
from letkd.progress import say

# Why there is nothing to get, and what to do.
NOT_HERE = {
    "imagenet": (
        "imagenet may be downloaded only by who has agreed to its terms: sign in at https://image-net.org, get the ILSVRC2012 "
        "archives, unpack them as train/<wnid>/*.JPEG and val, and look with `letkd data check imagenet --root FOLDER`"
    ),
    "digits": "digits come with scikit-learn: there is nothing to get; train with --data digits",
    "folder": "folder is a tree of images of your own: there is nothing to get; train with --data folder --root FOLDER",
}


def get_data(name: str, root: Path) -> Path:
    """Downloads and unpacks a data set into `root`, as far as that is not done, and returns its folder."""
    if name in NOT_HERE:
        raise DataError(NOT_HERE[name])
    if name not in ARCHIVES:
        raise DataError(f"there is no data set {name!r} to get; nearest: {nearest(name, READERS)}")
    archive = ARCHIVES[name]
    home, path = root / archive.folder, root / archive.name
    sweep_unpacked(root, archive.folder)
    if home.is_dir():
        say(f"{home} is there already; `letkd data check {name} --root {root}` says whether it is whole")
        return home
    if not path.is_file() or md5_of(path) != archive.md5:
        say(f"downloading {archive.url}")
        download(archive.url, path, md5=archive.md5, limit=archive.limit)
    return unpack(path, root, folder=archive.folder, limit=archive.unpacked, files=archive.files)
