"""Folders written by transformers' `save_pretrained`: configuration, weights as safetensors, and image preprocessing.

transformers loads them itself, from the local disk only: no download, no pickle, no code from the folder.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from letkd.errors import CheckpointError
from letkd.models.extras import import_library, reason
from letkd.progress import say

PREFIX = "transformers:"
OWN = "own"  # instead of a weights file: the network loads its weights itself
LARGEST_JSON = 10_000_000  # bytes


def pretrained_folder(name: str, weights: str | Path) -> Path | None:
    """The folder that transformers must load, given a network's name and its weights; None if they are an ordinary file.

    Args:
        weights: the folder, its `model.safetensors`, or `own` for the folder that `transformers:FOLDER` names.
    """
    if not name.startswith(PREFIX):
        return None
    path = Path(name.removeprefix(PREFIX) if str(weights) == OWN else weights).expanduser()
    if path.is_dir():
        return path
    inside = path.name.startswith("model") and path.suffix == ".safetensors" and (path.parent / "config.json").is_file()
    return path.parent if inside else None


def load_pretrained(folder: Path, num_classes: int, *, new_head: bool = False, headless: bool = False) -> nn.Module:
    """Load the classifier in a folder; every weight comes from the folder.

    Args:
        num_classes: number of logits of the network.
        new_head: accept weights with another number of classes; the classifier is then freshly initialised, and a message names it.
        headless: accept weights without a classifier; the network is then only the backbone, and its `num_classes` is 0.
    """
    refuse_what_runs_code(folder)
    transformers: Any = import_library("transformers", f"{PREFIX}{folder}")
    if headless and not _has_classifier(transformers, folder):
        return _load_backbone(transformers, folder)
    try:
        model, report = transformers.AutoModelForImageClassification.from_pretrained(
            str(folder),
            num_labels=num_classes,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported below with a message of our own
            output_loading_info=True,
        )
    except Exception as error:
        raise CheckpointError(
            f"transformers could not load a classifier from {folder}: {reason(error)}; it must hold a config.json and weights as "
            ".safetensors (pickled weights are not read, and no code from the folder is run)"
        ) from error
    other = {key: tuple(shapes) for key, *shapes in report["mismatched_keys"]}
    fresh = sorted({*report["missing_keys"], *other})
    heads = {key.rpartition(".")[0] for key in other if _is_head(other[key], num_classes)}
    if fresh and new_head and {key.rpartition(".")[0] for key in fresh} == heads:
        say(f"{folder}: its {', '.join(sorted(heads))} has other classes and is trained from scratch")
    elif fresh:
        listed = ", ".join(
            f"{key} {list(other[key][0])} for {list(other[key][1])}" if key in other else key for key in fresh[:4]
        )
        raise CheckpointError(
            f"{folder} does not fit {type(model).__name__} with {num_classes} classes: {len(fresh)} weights are missing or of another "
            f"shape ({listed}{', …' if len(fresh) > 4 else ''}); use a checkpoint of a classifier with the same classes"
        )
    if report["unexpected_keys"]:
        say(
            f"{folder}: {len(report['unexpected_keys'])} weights are not used ({', '.join(sorted(report['unexpected_keys'])[:4])})"
        )
    return model


def _has_classifier(transformers: Any, folder: Path) -> bool:
    """Whether the folder holds an image classifier: transformers knows it as one, and its keys include a classifier."""
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        known = type(config) in transformers.AutoModelForImageClassification._model_mapping.keys()  # noqa: SIM118
        keys = [key for file in folder.glob("*.safetensors") for key in _keys(file)]
    except Exception:  # loading it raises the error message
        return True
    return known and (not keys or any("classifier" in key or key.startswith("fc.") for key in keys))


def _keys(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _load_backbone(transformers: Any, folder: Path) -> nn.Module:
    settings = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    try:
        model, report = transformers.AutoModel.from_pretrained(str(folder), **settings)
        if report["missing_keys"] and all(key.startswith("pooler.") for key in report["missing_keys"]):
            model, report = transformers.AutoModel.from_pretrained(str(folder), add_pooling_layer=False, **settings)
    except Exception as error:
        raise CheckpointError(f"transformers could not load a backbone from {folder}: {reason(error)}") from error
    if report["missing_keys"]:
        raise CheckpointError(
            f"{folder} does not fit {type(model).__name__}: {len(report['missing_keys'])} weights are missing "
            f"({', '.join(sorted(report['missing_keys'])[:4])}); get it again"
        )
    say(f"{folder}: has no classifier, so {type(model).__name__} is a backbone")
    model.num_classes = 0
    return model


def facts_of_weights(name: str, weights: str | Path) -> dict[str, Any]:
    """`num_classes`, `classes`, `mean`, `std` and `size` from a transformers folder, if it has them; {} for anything else."""
    folder = pretrained_folder(name, weights)
    if folder is None:
        return {}
    table = _read_json(folder / "config.json")
    labels = table.get("id2label")
    found: dict[str, Any] = {"num_classes": table.get("num_labels", 2)}  # 2 is transformers' own default
    if isinstance(labels, Mapping) and labels:
        found["num_classes"] = len(labels)
        names = [labels.get(str(k)) for k in range(len(labels))]
        if names != [f"LABEL_{k}" for k in range(len(labels))]:
            found["classes"] = names
    return found | _preprocessing(_read_json(folder / "preprocessor_config.json"))


def _preprocessing(table: Mapping[str, Any]) -> dict[str, Any]:
    """Normalisation (0 is black, 1 is white) and image size from a `preprocessor_config.json`."""
    if not table:
        return {}
    unit = 255 * table.get("rescale_factor", 1 / 255) if table.get("do_rescale", True) else 255.0
    normalised = table.get("do_normalize", True) and "image_mean" in table and "image_std" in table
    mean, std = (table["image_mean"], table["image_std"]) if normalised else ([0.0] * 3, [1.0] * 3)
    crop = table.get("crop_size") if table.get("do_center_crop") else None
    size = _side(crop if crop is not None else table.get("size"))
    try:
        found: dict[str, Any] = {"mean": [float(m) / unit for m in mean], "std": [float(s) / unit for s in std]}
    except (TypeError, ValueError, ZeroDivisionError):
        raise CheckpointError(
            "the normalisation in a preprocessor_config.json is not a list of numbers; get the file again"
        ) from None
    return found | ({"size": size} if size else {})


def _side(size: Any) -> list[int] | None:
    if isinstance(size, Mapping):
        height = size.get("height", size.get("shortest_edge"))
        return None if height is None else [height, size.get("width", height)]
    return [size, size] if isinstance(size, int) else None


def _is_head(shapes: tuple[Any, ...], num_classes: int) -> bool:
    """Whether the two shapes of a weight, the file's and the model's, differ only in the number of classes."""
    in_file, in_model = (tuple(shape) for shape in shapes)
    return in_model[0] == num_classes and in_file[1:] == in_model[1:]


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError("too large")
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; get it again") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object; get it again")
    return table


def refuse_what_runs_code(folder: Path) -> None:
    """Refuse settings that make transformers fetch or run code other than its own: hub kernels, quantisers, adapters."""
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder} holds an adapter, which cannot be loaded; merge it into its network and save that")
    for key, value in _entries(_read_json(folder / "config.json")):
        if key == "quantization_config" or ("attn_implementation" in key and "/" in str(value)):
            raise CheckpointError(
                f"{folder / 'config.json'} asks for {key} = {str(value)[:80]}, which may fetch or run other code; remove the key"
            )


def _entries(table: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    for key, value in table.items() if isinstance(table, Mapping) else ():
        yield str(key), value
        yield from _entries(value)
