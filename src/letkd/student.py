"""A trained student as one file: the network's name, the KD layers inside it and the weights; no teacher is needed to open it."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from letkd.errors import CheckpointError
from letkd.layer import KDLayer
from letkd.models import create_model, load_weights, save_weights
from letkd.taps import graft

FORMAT = "letkd-student-1"


def save_student(student: nn.Module, path: str | Path, *, model: str, num_classes: int, **facts: Any) -> None:
    """Write a student that `load_student` can open.

    Args:
        model: the name that `create_model` knows the bare network by.
        facts: whatever else should travel in the header: normalisation, class names.
    """
    header = {"format": FORMAT, "model": model, "num_classes": num_classes, "grafts": _grafts(student), **facts}
    save_weights(student, path, {"letkd": json.dumps(header)})


def load_student(path: str | Path) -> nn.Module:
    """Open what `save_student` wrote: build the network, graft its KD layers, load the weights; in eval mode."""
    header = read_header(path)
    student = create_model(header["model"], num_classes=header["num_classes"])
    for item in header["grafts"]:
        layer = KDLayer(item["d"], item["K"], alpha=item["alpha"], normalize_value_input=item["normalize_value_input"])
        graft(student, layer, after=item["after"], name=item["name"])
    load_weights(student, path)
    return student.eval()


def read_header(path: str | Path) -> dict[str, Any]:
    """What a student file says of itself."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("letkd", "null"))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no student file: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no student file of letkd; for plain weights name the network with --student")
    return header


def _grafts(student: nn.Module) -> list[dict[str, Any]]:
    found = []
    for path, module in student.named_modules():
        if isinstance(module, KDLayer):
            after, _, name = path.rpartition(".")
            K, d = module.omega.weight.shape[:2]
            settings = {"alpha": module.alpha, "normalize_value_input": module.nu.normalize_input}
            found.append({"after": after, "name": name, "d": d, "K": K, **settings})
    return found
