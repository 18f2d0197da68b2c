"""Files that are whole or absent."""

import errno
import os
import uuid
from contextlib import suppress
from pathlib import Path

from letkd.errors import RunError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, content: bytes, *, previous: Path | None = None) -> None:
    """Write beside, flush to disk, rename: whoever looks finds the old file or the new one, never half of one.

    Args:
        previous: the name that the old file gets, where it is to be kept; at every moment one of the two is there.
    """
    # Not tempfile: its files can be read by their owner alone, and the replacement would inherit that.
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
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


def sweep(folder: Path) -> None:
    """Remove what killed writers left beside the files of a folder; for one who knows that nobody is writing there."""
    for left in folder.glob(".*.tmp"):
        left.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """A rename is on disk only when its folder is; where folders cannot be flushed, the file system sees to it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
