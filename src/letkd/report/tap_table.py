"""The modules of a network and the proposed taps, for `letkd taps`."""

from dataclasses import dataclass

import torch
from rich.text import Text
from torch import nn

from letkd.batch import input_size_of
from letkd.models.extras import facts_of_network, set_image_size
from letkd.taps import ModuleRun, Tap, as_taps, trace
from letkd.taps.find import proposals

SITES = ("penultimate", "intermediate")
UNKNOWN = (3, 224, 224)


@dataclass(frozen=True)
class NetworkTaps:
    """The modules that ran in one forward pass, the proposed taps, and in `trouble` why some are missing.

    Args:
        image: shape of the input.
        own: whether the taps come from the network's own table.
    """

    image: tuple[int, ...]
    ran: list[ModuleRun]
    proposed: dict[str, Tap]
    own: bool
    trouble: str = ""


def inspect_taps(model: nn.Module, image: tuple[int, ...] | None = None) -> NetworkTaps:
    """Run a network once on zeros and record the output of every module.

    Args:
        image: shape of the input; default: the network's own (`input_size`, or timm's `pretrained_cfg`), or that of ImageNet.
    """
    if image is None:
        size = facts_of_network(model).get("size")
        image = (3, *size) if size else input_size_of(model) or UNKNOWN
    set_image_size(model, (image[1], image[2]))
    example = torch.zeros(1, *image)
    ran = trace(model, example)
    own = {role: tap for role, tap in as_taps(model).items() if role in SITES}
    if own:
        return NetworkTaps(image, ran, own, own=True)
    found, trouble = proposals(ran, example)
    return NetworkTaps(image, ran, found, own=False, trouble=trouble)


def as_rich(found: NetworkTaps, title: str) -> Text:
    """One line per module; not truncated, so that paths can be copied."""
    roles: dict[str, list[str]] = {}
    for role, tap in found.proposed.items():
        roles.setdefault(tap.path, []).append(role if tap.io == "output" else f"{role} (its input)")
    lines = [("module", "type", "output", "")]
    for item in found.ran:
        if item.path:
            note = [f"← {', '.join(roles[item.path])}{'' if found.own else ', proposed'}"] if item.path in roles else []
            lines.append((item.path, type(item.module).__name__, outputs(item), "; ".join([*note, *remarks(item)])))
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    text = Text(f"{title}, one image {'×'.join(map(str, found.image))}\n")
    for line in lines:
        row = "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]).rstrip()
        text.append(f"\n{row}", style="bold green" if "←" in line[3] else "")
    return text


def outputs(item: ModuleRun) -> str:
    """Shapes of the outputs of a module's calls."""
    if not item.shapes:
        return "–"
    shown = [shape if isinstance(shape, str) else f"[{' '.join(['b', *map(str, shape[1:])])}]" for shape in item.shapes]
    return ", ".join(dict.fromkeys(shown))


def remarks(item: ModuleRun) -> list[str]:
    """Reasons why a module cannot have a tap."""
    found = []
    if not item.shapes:
        found.append("does not run")
    elif not item.live:
        found.append("does not depend on the image, or does not reach the logits")
    if len(item.shapes) > 1:
        found.append(f"runs {len(item.shapes)} times: cannot have a tap")
    if item.names:
        found.append(f"the same module as {', '.join(item.names)}")
    return found
