"""Archives unpacked into one folder and nowhere else, whole or not at all."""

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
LARGEST_READ = 4 * CHUNK  # of headers, which are read at once
SLACK = 32 * CHUNK  # headers, and what archives are filled up with
Entry = tuple[str, int, IO[bytes] | None]  # name, announced length, content; no content for a folder


def unpack(archive: Path, root: Path, *, folder: str, limit: int, files: int) -> Path:
    """Unpacks `archive`, which holds `folder` and nothing else, and returns where that folder then is in `root`.

    Only folders and plain files are made, with no rights from the archive; links, devices and names that lead elsewhere are
    refused. The folder gets its name when all of it is there.

    Args:
        limit: bytes that the files may have together.
        files: how many entries there may be.
    """
    home = root / folder
    if home.exists():
        raise DataError(f"{home} is there already; remove it to unpack {archive.name} again")
    sweep_unpacked(root, folder)
    beside = root / f".{folder}.{uuid.uuid4().hex}.tmp"
    entries = _zip(archive) if archive.suffix == ".zip" else _tar(archive, limit)
    try:
        beside.mkdir(parents=True)
        with _held(beside), bar(f"unpacking {archive.name}", None) as tick:
            for count, (name, length, content) in enumerate(entries, start=1):
                target = beside / _inside(archive, name, folder)
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
        if not (beside / folder).is_dir():
            raise DataError(f"{archive} does not hold {folder}: it is another archive")
        os.replace(beside / folder, home)
    except (OSError, EOFError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{archive} cannot be unpacked ({error})") from error
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, ValueError) as error:
        raise DataError(f"{archive} is damaged or cut short ({error}); download it again") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return home


def sweep_unpacked(root: Path, folder: str) -> None:
    """Remove what killed calls left of `folder`: our own names alone, no links, nothing that a running call holds."""
    for left in root.glob(f".{glob.escape(folder)}.*.tmp") if fcntl else ():
        if re.fullmatch(r"[0-9a-f]{32}", left.name.removeprefix(f".{folder}.").removesuffix(".tmp")):
            with suppress(OSError), _held(left):
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """A lock on the folder itself, which ends with the process; OSError if another has it, or if it is a link or no folder."""
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
        raise DataError(f"{archive} holds {name[:100]!r}, which lies outside {folder}: refused, and nothing was kept")
    return path


def _write(archive: Path, name: str, target: Path, content: IO[bytes], length: int) -> None:
    with content, target.open("xb") as file:
        while chunk := content.read(CHUNK):
            length -= len(chunk)
            if length < 0:
                raise DataError(f"{archive} holds {name[:100]!r}, which is longer than it says: refused")
            file.write(chunk)
    if length:
        raise DataError(f"{archive} holds {name[:100]!r}, which is shorter than it says: download it again")


class _Bounded:
    """What an archive decompresses to, up to a length; one that is longer, or has a header of megabytes, is refused."""

    def __init__(self, stream: Any, archive: Path, limit: int):
        self.stream, self.archive, self.limit = stream, archive, limit + SLACK

    def read(self, size: int = -1) -> bytes:
        found = self.stream.read(size) if 0 <= size <= LARGEST_READ else b""
        if self.stream.tell() > self.limit or not 0 <= size <= LARGEST_READ:
            raise DataError(f"{self.archive} would unpack to more bytes than it may have: refused")
        return found

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or place > self.limit:
            raise DataError(f"{self.archive} would unpack to more bytes than it may have: refused")
        return self.stream.seek(place)

    def tell(self) -> int:
        return self.stream.tell()


@contextmanager
def open_tar(archive: Path, *, limit: int) -> Iterator[tarfile.TarFile]:
    """A `.tar.gz` file.

    Args:
        limit: bytes that its files may have together. Nothing is decompressed much beyond it; read files in pieces of `CHUNK`.
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
                raise DataError(f"{archive} holds {name[:100]!r}, a link or a device: refused, and nothing was kept")
            yield name, member.size, found.extractfile(member) if member.isreg() else None
        to_the_end(found)


def to_the_end(found: tarfile.TarFile) -> None:
    """Read what follows the last member: a compressed file has its checksum there, and only who comes so far has it compared."""
    left = 16 * CHUNK  # archives are filled up to a whole record, most often of ten thousand bytes
    while left and (padding := found.fileobj.read(min(left, CHUNK))):
        left -= len(padding)
    if not left:
        raise tarfile.TarError("it goes on long after its last file")


def _zip(archive: Path) -> Iterator[Entry]:
    with zipfile.ZipFile(archive) as found:
        for info in found.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise DataError(f"{archive} holds {info.filename[:100]!r}, a link or a device: refused, and nothing was kept")
            yield info.filename, info.file_size, None if info.is_dir() else found.open(info)
