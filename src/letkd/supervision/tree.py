"""TDD's class tree: the groups of classes that the teacher distinguishes at a layer."""

from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from letkd.distributed.processes import objects_of_all
from letkd.errors import FitError
from letkd.limits import Bytes, Count, Seed, Share
from letkd.supervision.fitted import Fitted
from letkd.supervision.stats import Reservoir


def ward_tree(means: Float[Tensor, "C d"]) -> Float[Tensor, "M 4"]:
    """The binary tree of the classes by Ward's linkage of their means, M = C − 1 merges, in SciPy's form.

    Row m merges the nodes in its first two columns into node C + m; nodes 0 … C − 1 are the classes; the last row is the root.
    """
    from scipy.cluster.hierarchy import linkage

    return torch.from_numpy(linkage(means.double().numpy(), method="ward"))


def tree_nodes(tree: Float[Tensor, "M 4"], means: Float[Tensor, "C d"]) -> tuple[Float[Tensor, "n d"], Bool[Tensor, "n C"]]:
    """The mean of every node (the unweighted mean of its two children's means) and the classes below it; n = 2 C − 1."""
    node, below = list(means), list(torch.eye(len(means), dtype=torch.bool))
    for left, right in tree[:, :2].long().tolist():
        node.append((node[left] + node[right]) / 2)
        below.append(below[left] | below[right])
    return torch.stack(node), torch.stack(below)


def knn_purity(
    node: Float[Tensor, "n d"], below: Bool[Tensor, "n C"], f: Float[Tensor, "N d"], y: Int[Tensor, "N"], k: int
) -> Float[Tensor, "n"]:
    """Share of the k samples nearest to a node's mean whose class is below the node; in chunks, without an [n N] tensor."""
    centre = f.mean(dim=0)  # centring does not change distances, and reduces rounding errors
    f, node = f - centre, node.to(f.dtype) - centre
    half_norm = 0.5 * (f * f).sum(dim=1)
    nearest = torch.cat([(rows @ f.T - half_norm).topk(min(k, len(f)), dim=1).indices for rows in node.split(64)])
    return below.gather(1, y[nearest]).double().mean(dim=1)  # float64, because 4/20 in float32 might be below 0.2


def cut_tree(tree: Float[Tensor, "M 4"], purity: Float[Tensor, "n"], threshold: float) -> Int[Tensor, "C"]:
    """The group of every class: starting at the root, a node is split unless it is a class or its purity is below the threshold.

    Groups are numbered in the order of their first class.
    """
    C = len(tree) + 1
    _, below = tree_nodes(tree, torch.zeros(C, 1))
    group, todo = torch.empty(C, dtype=torch.int64), [2 * C - 2]
    while todo:
        node = todo.pop()
        if node < C or purity[node] < threshold:
            group[below[node]] = node
        else:
            todo += tree[node - C, :2].long().tolist()
    first = (group[:, None] == group).int().argmax(dim=1)  # the first class of each class's group
    return first.unique(return_inverse=True)[1]


