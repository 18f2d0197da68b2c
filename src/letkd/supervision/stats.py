"""Streaming statistics for the supervisions: a uniform reservoir of pixels, K-means, and LDA from class moments."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from letkd.distributed.processes import is_distributed, objects_of_all, rank


def _mix(x: Tensor) -> Tensor:
    """A 64-bit integer hash (splitmix's finaliser: xor-shift, multiply), which makes priorities look random."""

    def xor_shift(v: Tensor, by: int) -> Tensor:
        return v ^ ((v >> by) & ((1 << (64 - by)) - 1))

    x = xor_shift(x + -7046029254386353131, 30) * -4658895280553007687
    x = xor_shift(x, 27) * -7723592293110705685
    return xor_shift(x, 31) & ((1 << 63) - 1)


class Reservoir:
    """A uniform sample of pixels, at most `capacity` of each group, in bounded memory.

    Each pixel has a priority, a hash of its name (image, position, seed); the pixels with the lowest priorities are kept. So the sample
    is uniform, does not depend on the order of the images, and samples of two streams can be merged into the sample of their union.
    """

    def __init__(self, capacity: int, *, groups: int = 1, seed: int = 0):
        self.capacity, self.groups, self.seed = capacity, groups, seed
        self.seen = torch.zeros(groups, dtype=torch.int64)
        self._limit = torch.full((groups,), torch.iinfo(torch.int64).max)
        self._kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._rows = 0
        self._arrived = 0

    def add(self, f: Float[Tensor, "b d h w"], group: Int[Tensor, "b"], index: Int[Tensor, "b"] | None = None) -> None:
        b, _, h, w = f.shape
        if index is None:
            index = torch.arange(self._arrived, self._arrived + b)
        self._arrived += b
        name = (index.cpu()[:, None] * (h * w) + torch.arange(h * w)).reshape(-1)
        group = group.cpu().repeat_interleave(h * w)
        priority = _mix(_mix(name) + self.seed)
        self.seen += torch.bincount(group, minlength=self.groups)
        keep = (priority < self._limit[group]).nonzero().squeeze(1)
        rows = f.permute(0, 2, 3, 1).reshape(b * h * w, -1)
        rows = rows if len(keep) == len(rows) else rows[keep.to(rows.device)]
        self._kept.append((group[keep], priority[keep], name[keep], rows.detach().float().cpu().clone()))
        self._rows += len(keep)
        if self._rows > 1.25 * self.capacity * self.groups:
            self._compact()

    def _compact(self) -> None:
        group, priority, name = (torch.cat([part[k] for part in self._kept]) for k in range(3))
        order = np.lexsort((name.numpy(), priority.numpy(), group.numpy()))
        order = torch.from_numpy(order)
        group, priority, name = group[order], priority[order], name[order]
        start = torch.searchsorted(group, torch.arange(self.groups))
        keep = torch.arange(len(group)) - start[group] < self.capacity
        rows = self._taken(order[keep], len(group))
        last = torch.cat([start[1:], torch.tensor([len(group)])]) - start >= self.capacity
        at = (start + self.capacity - 1).clamp(max=len(group) - 1)
        self._limit = torch.where(last, priority[at], self._limit)
        self._kept.append((group[keep], priority[keep], name[keep], rows))
        self._rows = len(rows)

    def _taken(self, order: Tensor, n: int) -> Tensor:
        """The kept rows in this order, out of n; each part is released once copied, so that rows are never in memory twice."""
        place = torch.full((n,), -1)
        place[order] = torch.arange(len(order))
        rows = self._kept[0][3].new_empty(len(order), *self._kept[0][3].shape[1:])
        for to in place.split([len(part[3]) for part in self._kept]):
            part = self._kept.pop(0)[3]
            for some, at in zip(part.split(65536), to.split(65536), strict=True):
                rows[at[at >= 0]] = some[at >= 0]
        return rows

    @classmethod
    def of_all(cls, own: "Reservoir | None") -> "Reservoir | None":
        """The reservoir of all processes' pixels, from the reservoir of each; None if no process saw any.

        The processes first exchange names, 24 bytes per pixel, then only the pixels that are kept.
        """
        if not is_distributed():
            return own
        if own is not None and own._kept:
            own._compact()
        kept = own._kept[0] if own is not None and own._kept else None
        frames = objects_of_all(None if own is None else (own.capacity, own.groups, own.seed, own.seen))
        names = objects_of_all(None if kept is None else kept[:3])
        if not any(frame is not None for frame in frames):
            return None
        capacity, groups, seed, _ = next(frame for frame in frames if frame is not None)
        merged = cls(capacity, groups=groups, seed=seed)
        merged.seen = torch.stack([frame[3] for frame in frames if frame is not None]).sum(dim=0)
        owners = [torch.stack([torch.full_like(part[0], r), torch.arange(len(part[0]))], dim=1) for r, part in _present(names)]
        merged._kept = [(*part, owner) for (_, part), owner in zip(_present(names), owners, strict=True)]
        if not merged._kept:
            return merged
        merged._compact()
        group, priority, name, owner = merged._kept[0]
        mine = owner[owner[:, 0] == rank(), 1]
        rows = objects_of_all(None if kept is None else kept[3][mine])
        sent = torch.cat([part for _, part in _present(rows)])
        # The pixels of rank r are sent in the order that they have in the merged reservoir.
        order = torch.argsort(owner[:, 0], stable=True)
        merged._kept = [(group, priority, name, torch.empty_like(sent).index_copy_(0, order, sent))]
        merged._rows = len(sent)
        return merged

    def sample(self) -> tuple[Float[Tensor, "n d"], Int[Tensor, "n"]]:
        """The pixels kept and their groups, ordered by group, then by name."""
        if not self._kept:
            return torch.empty(0, 0), torch.empty(0, dtype=torch.int64)
        self._compact()
        group, _, name, rows = self._kept[0]
        order = torch.from_numpy(np.lexsort((name.numpy(), group.numpy())))
        return rows[order], group[order]


def _present(parts: list[Any]) -> list[tuple[int, Any]]:
    """The parts that are not None, each with its rank."""
    return [(r, part) for r, part in enumerate(parts) if part is not None]


def kmeans(f: Float[Tensor, "n d"], K: int, *, iterations: int = 20, seed: int = 0) -> Float[Tensor, "K d"]:
    """K centres of the rows by Lloyd's algorithm from random initial centres (faiss, as in the authors' code); all rows are used."""
    import faiss

    engine = faiss.Kmeans(
        f.shape[1],
        K,
        niter=iterations,
        seed=seed + 1,
        min_points_per_centroid=1,
        max_points_per_centroid=max(1, -(-len(f) // K)),
    )
    engine.train(np.ascontiguousarray(f.numpy(), dtype=np.float32))
    return torch.from_numpy(np.array(engine.centroids)).reshape(K, -1)


class MiniBatches:
    """K centres of a stream by mini-batch K-means: each mini-batch updates them once and is discarded.

    The centres depend on the order of the stream; the same order and seed give the same centres.
    """

    def __init__(self, K: int, *, size: int = 16384, seed: int = 0):
        from sklearn.cluster import MiniBatchKMeans

        self.size, self.seen, self._waiting = max(size, K), 0, []
        self._engine: Any = MiniBatchKMeans(K, init="random", n_init=1, random_state=seed)  # pyright: ignore[reportArgumentType]

    def add(self, f: Float[Tensor, "b d h w"]) -> None:
        self._waiting.append(f.detach().float().cpu().permute(0, 2, 3, 1).flatten(0, 2))
        self.seen += len(self._waiting[-1])
        if sum(len(rows) for rows in self._waiting) >= self.size:
            self._engine.partial_fit(self._rows().numpy())
            self._waiting = []

    def _rows(self) -> Float[Tensor, "n d"]:
        return torch.cat(self._waiting)

    def finish(self) -> Float[Tensor, "K d"]:
        """The centres, after an update with the remaining pixels. The stream must have at least K pixels."""
        if self._waiting:
            self._engine.partial_fit(self._rows().numpy())
            self._waiting = []
        return torch.from_numpy(self._engine.cluster_centers_).float()


def nearest_centre(f: Float[Tensor, "n d"], centres: Float[Tensor, "K d"], *, chunk: int = 4096) -> Int[Tensor, "n"]:
    """The centre nearest to each row, by squared distance; computed in chunks of rows, without an [n K] tensor."""
    half_norm = 0.5 * (centres * centres).sum(dim=1)
    with torch.autocast(f.device.type, enabled=False):
        return torch.cat([(rows @ centres.T - half_norm).argmax(dim=1) for rows in f.split(chunk)])


class LDA(NamedTuple):
    """A fitted discriminant transform z = W f + b: unit within-class covariance, components ordered by discriminating power."""

    W: Float[Tensor, "r d"]
    b: Float[Tensor, "r"]


@dataclass
class ClassMoments:
    """Counts, sums and the second moment of a stream of labelled pixels: all that LDA needs, C·d + d² numbers in float64."""

    n: Float[Tensor, "C"]
    sums: Float[Tensor, "C d"]
    second: Float[Tensor, "d d"]

    @classmethod
    def zeros(cls, C: int, d: int) -> "ClassMoments":
        return cls(torch.zeros(C).double(), torch.zeros(C, d).double(), torch.zeros(d, d).double())

    def add(self, f: Float[Tensor, "b d h w"], y: Int[Tensor, "b"]) -> None:
        rows = f.detach().cpu().double().flatten(2)  # [b d hw]
        y = y.cpu()
        self.n += torch.bincount(y, minlength=len(self.n)).double() * rows.shape[2]
        self.sums.index_add_(0, y, rows.sum(dim=2))
        flat = rows.transpose(0, 1).reshape(rows.shape[1], -1)
        self.second += flat @ flat.T

    @classmethod
    def of_all(cls, own: "ClassMoments | None") -> "ClassMoments | None":
        """The moments of all processes' pixels, from the moments of each."""
        parts = [part for part in objects_of_all(own) if part is not None]
        if not parts:
            return None
        return cls(*(torch.stack([getattr(part, name) for part in parts]).sum(dim=0) for name in ("n", "sums", "second")))

    def lda(self, r: int, *, tol: float = 1e-4) -> LDA:
        """Solve for the r best components. `tol` drops directions without within-class spread, as scikit-learn's svd solver does."""
        N, C = self.n.sum(), len(self.n)
        mean = self.sums / self.n[:, None]
        xbar = self.sums.sum(dim=0) / N
        within = (self.second - (self.sums.T @ mean)) / (N - C).clamp_min(1)  # S_w, pooled within-class covariance
        spread, size = within.diagonal(), self.second.diagonal() / N
        alive = spread > 1e-10 * size  # the variance of a constant channel is only rounding error
        std = torch.where(alive, spread, 1.0).sqrt()
        variance, V = torch.linalg.eigh(within / std[:, None] / std * alive * alive[:, None])
        keep = variance > tol**2
        whiten = V[:, keep] / std[:, None] / variance[keep].sqrt()  # [d k]: unit within-class covariance
        between = (self.n / (C - 1)).sqrt()[:, None] * (mean - xbar) @ whiten
        _, strength, Vh = torch.linalg.svd(between, full_matrices=False)
        r = min(r, int((strength > tol * strength[:1]).sum()))
        W = (whiten @ Vh[:r].T).T
        return LDA(W, -W @ xbar)
