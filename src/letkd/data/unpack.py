"""Unpacks archives completely or not at all, and never outside one folder."""

import glob
import gzip
import lzma
import os
import re
import shutil
import stat
import tarfile
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

from letkd.errors import DataError
from letkd.progress import bar

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

CHUNK = 1 << 20
LARGEST_READ = 4 * CHUNK  # a header is read in one piece
SLACK = 32 * CHUNK  # for headers and padding
Entry = tuple[str, int, IO[bytes] | None]  # name, length in the header, content; no content for a folder


def unpack(archive: Path, root: Path, *, folder: str, limit: int, files: int) -> Path:
    """Unpack `archive`, which contains only `folder`, and return the path of that folder in `root`.

    Only folders and regular files are created, without the permissions in the archive; links, devices and paths that lead
    elsewhere are refused. The folder gets its name when it is complete.

    Args:
        limit: largest total size of the files in bytes.
        files: largest number of entries.
    """
    home = root / folder
    if home.exists():
        raise DataError(f"{home} already exists; remove it to unpack {archive.name} again")
    sweep_unpacked(root, folder)
    temporary = root / f".{folder}.{uuid.uuid4().hex}.tmp"
    entries = _zip(archive) if archive.suffix == ".zip" else _tar(archive, limit)
    try:
        temporary.mkdir(parents=True)
        with _locked(temporary), bar(f"unpacking {archive.name}", None) as tick:
            for count, (name, length, content) in enumerate(entries, start=1):
                target = temporary / _inside(archive, name, folder)
                if count > files:
                    raise DataError(f"{archive} has more than {files:,} entries: refused")
                limit -= length
                if limit < 0:
                    raise DataError(f"{archive} would unpack to more bytes than it may have: refused")
                if content is None:
                    target.mkdir(parents=True, exist_ok=True)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _write(archive, name, target, content, length)
                tick(f"{count:,} files", advance=0)
        if not (temporary / folder).is_dir():
            raise DataError(f"{archive} does not contain {folder}: it is another archive")
        os.replace(temporary / folder, home)
    except (OSError, EOFError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{archive} cannot be unpacked ({error})") from error
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, ValueError) as error:
        raise DataError(f"{archive} is damaged or cut short ({error}); download it again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return home


def sweep_unpacked(root: Path, folder: str) -> None:
    """Remove what killed processes left of `folder`: only names that `unpack` uses, no links, nothing that a running process has locked."""
    for left in root.glob(f".{glob.escape(folder)}.*.tmp") if fcntl else ():
        if re.fullmatch(r"[0-9a-f]{32}", left.name.removeprefix(f".{folder}.").removesuffix(".tmp")):
            with suppress(OSError), _locked(left):
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder until the block or the process ends; OSError if another process has locked it, or if it is not a folder."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _inside(archive: Path, name: str, folder: str) -> PurePosixPath:
    path = PurePosixPath(name)
    odd = any(c in name for c in "\\\0:") or path.is_absolute() or ".." in path.parts
    if odd or not path.parts or path.parts[0] != folder:
        raise DataError(f"{archive} contains {name[:100]!r}, which is outside {folder}: refused, and nothing was kept")
    return path


def _write(archive: Path, name: str, target: Path, content: IO[bytes], length: int) -> None:
    with content, target.open("xb") as file:
        while chunk := content.read(CHUNK):
            length -= len(chunk)
            if length < 0:
                raise DataError(f"{archive} contains {name[:100]!r}, which is longer than its header says: refused")
            file.write(chunk)
    if length:
        raise DataError(f"{archive} contains {name[:100]!r}, which is shorter than its header says: download it again")


class _Bounded:
    """The decompressed content of an archive, up to a length; longer content and headers of megabytes are refused."""

    def __init__(self, stream: Any, archive: Path, limit: int):
        self.stream, self.archive, self.limit = stream, archive, limit + SLACK

    def read(self, size: int = -1) -> bytes:
        found = self.stream.read(size) if 0 <= size <= LARGEST_READ else b""
        if self.stream.tell() > self.limit or not 0 <= size <= LARGEST_READ:
            raise DataError(f"{self.archive} would unpack to more bytes than it may have: refused")
        return found

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or offset > self.limit:
            raise DataError(f"{self.archive} would unpack to more bytes than it may have: refused")
        return self.stream.seek(offset)

    def tell(self) -> int:
        return self.stream.tell()


@contextmanager
def open_tar(archive: Path, *, limit: int) -> Iterator[tarfile.TarFile]:
    """Open a `.tar.gz` file.

    Args:
        limit: largest total size of its files in bytes. Decompression stops shortly after it; read files in pieces of `CHUNK`.
    """
    with gzip.open(archive, "rb") as stream:
        bounded: Any = _Bounded(stream, archive, limit)
        with tarfile.open(fileobj=bounded, mode="r:") as found:
            yield found


def _tar(archive: Path, limit: int) -> Iterator[Entry]:
    with open_tar(archive, limit=limit) as found:
        for member in found:
            name = member.name.removeprefix("./")
            if member.isdir() and name in ("", "."):
                continue
            if not (member.isreg() or member.isdir()):
                raise DataError(f"{archive} contains {name[:100]!r}, a link or a device: refused, and nothing was kept")
            yield name, member.size, found.extractfile(member) if member.isreg() else None
        to_the_end(found)


def to_the_end(found: tarfile.TarFile) -> None:
    """Read to the end of the file: the checksum of the compressed data is there, and is compared only when it is read."""
    left = 16 * CHUNK  # archives are padded to a whole record, usually of ten thousand bytes
    while left and (padding := found.fileobj.read(min(left, CHUNK))):
        left -= len(padding)
    if not left:
        raise tarfile.TarError("too much data follows its last file")


def _zip(archive: Path) -> Iterator[Entry]:
    with zipfile.ZipFile(archive) as found:
        for info in found.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise DataError(
                    f"{archive} contains {info.filename[:100]!r}, a link or a device: refused, and nothing was kept"
                )
            yield info.filename, info.file_size, None if info.is_dir() else found.open(info)
