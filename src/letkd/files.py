"""Files that are whole or absent, and folders whose links are not followed."""

import errno
import os
import platform
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from letkd.errors import InUseError, RunError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SCRAP = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.tmp", re.DOTALL)
HOUR = 3600.0
LARGEST = 1 << 28  # bytes of a text file: beyond any log of ours


def scrap_name(name: str) -> str:
    """A name for what is still being written and will be called `name`; `sweep` knows it as ours."""
    return f".{name}.{uuid.uuid4().hex}.tmp"


def write_whole(path: Path, content: bytes, *, previous: Path | None = None) -> None:
    """Write beside, flush to disk, rename: whoever looks finds the old file or the new one, never half of one.

    If `path` is a link, the link is replaced; what it points to stays as it is.

    Args:
        previous: the name that the old file gets, where it is to be kept; at every moment one of the two is there.
    """
    # Not tempfile: its files can be read by their owner alone, and the replacement would inherit that.
    beside = path.with_name(scrap_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(beside, path)
        _flush_folder(path.parent)
    except OSError as error:
        why = "there is no space left for" if error.errno in FULL else f"{error.strerror or error}:"
        raise RunError(
            f"{path} could not be written: {why} {len(content):,} bytes; what was there before is intact. Make room, or choose another "
            "folder, and call the same command again"
        ) from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def read_plain(path: Path, *, limit: int = LARGEST) -> bytes:
    """The content of a plain file. Pipes, devices and files of more than `limit` bytes are an OSError: they might never end."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        if facts.st_size > limit:
            raise OSError(errno.EFBIG, f"it has {facts.st_size:,} bytes, more than such a file can have", str(path))
        with open(handle, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(handle)


@contextmanager
def hold(path: Path) -> Iterator[int]:
    """Hold a lock file, and with it what it stands for, until the block or the process ends; gives its handle.

    A link is refused, and so is a file with a second name: the process's number is written into it.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise RunError(f"{path} cannot be used as a lock: {why}; remove it") from None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            raise RunError(f"{path} cannot be used as a lock: it is not a plain file of its own; remove it")
        _lock(handle, path.parent)
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
        yield handle
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):  # a file system without locks
            return
        holder = os.read(handle, 200).decode("utf-8", "replace").strip()
        raise InUseError(
            f"{folder} is in use by another process ({holder or 'unknown'}); wait for it, stop it, or choose another folder with `out=`"
        ) from None


def sweep(folder: Path, *, older: float = HOUR, name: str | None = None, below: bool = False) -> None:
    """Remove what killed writers of ours left in a folder: files and half-unpacked folders under the names of `scrap_name`.

    Links are neither followed nor removed.

    Args:
        older: seconds since a scrap was last written to; 0 only while a lock keeps other writers out.
        name: only scraps of the file of this name.
        below: also in the folders below.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for place, folders, files in os.walk(folder):
        for found in [*folders, *files]:
            path, match = Path(place, found), SCRAP.fullmatch(found)
            if match is None or name not in (None, match["name"]) or path.is_symlink():
                continue
            with suppress(OSError):
                if time.time() - _last_written(path) < older:
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.is_file():
                    path.unlink()
        folders[:] = [found for found in folders if below and SCRAP.fullmatch(found) is None]


def _last_written(path: Path) -> float:
    times = [path.lstat().st_mtime]
    for place, folders, files in os.walk(path):
        times += [Path(place, found).lstat().st_mtime for found in [*folders, *files]]
    return max(times)


def refuse_links(folder: Path) -> None:
    """Raise if a folder that is about to be written into is a link, or holds one: files elsewhere could be replaced or removed.

    Links to plain files may stay: `write_whole` replaces them and does not follow them.
    """
    refuse_link(folder)
    for place, folders, files in os.walk(folder):
        for found in [*folders, *files]:
            refuse_link(Path(place, found))


def tidy(folder: Path) -> None:
    """Make a folder that several runs may share ready to be written into: no links in it, no old scraps."""
    if folder.is_dir():
        for child in folder.iterdir():
            refuse_links(child)
        sweep(folder, below=True)


def refuse_link(path: Path) -> None:
    """Raise if a path is a link to anything but a plain file."""
    if path.is_symlink() and not path.is_file():
        raise RunError(
            f"{path} is a link to {os.readlink(path)}, and nothing is written through links; remove it, or name the folder it means"
        )


def must_be_utf8(path: Path) -> Path:
    """The path itself; raises where it is not UTF-8: recipes, reports and file headers can hold nothing else."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise RunError(f"the path {shown} is not UTF-8, so no recipe or report can name it; rename it") from None
    return path


def _flush_folder(folder: Path) -> None:
    """A rename is on disk only when its folder is; where folders cannot be flushed, the file system sees to it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
