"""Fitted supervisions on disk: safetensors with the fingerprint of all they depend on, reused only when it matches."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from letkd.files import write_whole
from letkd.models.weights import as_safetensors, checksum, fingerprint
from letkd.progress import say
from letkd.supervision.base import Supervision

FORMAT = "letkd-supervision-1"


@dataclass(frozen=True)
class Origin:
    """What a fitted supervision depends on."""

    teacher: str
    tap: str
    data: str
    settings: str

    @classmethod
    def of(cls, teacher: nn.Module, tap: str, data: str, supervision: Supervision) -> "Origin":
        settings = {"kind": supervision.kind, **supervision.settings()}
        return cls(fingerprint(teacher), tap, data, json.dumps(settings, sort_keys=True))


def path_of(supervision: Supervision, folder: Path, site: str) -> Path:
    """The file of a site, always directly in `folder`: whatever in the site's name is no part of a plain file name is a dash."""
    name = re.sub(r"[^\w.-]", "-", site)
    return folder / f"{name}.{supervision.kind}.safetensors"


def save_fitted(supervision: Supervision, folder: Path, site: str, origin: Origin) -> Path:
    """Write the buffers and their origin; the file appears whole or not at all."""
    path = path_of(supervision, folder, site)
    buffers = {name: getattr(supervision, name).detach().cpu().contiguous() for name in supervision.fitted_buffers}
    report = json.dumps(supervision.report_)
    metadata = {"format": FORMAT, "report": report, "sha256": checksum(buffers, report), **asdict(origin)}
    write_whole(path, as_safetensors(buffers, metadata))
    return path


def load_fitted(supervision: Supervision, folder: Path, site: str, origin: Origin) -> bool:
    """Take the fitted buffers from a file if it is whole and of this origin; otherwise say why it is fitted anew."""
    path = path_of(supervision, folder, site)
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            buffers = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
    except (SafetensorError, OSError) as error:
        say(f"{path}: not readable ({error}); fitting anew")
        return False
    changed = [part for part, value in asdict(origin).items() if metadata.get(part) != value]
    if metadata.get("format") != FORMAT or set(buffers) != set(supervision.fitted_buffers):
        changed = ["format"]
    elif metadata.get("sha256") != checksum(buffers, metadata.get("report", "")):
        changed = ["content (its checksum differs)"]
    if changed:
        say(f"{path}: made for another {', '.join(changed)}; fitting anew")
        return False
    for name, value in buffers.items():
        setattr(supervision, name, value.to(supervision._at.device))
    supervision.report_ = json.loads(metadata["report"])
    say(f"{path}: same teacher, tap, data and settings; reused")
    return True
