"""Pruning: fewer templates in a folded KD layer, and the rest fitted so that the layer gives nearly what it gave."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.errors import ExportError
from letkd.layer.folded import FoldedKDLayer, per_length
from letkd.progress import track
from letkd.taps import Tap, Taps, replace_module

PIXELS = 24_576  # six to a template at K = 4096


@dataclass(frozen=True)
class Use:
    """What a layer's templates do on a stream of images.

    Args:
        fired: at how many pixels each template's p was above 0.
        share: each template's part of the energy that ν puts out, Σ_i p_{k|i}² ‖ν_k‖² / ‖p_i‖², of 1 in all.
        pixels: a sample of what enters the layer.
        seen: pixels in all.
    """

    fired: Int64[Tensor, " K"]
    share: Float[Tensor, " K"]
    pixels: Float[Tensor, "n d"]
    seen: int


@dataclass(frozen=True)
class Pruned:
    """A layer that was pruned: where, how many templates it had, how many never fired, how many are left."""

    path: str
    K: int
    never: int
    kept: int


@torch.no_grad()
def observe(student: nn.Module, path: str, batches: Iterable[Batch], *, pixels: int = PIXELS, seed: int = 0) -> Use:
    """Run the student over images and look at what enters the folded layer at `path`, and which templates fire there.

    Args:
        student: in eval mode.
        pixels: how many to keep of those that enter, from all batches alike.
        seed: of that draw.
    """
    layer = _layer(student, path)
    taps = Taps(student, {"x": Tap(path, io="input")})
    strength = layer.nu[:, :, 0, 0].double().norm(dim=0).square()  # ‖ν_k‖²
    fired = torch.zeros(len(strength), dtype=torch.int64)
    energy, kept, seen = torch.zeros_like(strength), [], 0
    generator = torch.Generator().manual_seed(seed)
    batches = list(batches) if not hasattr(batches, "__len__") else batches
    each = -(-pixels // max(len(batches), 1))  # pyright: ignore[reportArgumentType]
    for batch in track(batches, f"watching the templates of {path}"):
        x = taps(batch.x)[1]["x"]
        p = layer.match(x)
        fired += (p > 0).sum(dim=(0, 2, 3))
        energy += _unit(layer, p).square().sum(dim=(0, 2, 3)).double()
        rows = x.movedim(1, -1).flatten(0, 2)
        kept.append(rows[torch.randperm(len(rows), generator=generator)[:each]])
        seen += len(rows)
    if not seen:
        raise ExportError("there are no images to prune by")
    share = energy * strength
    return Use(fired, (share / share.sum().clamp_min(1e-300)).float(), torch.cat(kept), seen)


@torch.no_grad()
def prune_layer(layer: FoldedKDLayer, keep: Int64[Tensor, " m"], pixels: Float[Tensor, "n d"] | None = None) -> FoldedKDLayer:
    """The layer with these templates only.

        ν', b' = argmin Σ_i ‖ν' q_i + b' − x'_i‖²        q_i = p_i / ‖p_i‖ over the templates kept

    Whoever leaves goes out of ‖p_i‖ as well, which makes all others louder: a layer from which small templates are simply cut is
    further from its old self than no layer at all. So ν and the constant are fitted anew, by least squares, to what the whole layer
    gives at `pixels`.

    Args:
        keep: the templates' numbers.
        pixels: of the layer's input; without them ν's columns stay as they are, which is right for templates that never fire.
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
        wanted = (layer(x) - x)[0, :, :, 0].T.double()  # x'_i
        q = _unit(small, small.match(x))[0, :, :, 0].T
        q = torch.cat([q, torch.ones(len(q), 1).to(q)], dim=1)
        gram += (q.T @ q).double()
        moment += q.double().T @ wanted
    gram += 1e-4 * gram.diagonal().mean() * torch.eye(m, dtype=torch.float64)  # for templates that say the same
    solution = torch.linalg.solve(gram, moment)
    small.nu.copy_(solution[:-1].T[:, :, None, None])
    small.bias.copy_(solution[-1])
    return small


def _unit(layer: FoldedKDLayer, p: Tensor) -> Tensor:
    return p * per_length(p) if layer.normalize_value_input else p


def ranking(use: Use) -> Int64[Tensor, " m"]:
    """The templates that fire at all, the largest share first; at least one."""
    order = use.share.argsort(descending=True, stable=True)
    fires = order[use.fired[order] > 0]
    return fires if len(fires) else order[:1]


@dataclass(frozen=True)
class Pruning:
    """A layer while it is being pruned.

    Args:
        layer: as it is.
        use: of its templates.
        number: 1 for the first layer of the student.
        of: how many layers there are.
        trial: puts another layer in its place and gives the student.
    """

    layer: FoldedKDLayer
    use: Use
    number: int
    of: int
    trial: Callable[[FoldedKDLayer], nn.Module]

    def firing(self) -> FoldedKDLayer:
        """Without the templates that never fire, and otherwise untouched."""
        return prune_layer(self.layer, ranking(self.use).sort().values)

    def first(self, K: int) -> FoldedKDLayer:
        """With the K templates of the largest share, ν fitted anew where others than silent ones go."""
        order = ranking(self.use)
        return self.firing() if len(order) <= K else prune_layer(self.layer, order[:K].sort().values, self.use.pixels)


def prune_never(student: nn.Module, batches: Iterable[Batch]) -> tuple[nn.Module, list[Pruned]]:
    """Drop the templates that never fire on these images; on them the student gives what it gave, to rounding."""
    return _prune(student, batches, Pruning.firing)


def prune_to(student: nn.Module, batches: Iterable[Batch], K: int) -> tuple[nn.Module, list[Pruned]]:
    """Keep in every layer the K templates of the largest share, and fit ν anew."""
    if K < 1:
        raise ExportError(f"pruning to {K} templates was asked for; a layer keeps at least 1")
    return _prune(student, batches, lambda at: at.first(K))


def prune_auto(
    student: nn.Module, batches: Iterable[Batch], accuracy: Callable[[nn.Module], float], *, tolerance: float
) -> tuple[nn.Module, list[Pruned]]:
    """In every layer, the fewest templates with which the accuracy stays within `tolerance` of what it was.

    Args:
        accuracy: of a student, in per cent, on images that are neither trained on nor tested on.
        tolerance: in points. Of n layers, the first may take an n-th of it, the first two two n-ths, and so on.
    """
    before = accuracy(student)

    def choose(at: Pruning) -> FoldedKDLayer:
        floor = before - tolerance * at.number / at.of - 1e-9
        return at.first(smallest(len(ranking(at.use)), lambda K: accuracy(at.trial(at.first(K))) >= floor))

    return _prune(student, batches, choose)


def smallest(K: int, enough: Callable[[int], bool]) -> int:
    """The smallest of some sizes up to K, each about a fifth above the one before, that is enough, by bisection; K itself always is.

    Accuracy need not rise with K at every step, so a smaller size may be missed; what is returned was looked at, or is K.
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
    """Where a student's folded KD layers are."""
    return [path for path, module in student.named_modules() if isinstance(module, FoldedKDLayer)]


def _prune(
    student: nn.Module, batches: Iterable[Batch], choose: Callable[[Pruning], FoldedKDLayer]
) -> tuple[nn.Module, list[Pruned]]:
    """Layer after layer, each seeing what those before it give now."""
    student = copy.deepcopy(student).eval()
    paths, pruned = folded_layers(student), []
    if not paths:
        raise ExportError("the student has no KD layer, so that there is nothing to prune; leave `prune=` out")
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
