"""Pruning: remove templates from a folded KD layer and refit the rest so that the layer's output hardly changes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.errors import ExportError
from letkd.layer.folded import FoldedKDLayer, per_length
from letkd.modules import copied
from letkd.progress import track
from letkd.taps import Tap, Taps, replace_module

PIXELS = 24_576  # six per template at K = 4096


@dataclass(frozen=True)
class TemplateUse:
    """How a layer uses its templates on a stream of images.

    Args:
        fired: number of pixels at which each template's p is above 0.
        share: each template's share of the output energy of ν, Σ_i p_{k|i}² ‖ν_k‖² / ‖p_i‖²; the shares sum to 1.
        pixels: a sample of the layer's input.
        seen: total number of pixels.
    """

    fired: Int64[Tensor, " K"]
    share: Float[Tensor, " K"]
    pixels: Float[Tensor, "n d"]
    seen: int


@dataclass(frozen=True)
class Pruned:
    """A pruned layer: its path, and the numbers of templates it had, that never fired, and that are kept."""

    path: str
    K: int
    never: int
    kept: int


@torch.no_grad()
def observe(student: nn.Module, path: str, batches: Iterable[Batch], *, pixels: int = PIXELS, seed: int = 0) -> TemplateUse:
    """Run the student on images and record the input of the folded layer at `path` and which templates fire.

    Args:
        student: in eval mode.
        pixels: how many input pixels to keep, the same number from every batch.
        seed: of that random sample.
    """
    layer = _layer(student, path)
    taps = Taps(student, {"x": Tap(path, io="input")})
    strength = layer.nu[:, :, 0, 0].double().norm(dim=0).square()  # ‖ν_k‖²
    fired = torch.zeros(len(strength), dtype=torch.int64)
    energy, kept, seen = torch.zeros_like(strength), [], 0
    generator = torch.Generator().manual_seed(seed)
    batches = list(batches) if not hasattr(batches, "__len__") else batches
    per_batch = -(-pixels // max(len(batches), 1))  # pyright: ignore[reportArgumentType]
    for batch in track(batches, f"observing the templates of {path}"):
        x = taps(batch.x)[1]["x"]
        p = layer.match(x)
        fired += (p > 0).sum(dim=(0, 2, 3))
        energy += _unit(layer, p).square().sum(dim=(0, 2, 3)).double()
        rows = x.movedim(1, -1).flatten(0, 2)
        kept.append(rows[torch.randperm(len(rows), generator=generator)[:per_batch]])
        seen += len(rows)
    if not seen:
        raise ExportError("pruning needs at least one image, and the data has none")
    share = energy * strength
    return TemplateUse(fired, (share / share.sum().clamp_min(1e-300)).float(), torch.cat(kept), seen)


@torch.no_grad()
def prune_layer(layer: FoldedKDLayer, keep: Int64[Tensor, " m"], pixels: Float[Tensor, "n d"] | None = None) -> FoldedKDLayer:
    """The layer with only these templates.

        ν', b' = argmin Σ_i ‖ν' q_i + b' − x'_i‖²        q_i = p_i / ‖p_i‖ over the kept templates

    A removed template no longer contributes to ‖p_i‖, which scales up all other templates: if small templates are removed without
    refitting, the output differs from the original more than without the layer. So ν and the constant are refitted, by least squares,
    to the output of the whole layer at `pixels`.

    Args:
        keep: indices of the templates.
        pixels: a sample of the layer's input; if None, the columns of ν are not refitted, which is right if only templates that never
            fire are removed.
    """
    d = layer.omega.shape[1]
    small = FoldedKDLayer(d, len(keep), normalize_value_input=layer.normalize_value_input).to(layer.omega).eval()
    small.omega.copy_(layer.omega[keep])
    small.beta.copy_(layer.beta[keep])
    small.nu.copy_(layer.nu[:, keep])
    small.bias.copy_(layer.bias)
    if pixels is None:
        return small
    m = len(keep) + 1
    gram, moment = torch.zeros(m, m, dtype=torch.float64), torch.zeros(m, d, dtype=torch.float64)
    for rows in pixels.split(2048):
        x = rows.T[None, :, :, None]  # [1 d n 1]
        target = (layer(x) - x)[0, :, :, 0].T.double()  # x'_i
        q = _unit(small, small.match(x))[0, :, :, 0].T
        q = torch.cat([q, torch.ones(len(q), 1).to(q)], dim=1)
        gram += (q.T @ q).double()
        moment += q.double().T @ target
    gram += 1e-4 * gram.diagonal().mean() * torch.eye(m, dtype=torch.float64)  # for linearly dependent templates
    solution = torch.linalg.solve(gram, moment)
    small.nu.copy_(solution[:-1].T[:, :, None, None])
    small.bias.copy_(solution[-1])
    return small


def _unit(layer: FoldedKDLayer, p: Tensor) -> Tensor:
    return p * per_length(p) if layer.normalize_value_input else p


def ranking(use: TemplateUse) -> Int64[Tensor, " m"]:
    """Indices of the templates that fire, largest share first; at least one."""
    order = use.share.argsort(descending=True, stable=True)
    fires = order[use.fired[order] > 0]
    return fires if len(fires) else order[:1]


@dataclass(frozen=True)
class Pruning:
    """A layer during pruning.

    Args:
        layer: the layer before pruning.
        use: how it uses its templates.
        number: position among the student's layers, from 1.
        of: number of layers.
        trial: replaces the layer by another one and returns the student.
    """

    layer: FoldedKDLayer
    use: TemplateUse
    number: int
    of: int
    trial: Callable[[FoldedKDLayer], nn.Module]

    def firing(self) -> FoldedKDLayer:
        """The layer without the templates that never fire, otherwise unchanged."""
        return prune_layer(self.layer, ranking(self.use).sort().values)

    def first(self, K: int) -> FoldedKDLayer:
        """The layer with the K templates of the largest share; ν is refitted if templates that fire are removed."""
        order = ranking(self.use)
        return self.firing() if len(order) <= K else prune_layer(self.layer, order[:K].sort().values, self.use.pixels)


def prune_unused(student: nn.Module, batches: Iterable[Batch]) -> tuple[nn.Module, list[Pruned]]:
    """Remove the templates that never fire on these images; on them, the student's output changes only by rounding."""
    return _prune(student, batches, Pruning.firing)


