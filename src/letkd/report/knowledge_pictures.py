"""Transferred knowledge as data for the page, and as the figure of the paper's supplement."""

import base64
import colorsys
import io
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from letkd.report.charts import new_figure, tidy
from letkd.report.knowledge import OTHER, Entries, Knowledge

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def as_png(image: Tensor, *, largest: int = 128) -> str:
    """A uint8 image [3 h w] as a data URL, scaled down if a side is longer than `largest`."""
    from PIL import Image

    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((largest, largest))
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def as_json(one: Knowledge, title: str) -> dict[str, Any]:
    """The data for the page; shares are rounded to three digits."""
    return {
        "title": title,
        "site": one.site,
        "kind": one.kind,
        "labels": one.labels,
        "per_class": one.per_class,
        "size": list(one.size),
        "classes": list(one.classes) if one.per_class else [],
        "pictures": [
            {
                "png": as_png(picture.image),
                "true": one.classes[picture.true],
                "taken": one.classes[picture.taken],
                "locations": [
                    {
                        "k": at.label,
                        "c": at.colour,
                        "T": _short(at.p_T),
                        "S": _short(at.p_S),
                        "P": None if at.kept is None else _short(at.kept),
                        "added": None if at.added is None else round(at.added, 3),
                    }
                    for at in picture.locations
                ],
            }
            for picture in one.pictures
        ],
        "templates": [
            {"k": item.label, "name": one.name(item.label), "share": round(item.share, 4), "png": _strip(item.patches)}
            for item in one.templates
        ],
    }


def _short(entries: Entries) -> list[list[float]]:
    return [[k, round(value, 3)] for k, value in entries if round(value, 3) > 0]


def _strip(patches: list[Tensor]) -> list[str]:
    return [as_png(patch, largest=32) for patch in patches]


def draw_knowledge(one: Knowledge) -> "Figure":
    """The supplement's figure: locations coloured by label, next to p_T of the two most frequent labels."""
    figure = new_figure(7.2, 1.75 * len(one.pictures))
    panels = figure.subplots(len(one.pictures), 2, width_ratios=[1, 3.4], squeeze=False)
    for row, picture in enumerate(one.pictures):
        left, right = panels[row]
        H, W = picture.image.shape[-2:]
        h, w = one.size
        left.imshow(picture.image.permute(1, 2, 0).numpy())
        left.set(xticks=[], yticks=[])
        left.set_ylabel(one.classes[picture.true], fontsize=9, rotation=0, ha="right")
        x = [(n % w + 0.5) * W / w - 0.5 for n in range(h * w)]
        y = [(n // w + 0.5) * H / h - 0.5 for n in range(h * w)]
        left.scatter(x, y, s=9, c=[hue(at.colour) for at in picture.locations], edgecolors="white", linewidths=0.4)
        frequent = [k for k, _ in Counter(at.label for at in picture.locations).most_common(2)]
        for k in frequent:
            at = next(at for at in picture.locations if at.label == k)
            right.bar([j for j, _ in at.p_T], [v for _, v in at.p_T], width=max(0.8, one.labels / 250), color=hue(at.colour))
        tidy(right)
        right.set_xlim(-1, one.labels)
        right.set_ylim(0, 1)
        if one.per_class:
            step = max(1, len(one.classes) // 20)
            ticks = range(0, len(one.classes), step)
            right.set_xticks([c * one.per_class - 0.5 for c in ticks], [one.classes[c] for c in ticks], fontsize=7)
        right.set_ylabel("p_T", fontsize=8)
    panels[-1][1].set_xlabel("sub-class (a tick at the start of each class)" if one.per_class else "label", fontsize=8)
    return figure


def hue(colour: int) -> tuple[float, float, float]:
    """One of the `HUES` colours; grey for `OTHER`."""
    return (0.55, 0.55, 0.55) if colour == OTHER else colorsys.hls_to_rgb((colour * 137.508 % 360) / 360, 0.5, 0.72)
