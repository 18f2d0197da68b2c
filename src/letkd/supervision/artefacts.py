"""Fitted supervisions on disk: safetensors files with a fingerprint of everything they depend on, reused only if it matches.

The fingerprint is part of the file's name, so that runs with different settings, teachers or data can share one folder.
"""

import glob
import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from letkd.distributed.processes import from_first, rank
from letkd.errors import InUseError, RunError
from letkd.files import hold, write_whole
from letkd.progress import say
from letkd.supervision.fitted import Fitted
from letkd.tensors import as_safetensors, checksum, fingerprint

FORMAT = "letkd-supervision-1"
WAIT_SECONDS = 0.2  # between checks whether another run has finished its fit


@dataclass(frozen=True)
class Origin:
    """What a fitted part depends on."""

    teacher: str
    tap: str
    data: str
    settings: str

    @classmethod
    def of(cls, teacher: nn.Module, tap: str, data: str, part: Fitted) -> "Origin":
        settings = {"kind": part.kind, **part.settings()}
        return cls(fingerprint(teacher), tap, data, json.dumps(settings, sort_keys=True))


def path_of(part: Fitted, folder: Path, site: str, origin: Origin) -> Path:
    """The file of a site, always directly in `folder`: special characters in the site's name become dashes."""
    digest = hashlib.sha256(json.dumps(asdict(origin), sort_keys=True).encode()).hexdigest()
    return folder / f"{_stem(part, site)}.{digest[:12]}.safetensors"


def _stem(part: Fitted, site: str) -> str:
    name = re.sub(r"[^\w.-]", "-", site)
    return f"{name}.{part.kind}"


@contextmanager
def alone(paths: Iterable[Path]) -> Iterator[None]:
    """Until the block ends, other runs that want to write these files wait; if another run is writing them, wait for it first.

    The first process of a run holds the locks. All processes ask it again and again, so that none waits too long for an answer.
    """
    with ExitStack() as held:
        for path in sorted(paths):
            waited = False
            while not from_first(rank() == 0 and _hold(path, held)):
                if not waited:
                    say(f"{path}: another run is fitting it; waiting")
                waited = True
                time.sleep(WAIT_SECONDS)
        yield


def _hold(path: Path, held: ExitStack) -> bool:
    """Hold the lock of a file until `held` is closed; False if another process has it."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held.enter_context(hold(lock))
    except InUseError:
        return False
    except OSError as error:
        raise RunError(f"{lock.parent} cannot be created: {error.strerror}; choose another folder") from None
    held.callback(lock.unlink, missing_ok=True)  # before the lock is released: whoever gets it next finds the file
    return True


def save_fitted(part: Fitted, folder: Path, site: str, origin: Origin) -> Path:
    """Write the buffers and their origin, atomically."""
    path = path_of(part, folder, site, origin)
    buffers = {name: getattr(part, name).detach().cpu().contiguous() for name in part.fitted_buffers}
    report = json.dumps(part.report_)
    metadata = {"format": FORMAT, "report": report, "sha256": checksum(buffers, report), **asdict(origin)}
    write_whole(path, as_safetensors(buffers, metadata))
    return path


def load_fitted(part: Fitted, folder: Path, site: str, origin: Origin) -> bool:
    """Load the fitted buffers if the folder has them for this origin; otherwise log what differs and return False.

    Files of earlier versions, without a fingerprint in their name, are read as well.
    """
    stem = _stem(part, site)
    own, old = path_of(part, folder, site, origin), folder / f"{stem}.safetensors"
    for path in (own, old):
        if path.exists() and _load(part, path, origin):
            return True
    others = [path for path in sorted(folder.glob(f"{glob.escape(stem)}.*.safetensors")) if path != own]
    differences = [changed for path in others if (changed := _differences(path, origin))]
    if differences and not own.exists():
        what = ", ".join(min(differences, key=len))
        say(f"{folder}: the fits at {site} differ in {what}; fitting again, next to them")
    return False


def _load(part: Fitted, path: Path, origin: Origin) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            buffers = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is not a dict
    except (SafetensorError, OSError) as error:
        say(f"{path}: not readable ({error}); refitting")
        return False
    changed = [key for key, value in asdict(origin).items() if metadata.get(key) != value]
    if metadata.get("format") != FORMAT or set(buffers) != set(part.fitted_buffers):
        changed = ["format"]
    elif metadata.get("sha256") != checksum(buffers, metadata.get("report", "")):
        changed = ["content (checksum)"]
    if changed:
        say(f"{path}: differs in {', '.join(changed)}; refitting")
        return False
    for name, value in buffers.items():
        setattr(part, name, value.to(part._at.device))
    part.report_ = json.loads(metadata["report"])
    say(f"{path}: same teacher, tap, data and settings; reused")
    return True


def _differences(path: Path, origin: Origin) -> list[str]:
    """The parts in which a file's origin differs; empty if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError):
        return []
    return [key for key, value in asdict(origin).items() if metadata.get(key) != value]
