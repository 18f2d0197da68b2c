"""What `auto` means on the device at hand: precision and memory layout of training."""

from typing import Any

import torch

from letkd.errors import RecipeError
from letkd.recipes.schema import Recipe

AUTO = ("precision", "channels_last", "fold_teacher", "bf16_teacher")  # keys of [train] that can be "auto"


def choices(recipe: Recipe) -> dict[str, Any]:
    """The values of `AUTO`, with `auto` resolved for the current device.

    A device with bf16 arithmetic trains in bf16-mixed, any other in single precision; the teacher, too. Channels last is faster on a CPU
    and, in mixed precision, on a GPU with tensor cores; a folded teacher needs fewer operations on any device (docs/speed.md).
    """
    asked = {name: getattr(recipe.train, name) for name in AUTO}
    precision = ("bf16-mixed" if has_bf16() else "32-true") if asked["precision"] == "auto" else asked["precision"]
    if precision == "64-true" and asked["bf16_teacher"] is True:
        raise RecipeError(
            "train.bf16_teacher needs single or mixed precision, but train.precision is 64-true; change one of them"
        )
    on_cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available())
    auto = {"precision": precision, "channels_last": on_cpu or precision.endswith("mixed"), "fold_teacher": True}
    auto["bf16_teacher"] = precision != "64-true" and has_bf16()
    return {name: auto[name] if value == "auto" else value for name, value in asked.items()}


def has_bf16() -> bool:
    """Whether the device computes in bf16; where bf16 is emulated, it is slower than single precision."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.backends.mps.is_available():
        return False
    found = getattr(torch.cpu, "get_capabilities", dict)()  # releases without it: treated as a processor without bf16
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def chosen(recipe: Recipe) -> dict[str, Any]:
    """What was resolved, for the run's record; empty if the recipe leaves nothing to the device."""
    return choices(recipe) if "auto" in (getattr(recipe.train, name) for name in AUTO) else {}