class ClassTree(Fitted):
    """Groups of classes at a layer of the teacher: Ward's tree of the class means, split as long as the nearest samples agree.

    Args:
        k: number of samples nearest to a node's mean from which its purity is computed. The authors use 20.
        threshold: a node is not split if its purity is below this share. The authors use 0.2.
        memory: largest size of the samples in bytes; if not all pooled features fit, a uniform sample is used. The
            class means always use all features.
        seed: of the sample. The authors' example uses 1029.
        C: number of classes; set by a Distiller.

    Maps are averaged over their pixels. Buffers: `group_ [C]`, numbers 0 … G − 1; `tree_ [C−1 4]`, SciPy's linkage;
    `purity_ [2C−1]`. The root contains all classes, so its purity is 1 and it is always split.
    """

    kind: ClassVar[str] = "tree"
    needs_labels: ClassVar[bool] = True
    fitted_buffers: ClassVar[tuple[str, ...]] = ("group_", "tree_", "purity_")
    group_: Tensor
    tree_: Tensor
    purity_: Tensor

    def __init__(
        self, k: Count = 20, threshold: Share = 0.2, *, memory: Bytes = 2**30, seed: Seed = 1029, C: Count | None = None
    ):
        super().__init__()
        self.k, self.threshold, self.memory, self.seed, self.C = k, float(threshold), memory, seed, C
        self._reservoir: Reservoir | None = None
        self._sums = self._n = torch.empty(0)

    def bind(self, where: str, *, d: int, C: int) -> None:
        super().bind(where, d=d, C=C)
        self.C = C

    def settings(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("k", "threshold", "memory", "seed", "C")}

    def reset(self) -> None:
        super().reset()
        self._reservoir = None

    def partial_fit(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"], index: Int[Tensor, "b"] | None = None) -> None:
        self._check_map(f_T)
        C, d = self._classes(), f_T.shape[1]
        y = y.cpu()
        if len(y) and (int(y.min()) < 0 or int(y.max()) >= C):
            raise FitError(
                f"labels at {self.where!r} range from {int(y.min())} to {int(y.max())}, but with {C} classes they must be 0 to {C - 1}"
            )
        if self._reservoir is None:
            self._reservoir = Reservoir(max(self.memory // (4 * (d + 1)), 1), seed=self.seed)
            self._sums, self._n = torch.zeros(C, d, dtype=torch.float64), torch.zeros(C, dtype=torch.int64)
        pooled = f_T.detach().float().mean(dim=(2, 3)).cpu()
        self._sums.index_add_(0, y, pooled.double())
        self._n += torch.bincount(y, minlength=C)
        # The label is stored as an additional number of the sample, exact in float32 up to 2^24.
        rows = torch.cat([pooled, y[:, None].float()], dim=1)
        self._reservoir.add(rows[:, :, None, None], torch.zeros_like(y), index)

    def gather(self) -> None:
        parts = [(self._sums, self._n)] if self._reservoir is not None else []
        sums = [part for own in objects_of_all(parts) for part in own]
        self._reservoir = Reservoir.of_all(self._reservoir)
        if sums:
            self._sums, self._n = (torch.stack(part).sum(dim=0) for part in zip(*sums, strict=True))

    def finish(self) -> None:
        C = self._classes()
        n = torch.zeros(C) if self._reservoir is None else self._n
        none = [str(c) for c in range(C) if not n[c]]
        if self._reservoir is None or none:
            raise FitError(
                f"a tree of {C} classes at {self.where!r} needs images of every class, but there are none of class "
                f"{', '.join(none[:5])}{f' and {len(none) - 5} more' if len(none) > 5 else ''}; add images of them"
            )
        if C < 2:
            raise FitError(f"a class tree at {self.where!r} needs at least two classes, but there is only one")
        means = self._sums / n[:, None]
        samples, _ = self._reservoir.sample()
        self._reservoir = None
        f, y = samples[:, :-1], samples[:, -1].long()
        if not (means - means[0]).abs().max() > 1e-7 * means.abs().max():
            raise FitError(f"the teacher's maps at {self.where!r} have the same mean for every class; choose another tap")
        tree = ward_tree(means)
        purity = knn_purity(*tree_nodes(tree, means), f, y, self.k)
        self.group_, self.tree_, self.purity_ = cut_tree(tree, purity, self.threshold), tree.float(), purity.float()
        size = torch.bincount(self.group_)
        self.report_ = {"images": int(n.sum()), "groups": len(size), "classes in the largest": int(size.max())}

    def groups(self) -> Int[Tensor, "C"]:
        """The group of every class."""
        self._check_fitted()
        return self.group_

    def _classes(self) -> int:
        if self.C is None:
            raise FitError(f"{self} needs the number of classes; pass C=, or use it in a Distiller")
        return self.C

    def extra_repr(self) -> str:
        return f"k={self.k}, threshold={self.threshold:g}"
