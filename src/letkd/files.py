"""Atomic file writes, lock files, and folders whose links are not followed."""

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
LARGEST = 1 << 28  # bytes of a text file; no log of letkd is as large


def scrap_name(name: str) -> str:
    """The temporary name of a file or folder that will be renamed to `name`; `sweep` recognises such names."""
    return f".{name}.{uuid.uuid4().hex}.tmp"


def write_whole(path: Path, content: bytes, *, previous: Path | None = None) -> None:
    """Write a file atomically: to a temporary file, flushed to disk, then renamed. A reader never sees a partial file.

    If `path` is a link, the link is replaced; its target stays unchanged.

    Args:
        previous: a new name for the old file, to keep it; at any time at least one of the two files exists.
    """
    # Not tempfile: only the owner can read its files, and the renamed file would keep these permissions.
    temporary = path.with_name(scrap_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except OSError as error:
        why = "there is no space left for" if error.errno in FULL else f"{error.strerror or error}:"
        raise RunError(
            f"{path} could not be written: {why} {len(content):,} bytes; the old file is intact. Free some space, or choose another "
            "folder, and run the same command again"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_plain(path: Path, *, limit: int = LARGEST) -> bytes:
    """The content of a regular file. Pipes, devices and files of more than `limit` bytes raise OSError: they might never end."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if facts.st_size > limit:
            raise OSError(errno.EFBIG, f"it has {facts.st_size:,} bytes, and at most {limit:,} are allowed", str(path))
        with open(handle, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(handle)


@contextmanager
def hold(path: Path) -> Iterator[int]:
    """Hold a lock file until the block or the process ends; yields its file descriptor.

    Links and files with a second name are refused, because the process id is written into the file.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise RunError(f"{path} cannot be used as a lock: {why}; remove it") from None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            raise RunError(f"{path} cannot be used as a lock: it is not a regular file with one name; remove it")
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
    """Remove temporary files and folders that killed processes left in a folder: those named by `scrap_name`.

    Links are neither followed nor removed.

    Args:
        older: minimum age in seconds since the last write; 0 only while a lock keeps other writers out.
        name: remove only the temporary files of the file with this name.
        below: include sub-folders.
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
    """Raise if a folder is a link or contains one; writing into it could replace or remove files elsewhere.

    Links to regular files are allowed: `write_whole` replaces them and does not follow them.
    """
    refuse_link(folder)
    for place, folders, files in os.walk(folder):
        for found in [*folders, *files]:
            refuse_link(Path(place, found))


def tidy(folder: Path) -> None:
    """Prepare a folder that runs may share for writing: refuse links in it, remove old temporary files."""
    if folder.is_dir():
        for child in folder.iterdir():
            refuse_links(child)
        sweep(folder, below=True)


def refuse_link(path: Path) -> None:
    """Raise if a path is a link to anything but a regular file."""
    if path.is_symlink() and not path.is_file():
        raise RunError(
            f"{path} is a link to {os.readlink(path)}, and nothing is written through links; remove it, or name the folder it points to"
        )


def must_be_utf8(path: Path) -> Path:
    """Return the path, or raise if it is not valid UTF-8: recipes, reports and file headers cannot store other text."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        escaped = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise RunError(f"the path {escaped} is not UTF-8, so no recipe or report can name it; rename it") from None
    return path


def _flush_folder(folder: Path) -> None:
    """Flush a folder, which makes a rename in it durable. Ignored if the system cannot flush folders."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
