"""`letkd data get`: downloads a data set from its authors' server."""

from pathlib import Path

from letkd.data.archives import ARCHIVES
from letkd.data.base import READERS
from letkd.data.download import download, md5_of
from letkd.data.unpack import sweep_unpacked, unpack
from letkd.errors import DataError, nearest
from letkd.progress import say

# Why a data set cannot be downloaded, and what to do.
NO_DOWNLOAD = {
    "imagenet": (
        "imagenet can be downloaded only after agreeing to its terms: sign in at https://image-net.org, get the ILSVRC2012 "
        "archives, unpack them as train/<wnid>/*.JPEG and val, and check them with `letkd data check imagenet --root FOLDER`"
    ),
    "digits": "digits come with scikit-learn, so there is nothing to get; train with --data digits",
    "folder": "folder is your own tree of images, so there is nothing to get; train with --data folder --root FOLDER",
}


def get_data(name: str, root: Path) -> Path:
    """Download and unpack a data set into `root`, unless this is already done, and return its folder."""
    if name in NO_DOWNLOAD:
        raise DataError(NO_DOWNLOAD[name])
    if name not in ARCHIVES:
        raise DataError(f"there is no data set {name!r} to get; nearest: {nearest(name, READERS)}")
    archive = ARCHIVES[name]
    home, path = root / archive.folder, root / archive.name
    sweep_unpacked(root, archive.folder)
    if home.is_dir():
        say(f"{home} already exists; `letkd data check {name} --root {root}` checks whether it is complete")
        return home
    if not path.is_file() or md5_of(path) != archive.md5:
        say(f"downloading {archive.url}")
        download(archive.url, path, md5=archive.md5, limit=archive.limit)
    return unpack(path, root, folder=archive.folder, limit=archive.unpacked, files=archive.files)
