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

    A run that starts is compared with other seeds of its recipe next to it, because all of them give one mean.

    Args:
        force: accept changed inputs and write their fingerprints instead.
    """
    now, begun = inputs_of(distiller, data), run.inputs.exists()
    known = [run] if begun else [other for other in run.other_seeds() if read_inputs(other) is not None]
    for other in known:
        if changed := _changed(other, now):
            if not force:
                raise RunError(
                    f"{other.path} started with other inputs ({', '.join(changed)}); restore them, choose another folder with `out=`, "
                    f"or {'resume' if begun else 'start another seed'} anyway with `force=True`"
                )
            say(f"{run.path}: {'resumes' if begun else 'starts'} with other inputs than {other.path} ({', '.join(changed)})")
    if not begun or force:
        write_whole(run.inputs, json.dumps(now, indent=1, sort_keys=True).encode())


def inputs_of(distiller: Distiller, data: Dataset) -> dict[str, str]:
    """The fingerprints of the images and of the teacher, by name."""
    found = {name: getattr(data, split).fingerprint() for name, split in SPLITS.items()}
    return found if distiller.teacher is None else {**found, "teacher": fingerprint(distiller.teacher)}


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
