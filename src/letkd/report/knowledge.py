"""Transferred knowledge: the teacher's labels at each location of an image, the student's prediction and what its layer keeps."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from letkd.data import Dataset
from letkd.distiller import Distiller
from letkd.functional import pixels
from letkd.inspect.sites import SiteView, at_rest, inspect_sites
from letkd.report.opened import balanced_sample, batch_of
from letkd.taps import as_logits

Entries = list[tuple[int, float]]
OTHER = -1  # colour of labels too rare for their own
HUES = 12


@dataclass(frozen=True)
class Location:
    """One pixel of the feature map.

    Args:
        label: its sub-class or cluster.
        colour: index among the `HUES`: by sub-class within its class, otherwise by how frequent the label is in the image.
        p_T, p_S: the largest entries, in descending order.
        kept: the largest entries after BN-ReLU, as shares of their sum; empty if everything is discarded, None if there is no KD
            layer.
        added: α‖x'‖/‖x‖ at this pixel.
    """

    label: int
    colour: int
    p_T: Entries
    p_S: Entries
    kept: Entries | None
    added: float | None


@dataclass(frozen=True)
class Picture:
    """An image, its true and predicted (`taken`) class, and its locations, row by row."""

    image: Tensor
    true: int
    taken: int
    locations: list[Location]


@dataclass(frozen=True)
class Template:
    """A frequent label and the nearest patches of training images, nearest first. `share` is the share of pixels with this label."""

    label: int
    share: float
    patches: list[Tensor]


@dataclass(frozen=True)
class Knowledge:
    """The knowledge at one site. `per_class` is the number of sub-classes per class, if labels belong to classes."""

    site: str
    kind: str
    labels: int
    per_class: int | None
    size: tuple[int, int]
    classes: tuple[str, ...]
    pictures: list[Picture]
    templates: list[Template] = field(default_factory=list)

    def name(self, label: int) -> str:
        """A readable label: `3.5` is the fifth sub-class of class 3."""
        if self.per_class is None:
            return str(label)
        return f"{self.classes[label // self.per_class]}.{label % self.per_class + 1}"


def _by_centre(view: SiteView) -> tuple[Tensor, Tensor]:
    supervision: Any = view.supervision
    label = view.p_T().argmax(dim=1)
    gap = pixels(view.f_T.to(supervision.rho_.dtype)) - supervision.rho_[label.flatten()]
    return label, gap.norm(dim=1).reshape(label.shape)


def _by_sub_class(view: SiteView) -> tuple[Tensor, Tensor]:
    supervision: Any = view.supervision
    b, _, h, w = view.f_T.shape
    z = supervision.z(view.f_T)
    label = supervision.h1(z, view.y.repeat_interleave(h * w))
    centres = supervision.prototypes_ if supervision.prototypes_online else supervision.rho_
    return label.reshape(b, h, w), (z - centres.flatten(0, 1)[label]).norm(dim=1).reshape(b, h, w)


def _by_activation(view: SiteView) -> tuple[Tensor, Tensor]:
    largest = view.f_T.max(dim=1)
    return largest.indices, -largest.values


# By kind of supervision: the label of every pixel [b h w], and the pixel's distance from the centre of that label.
ASSIGN: dict[str, Callable[[SiteView], tuple[Tensor, Tensor]]] = {
    "kmeans": _by_centre,
    "subclass": _by_sub_class,
    "conv3x3": _by_activation,
}


def knowledge(distiller: Distiller, data: Dataset, *, images: int = 6, patches_from: int = 400) -> list[Knowledge]:
    """The knowledge at each fitted site, on a few test images; templates are shown by patches of training images."""
    shown, originals = batch_of(data, data.test, _one_per_class(data.test.labels, images))
    height, width = data.image_size
    n = max(24, min(patches_from, 2**19 // (height * width)))  # large images need much memory in both networks
    near, others = batch_of(data, data.train, balanced_sample(data.train.labels, n))
    with at_rest(distiller):
        taken = as_logits(distiller.student(shown.x), distiller.student).argmax(dim=1)
        test_views, train_views = inspect_sites(distiller, shown), inspect_sites(distiller, near)
        return [
            _site(view, train_views[role], data, originals, taken, others)
            for role, view in test_views.items()
            if view.supervision.is_fitted and view.supervision.kind in ASSIGN
        ]


def _one_per_class(labels: Tensor, n: int) -> Tensor:
    """Indices of one image from each of n evenly spaced classes."""
    present = labels.unique().tolist()
    chosen = sorted({present[k * len(present) // n] for k in range(n)})
    return torch.stack([(labels == c).nonzero().flatten()[0] for c in chosen])


def _site(view: SiteView, near: SiteView, data: Dataset, images: Tensor, taken: Tensor, near_images: Tensor) -> Knowledge:
    M = view.omega.weight.shape[0]
    per_class = M // data.num_classes if view.supervision.kind == "subclass" else None
    h, w = view.x.shape[-2:]
    label, _ = ASSIGN[view.supervision.kind](view)
    pictures = []
    for b in range(len(view.x)):
        locations = _locations(view.part(slice(b, b + 1)), label[b], per_class)
        pictures.append(Picture(images[b], int(view.y[b]), int(taken[b]), locations))
    return Knowledge(
        view.role,
        view.supervision.kind,
        M,
        per_class,
        (h, w),
        data.classes,
        pictures,
        nearest_patches(near, near_images),
    )


def _locations(one: SiteView, label: Tensor, per_class: int | None) -> list[Location]:
    frequent = [k for k, _ in Counter(label.flatten().tolist()).most_common(HUES)]
    a, p_T = one.a()[0], one.p_T()[0]
    p_S = torch.softmax(a, dim=0)
    p = added = None
    if one.layer is not None and one.uses_knowledge:
        p = one.p(a[None])[0]
        x_prime = one.layer.alpha * one.layer.nu(p[None])[0]
        added = x_prime.norm(dim=0) / one.x[0].norm(dim=0).clamp_min(1e-12)
    found = []
    for i in range(label.shape[0]):
        for j in range(label.shape[1]):
            k = int(label[i, j])
            colour = k % per_class % HUES if per_class else (frequent.index(k) if k in frequent else OTHER)
            kept = None if p is None else _top(p[:, i, j] / p[:, i, j].sum().clamp_min(1e-12), 6)
            ratio = None if added is None else float(added[i, j])
            found.append(Location(k, colour, _top(p_T[:, i, j], 12), _top(p_S[:, i, j], 6), kept, ratio))
    return found


def _top(values: Tensor, n: int) -> Entries:
    best = values.topk(min(n, len(values)))
    return [(int(k), float(v)) for v, k in zip(best.values, best.indices, strict=True) if v > 0]


def nearest_patches(view: SiteView, images: Tensor, *, templates: int = 8, patches: int = 6) -> list[Template]:
    """For the most frequent labels: the nearest pixels, one per image, as patches that are three feature-map pixels wide."""
    parts = [ASSIGN[part.supervision.kind](part) for part in view.parts()]
    label, distance = torch.cat([one for one, _ in parts]), torch.cat([far for _, far in parts])
    found = []
    for k, count in Counter(label.flatten().tolist()).most_common(templates):
        cut: list[Tensor] = []
        used: set[int] = set()
        at = (label == k).nonzero()
        for b, i, j in at[distance[label == k].argsort()].tolist():
            if b not in used and len(cut) < patches:
                used.add(b)
                cut.append(_patch(images[b], (i, j), (label.shape[1], label.shape[2])))
        found.append(Template(int(k), count / label.numel(), cut))
    return found


def _patch(image: Tensor, at: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """The part of an image under a feature-map pixel and its neighbours, black beyond the edge."""
    (H, W), (h, w) = image.shape[-2:], size
    high, wide = max(1, H // h), max(1, W // w)
    padded = torch.nn.functional.pad(image, (wide, wide, high, high))
    return padded[:, at[0] * high : (at[0] + 3) * high, at[1] * wide : (at[1] + 3) * wide]