def prune_to(student: nn.Module, batches: Iterable[Batch], K: int) -> tuple[nn.Module, list[Pruned]]:
    """Keep the K templates of the largest share in every layer, and refit ν."""
    if K < 1:
        raise ExportError(f"cannot prune to {K} templates; a layer keeps at least 1")
    return _prune(student, batches, lambda at: at.first(K))


def prune_auto(
    student: nn.Module, batches: Iterable[Batch], accuracy: Callable[[nn.Module], float], *, tolerance: float
) -> tuple[nn.Module, list[Pruned]]:
    """Keep the fewest templates in every layer such that the accuracy drops by at most `tolerance`.

    Args:
        accuracy: accuracy of a student in per cent, on images used for neither training nor testing.
        tolerance: in percentage points. The first k of n layers may use k/n of it.
    """
    before = accuracy(student)

    def choose(at: Pruning) -> FoldedKDLayer:
        floor = before - tolerance * at.number / at.of - 1e-9
        return at.first(smallest(len(ranking(at.use)), lambda K: accuracy(at.trial(at.first(K))) >= floor))

    return _prune(student, batches, choose)


def smallest(K: int, enough: Callable[[int], bool]) -> int:
    """The smallest sufficient size up to K, by bisection over sizes that grow by about a fifth; K itself is always sufficient.

    Accuracy may not rise with K at every step, so a smaller size can be missed; the returned size was tested, or is K.
    """
    sizes = sorted({min(K, max(1, round(2 ** (i / 4)))) for i in range(4 * K.bit_length() + 1)} | {K})
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        if enough(sizes[middle]):
            high = middle
        else:
            low = middle + 1
    return sizes[high]


def folded_layers(student: nn.Module) -> list[str]:
    """Paths of a student's folded KD layers."""
    return [path for path, module in student.named_modules() if isinstance(module, FoldedKDLayer)]


def _prune(
    student: nn.Module, batches: Iterable[Batch], choose: Callable[[Pruning], FoldedKDLayer]
) -> tuple[nn.Module, list[Pruned]]:
    """Prune layer by layer; each layer is observed after the layers before it are pruned."""
    student = copied(student).eval()
    paths, pruned = folded_layers(student), []
    if not paths:
        raise ExportError("the student has no KD layer, so there is nothing to prune; omit `prune=`")
    for number, path in enumerate(paths, start=1):
        layer, use = _layer(student, path), observe(student, path, batches)

        def trial(small: FoldedKDLayer, path: str = path) -> nn.Module:
            replace_module(student, path, small)
            return student

        small = choose(Pruning(layer, use, number, len(paths), trial))
        trial(small)
        pruned.append(Pruned(path, len(layer.beta), int((use.fired == 0).sum()), len(small.beta)))
    return student, pruned


def _layer(student: nn.Module, path: str) -> FoldedKDLayer:
    layer = student.get_submodule(path)
    if not isinstance(layer, FoldedKDLayer):
        raise ExportError(f"{path!r} is a {type(layer).__name__}; fold the student first")
    return layer
