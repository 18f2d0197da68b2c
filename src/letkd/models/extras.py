"""Networks of other installed libraries: `timm:NAME`, `torchvision:NAME`, `transformers:NAME`.

Only the architecture comes from the library, freshly initialised: nothing is downloaded, and weights are loaded from a file as for any
network. A folder written by transformers' `save_pretrained` is loaded by transformers itself (`letkd.models.pretrained`), because the
names on disk can differ from those in memory.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import nn

from letkd.errors import LetkdError, nearest


def create_extra(library: str, name: str, num_classes: int) -> nn.Module:
    """Build a network of another library.

    Args:
        library: a key of `EXTRAS`.
        name: the library's name for it. transformers: a configuration class (`ResNetConfig`), a folder with a `config.json`, or a
            hub name whose configuration is in the local cache.
        num_classes: number of logits.
    """
    module = import_library(library, f"{library}:{name}")
    try:
        return EXTRAS[library](module, name, num_classes)
    except LetkdError:
        raise
    except Exception as error:
        raise LetkdError(f"{library}:{name} could not be built: {reason(error)}") from error


def import_library(library: str, asked: str) -> ModuleType:
    """Import a library, or raise an error that says how to install it."""
    if importlib.util.find_spec(library) is None:
        raise LetkdError(f"{asked} needs {library}, which is not installed: pip install 'letkd[{library}]'")
    try:
        return importlib.import_module(library)
    except Exception as error:  # torchvision raises a RuntimeError with a torch that it was not built for
        raise LetkdError(
            f"{asked} needs {library}, which is installed but cannot be imported ({reason(error)}); install a torch and "
            "torchvision that were built for each other, from the same index"
        ) from error


def _timm(timm: Any, name: str, num_classes: int) -> nn.Module:
    if not timm.is_model(name):
        raise LetkdError(f"timm has no model {name!r}; nearest: {nearest(name, timm.list_models())}")
    return timm.create_model(name, pretrained=False, num_classes=num_classes)


def _torchvision(torchvision: Any, name: str, num_classes: int) -> nn.Module:
    known = torchvision.models.list_models(module=torchvision.models)  # classifiers only, no detection or segmentation
    if name not in known:
        raise LetkdError(f"torchvision has no classifier {name!r}; nearest: {nearest(name, known)}")
    return torchvision.models.get_model(name, weights=None, num_classes=num_classes)


def facts_of_network(model: nn.Module) -> dict[str, Any]:
    """`mean`, `std` and `size` that a timm network was trained with, from its `pretrained_cfg`; {} for other networks."""
    table = getattr(model, "pretrained_cfg", None)
    if not isinstance(table, Mapping):
        return {}
    size = table.get("input_size")
    found = {"mean": table.get("mean"), "std": table.get("std"), "size": size and list(size)[-2:]}
    return {key: list(value) for key, value in found.items() if value is not None}


def set_image_size(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """Prepare a timm transformer for images of another size: its position embedding is interpolated. Other networks are unchanged."""
    now = getattr(getattr(model, "patch_embed", None), "img_size", None)  # None: any size
    if now is not None and tuple(now) != tuple(size) and hasattr(model, "set_input_size"):
        try:
            cast(Any, model).set_input_size(img_size=tuple(size))
        except Exception as error:
            raise LetkdError(
                f"{type(model).__name__} is a network for images of {now[0]}x{now[1]} and cannot be changed to {size[0]}x{size[1]} "
                f"({reason(error)}); choose another image size"
            ) from error
    return model


def _transformers(transformers: Any, name: str, num_classes: int) -> nn.Module:
    return transformers.AutoModelForImageClassification.from_config(_configuration(transformers, name, num_classes))


def _configuration(transformers: Any, name: str, num_classes: int) -> Any:
    folder = Path(name).expanduser()
    if not folder.is_dir() and name.endswith("Config"):
        configuration = getattr(transformers, name, None)
        if configuration is None:
            known = [key for key in dir(transformers) if key.endswith("Config")]
            raise LetkdError(f"transformers has no configuration {name!r}; nearest: {nearest(name, known)}")
        return configuration(num_labels=num_classes)
    if folder.is_dir():
        from letkd.models.pretrained import refuse_what_runs_code  # here, because it imports this file

        refuse_what_runs_code(folder)
    try:
        source = str(folder) if folder.is_dir() else name
        return transformers.AutoConfig.from_pretrained(
            source, num_labels=num_classes, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise LetkdError(
            f"transformers:{name} is neither a configuration class, nor a folder with a config.json, nor in the local cache; nothing is "
            "downloaded: name one of these, as in transformers:ResNetConfig or transformers:path/to/folder"
        ) from error


def reason(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


EXTRAS: dict[str, Callable[[Any, str, int], nn.Module]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}
