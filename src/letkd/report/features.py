"""Teacher and students side by side: features in two dimensions, and correlations of the logits."""

import base64
import io
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.distiller.teacher_input import AdaptedTeacher
from letkd.errors import NonFiniteError, TapError
from letkd.inspect.sites import at_rest
from letkd.recipes.schema import Network, Teacher
from letkd.report.charts import new_figure
from letkd.report.legends import add_legend
from letkd.taps import Tap, Taps, as_logits, as_taps
from letkd.taps.find import proposed_taps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Way = Literal["pca", "tsne"]
CHARACTERS = 28  # per line of a panel's title


@dataclass(frozen=True, eq=False)
class Outputs:
    """Outputs of a network on some images: the classifier's input `[n d]` and the logits `[n C]`."""

    pooled: Tensor
    logits: Tensor


def outputs(model: nn.Module, batch: Batch, network: Network, *, step: int = 128) -> Outputs:
    """Run a network on some images.

    Args:
        network: its table in the recipe. The classifier's input is the tap `pooled` of this table, or of the network, or the one that
            `find_taps` proposes.
    """
    taps = Taps(model, {"pooled": _classifier_input(model, network, batch.x[:1])})
    pooled, logits = [], []
    with at_rest(model):
        for x in batch.x.split(step):
            output, features = taps(x)
            pooled.append(features["pooled"].flatten(1).float())
            logits.append(as_logits(output, model).float())
    found = Outputs(torch.cat(pooled), torch.cat(logits))
    if not (torch.isfinite(found.pooled).all() and torch.isfinite(found.logits).all()):
        raise NonFiniteError(f"{network.model} returns NaN or infinity for test images; check its weights")
    return found


def _classifier_input(model: nn.Module, network: Network, example: Tensor) -> Tap:
    if isinstance(model, AdaptedTeacher):
        tap = _classifier_input(model.teacher, network, model.teacher_input(example))
        return replace(tap, path=f"teacher.{tap.path}")
    known = as_taps(model, network.taps)
    tap = known.get("pooled") or proposed_taps(model, example)[0].get("pooled")
    if tap is None:
        option = "--teacher-tap" if isinstance(network, Teacher) else "--tap"
        raise TapError(
            f"{network.model} has no tap 'pooled', the input of its classifier, and none was found; name it in the training command "
            f"with {option} pooled=module.path:input, where module.path is the classifier"
        )
    return tap


def project(pooled: Tensor, way: Way = "pca") -> np.ndarray:
    """Two coordinates per image, between -1 and 1: the first principal components, or t-SNE. Deterministic."""
    x = pooled.double().numpy()
    if way == "tsne":
        from sklearn.manifold import TSNE

        at = TSNE(perplexity=min(30.0, max(1.0, (len(x) - 1) / 3)), init="pca", random_state=0).fit_transform(x)
    else:
        x = x - x.mean(axis=0)
        _, _, vt = np.linalg.svd(x, full_matrices=False)
        # The sign of a component is arbitrary: choose it so that the largest weight is positive.
        vt = vt[:2] * np.sign(vt[:2][np.arange(len(vt[:2])), np.abs(vt[:2]).argmax(axis=1)])[:, None]
        at = x @ vt.T
        at = np.pad(at, ((0, 0), (0, 2 - at.shape[1])))
    at = at - at.mean(axis=0)
    return at / max(float(np.abs(at).max()), 1e-12)


def correlation(logits: Tensor) -> Tensor:
    """Correlation of the logits of every two classes over the images, `[C C]`; 0 if a logit is constant."""
    z = logits.double() - logits.double().mean(dim=0)
    length = z.norm(dim=0)
    z = torch.where(length > 0, z / length.clamp_min(1e-300), torch.zeros_like(z))
    return z.T @ z


def correlation_difference(teacher: Tensor, student: Tensor) -> Tensor:
    """Correlations of the teacher's logits minus those of the student's, `[C C]`."""
    return correlation(teacher) - correlation(student)


def draw_planes(planes: Mapping[str, np.ndarray], labels: Tensor, classes: tuple[str, ...]) -> "Figure":
    """One panel per network, one point per image, one colour per class."""
    figure, panels = _panels(len(planes))
    colours = [class_colour(int(c)) for c in labels]
    for axes, (title, at) in zip(panels, planes.items(), strict=True):
        axes.scatter(at[:, 0], at[:, 1], s=7, c=colours, linewidths=0)
        axes.set_title(textwrap.fill(title, CHARACTERS), fontsize=9)
        axes.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), xticks=[], yticks=[], aspect="equal")
    if len(classes) <= 20:
        marks = [panels[0].scatter([], [], s=12, color=class_colour(c)) for c in range(len(classes))]
        add_legend(figure, dict(zip(classes, marks, strict=True)), font_size=7)
    return figure


def draw_differences(maps: Mapping[str, Tensor]) -> "Figure":
    """One panel per student: difference between the correlations of its logits and the teacher's."""
    figure, panels = _panels(len(maps))
    largest = max(float(one.abs().max()) for one in maps.values()) or 1.0
    image = None
    for axes, (title, one) in zip(panels, maps.items(), strict=True):
        image = axes.imshow(one.numpy(), cmap="RdBu_r", vmin=-largest, vmax=largest)
        axes.set_title(f"{textwrap.fill(title, CHARACTERS)}\nmean |difference| {float(one.abs().mean()):.3f}", fontsize=8)
        axes.set(xticks=[], yticks=[])
    if image is not None:
        figure.colorbar(image, ax=list(panels), shrink=0.8)
    return figure


def _panels(n: int, columns: int = 4) -> "tuple[Figure, np.ndarray]":
    rows = -(-n // columns)
    figure = new_figure(2.5 * min(n, columns) + 0.8, 2.7 * rows)
    panels = figure.subplots(rows, min(n, columns), squeeze=False).flatten()
    for axes in panels[n:]:
        axes.set_axis_off()
    return figure, panels[:n]


def as_rgba_png(one: Tensor, largest: float) -> str:
    """A map of differences as a data URL: red above zero, blue below, transparent at zero, for light and dark pages."""
    from PIL import Image

    strength = (one.abs() / largest).clamp(0, 1)
    red, blue = torch.tensor([200, 60, 40]), torch.tensor([40, 110, 200])
    colour = torch.where((one > 0)[..., None], red, blue)
    pixels = torch.cat([colour, (255 * strength)[..., None].round().long()], dim=2).to(torch.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels.numpy(), "RGBA").save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def class_colour(c: int) -> tuple[float, float, float]:
    """A colour per class: hues by the golden angle, so that neighbours differ, with three levels of lightness."""
    import colorsys

    return colorsys.hls_to_rgb((c * 137.508 % 360) / 360, (0.42, 0.55, 0.34)[c % 3], 0.62)
