"""Files that are whole or absent."""

import os
import uuid
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write beside, flush to disk, rename: whoever looks finds the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its files can be read by their owner alone, and the replacement would inherit that.
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
