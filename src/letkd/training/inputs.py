"""Fingerprints of what a run reads besides its recipe: it resumes only with the teacher and the images that it started with."""

import json

from pydantic import TypeAdapter

from letkd.data import Dataset
from letkd.distiller import Distiller
from letkd.errors import RunError
from letkd.files import read_plain, write_whole
from letkd.progress import say
from letkd.runs.folder import RunFolder
from letkd.tensors import fingerprint


def check_inputs(run: RunFolder, distiller: Distiller, data: Dataset, *, force: bool = False) -> None:
    """Write the fingerprints of teacher and images to the run folder, or compare them with those already there.

    Args:
        force: accept changed inputs and write their fingerprints instead.
    """
    path = run.inputs
    now = {name: getattr(data, split).fingerprint() for name, split in SPLITS.items()}
    if distiller.teacher is not None:
        now["teacher"] = fingerprint(distiller.teacher)
    if path.exists():
        changed = _changed(run, now)
        if not changed:
            return
        if not force:
            raise RunError(
                f"{run.path} started with other inputs ({', '.join(changed)}); restore them, choose another folder with `out=`, or "
                "resume anyway with `force=True`"
            )
        say(f"{run.path}: resumes with other inputs than it started with ({', '.join(changed)})")
    write_whole(path, json.dumps(now, indent=1, sort_keys=True).encode())


SPLITS = {"training images": "train", "validation images": "val", "test images": "test"}


def read_inputs(run: RunFolder) -> dict[str, str] | None:
    """The fingerprints that a run started with; None if they are missing or damaged."""
    try:
        return TypeAdapter(dict[str, str]).validate_json(read_plain(run.inputs))
    except (OSError, ValueError):
        return None


def _changed(run: RunFolder, now: dict[str, str]) -> list[str]:
    before = read_inputs(run)
    if before is None:
        return [f"{run.inputs.name} is damaged, so the original inputs are unknown"]
    return [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
