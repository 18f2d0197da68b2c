"""CRD's memory: an embedding of every training image by the student and by the teacher, and negatives from other classes."""

import math
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from letkd.batch import UNLABELLED
from letkd.distributed.processes import objects_of_all, rank, rows_of_all
from letkd.errors import DataError, FitError
from letkd.limits import Bytes, Count, Seed, Share
from letkd.supervision.fitted import Fitted

STATE = ("memory_S_", "memory_T_", "Z_S_", "Z_T_", "draws_")


def draw_distinct(M: Int[Tensor, "b"], K: int, generator: torch.Generator) -> Int[Tensor, "b K"]:
    """K distinct numbers from 0 … M_i − 1 for every row i; every set of K is equally likely.

    If M is at most 8 K, or K is more than half of M: the K smallest of M random keys. Otherwise, so that the work does not grow with M:
    the first K distinct values of a sequence of independent draws. Both are exact up to ties and the bias of the remainder, about 1 in
    10^9 with keys of 62 bits. Needs K ≤ M_i.
    """
    least, most = int(M.min()), int(M.max())
    if least < K:
        raise FitError(f"{K} distinct numbers cannot be drawn from {least}")
    if most <= 8 * K or least < 2 * K:
        keys = torch.randint(2**62, (len(M), most), generator=generator, device=M.device)
        beyond = torch.arange(most, device=M.device) >= M[:, None]
        return keys.masked_fill_(beyond, 2**62).topk(K, largest=False, sorted=False).indices
    # The number of draws that give K distinct values: the coupon collector's mean plus five standard deviations.
    mean = least * math.log(least / (least - K))
    n = math.ceil(mean + 5 * math.sqrt(max(least * K / (least - K) - mean, 0.0))) + 1
    drawn = torch.empty(len(M), 0, dtype=torch.int64, device=M.device)
    while True:
        more = torch.randint(2**62, (len(M), n), generator=generator, device=M.device) % M[:, None]
        drawn = torch.cat([drawn, more], dim=1)
        value, at = drawn.sort(dim=1, stable=True)
        new = torch.ones_like(value, dtype=torch.bool)
        new[:, 1:] = value[:, 1:] != value[:, :-1]
        new = torch.empty_like(new).scatter_(1, at, new)  # first draw of a value
        rank = new.cumsum(dim=1)
        if bool((rank[:, -1] >= K).all()):
            return drawn[new & (rank <= K)].reshape(len(M), K)


def need_index(index: Tensor | None) -> Tensor:
    """The indices of a batch's images, which CRD needs."""
    if index is None:
        raise DataError(
            "CRD stores a row per training image, but the batch has no indices; the loader must yield (x, y, index), where index "
            "counts the training images from 0"
        )
    return index


class CRDBank(Fitted):
    """Two banks of embeddings with a row per training image. The fit only collects the labels, in one pass.

    Args:
        feat_dim: length of an embedding. Usual value: 128.
        K: negatives per image. Usual value: 16384. If a class has fewer images of other classes, the smallest such number.
        momentum: share of the old row in an update. Usual value: 0.5.
        memory: largest size of both banks together, in bytes.
        seed: of the initial rows and of the negatives.

    Fitted buffer, the only content of an artefact: the labels `y_ [N]`. State that changes during training and is saved in checkpoints:
    `memory_S_`, `memory_T_ [N feat_dim]`, initially uniform in ±1/√(feat_dim/3); `Z_S_`, `Z_T_`, 0 until the first batch sets them;
    `draws_`, the number of batches with drawn negatives, which together with `seed` determines the next draw. An image without a label
    is its own class. With several processes, each updates all banks with the rows of all processes.
    """

    kind: ClassVar[str] = "crd_bank"
    fitted_buffers: ClassVar[tuple[str, ...]] = ("y_",)
    y_: Tensor
    memory_S_: Tensor
    memory_T_: Tensor
    Z_S_: Tensor
    Z_T_: Tensor
    draws_: Tensor
    _order: Tensor | None
    _count: Tensor | None

    def __init__(
        self, feat_dim: Count = 128, K: Count = 16384, *, momentum: Share = 0.5, memory: Bytes = 2**30, seed: Seed = 0
    ):
        super().__init__()
        self.feat_dim, self.K, self.momentum, self.memory, self.seed = feat_dim, K, float(momentum), memory, seed
        for name in STATE:
            self.register_buffer(name, None)
        for name in ("_order", "_count"):
            self.register_buffer(name, None, persistent=False)
        self._negatives = 0
        self._gathered: list[tuple[Tensor, Tensor]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "y_":  # set by a fit, an artefact or a checkpoint: the banks get a row per label
            self._begin(None if value is None else len(value))

    def _begin(self, N: int | None) -> None:
        """New banks of N rows, or none."""
        self._order = self._count = None
        state: dict[str, Tensor | None] = dict.fromkeys(STATE)
        if N is not None:
            self._check_memory(N)
            generator, bound = torch.Generator().manual_seed(self.seed), 1 / math.sqrt(self.feat_dim / 3)
            for side in "ST":
                rows = torch.empty(N, self.feat_dim).uniform_(-bound, bound, generator=generator)
                state |= {f"memory_{side}_": rows.to(self._at), f"Z_{side}_": self._at.new_zeros(())}
            state["draws_"] = torch.zeros((), dtype=torch.int64, device=self._at.device)
        for name, value in state.items():
            setattr(self, name, value)

    def _check_memory(self, N: int) -> None:
        fit = self.memory // (2 * 4 * self.feat_dim)
        if fit < N:
            raise FitError(
                f"CRD's two banks for {N:,} images or more at feat_dim={self.feat_dim} do not fit into memory={self.memory:,} bytes, "
                f"enough for {fit:,} images; lower feat_dim, train on a subset, or allow more memory"
            )

    @property
    def N(self) -> int:
        """Number of training images."""
        self._check_fitted()
        return len(self.y_)

    def reset(self) -> None:
        super().reset()
        self._gathered = []

    def partial_fit(self, f_T: Float[Tensor, "b ..."], y: Int[Tensor, "b"], index: Int[Tensor, "b"] | None = None) -> None:
        """Collect the labels of one batch; the teacher's features are only checked."""
        self._check_map(f_T)
        index = need_index(index).cpu()
        if len(index):
            if int(index.min()) < 0:
                raise FitError(f"an image has the index {int(index.min())}; indices count the training images from 0")
            self._check_memory(int(index.max()) + 1)
        self._gathered.append((index, y.cpu()))

    def gather(self) -> None:
        self._gathered = [part for parts in objects_of_all(self._gathered) for part in parts]

    def finish(self) -> None:
        if not sum(len(y) for _, y in self._gathered):
            raise FitError("CRD saw no images; the loader was empty")
        index, labels = (torch.cat(parts) for parts in zip(*self._gathered, strict=True))
        self._gathered = []
        y = torch.full((int(index.max()) + 1,), -2)
        y[index] = labels
        if not torch.equal(y[index], labels):
            twice = int(index[(y[index] != labels).nonzero()[0]])
            raise FitError(f"the index {twice} has two different labels; every training image needs its own index")
        if missing := (y < -1).nonzero().flatten().tolist():
            raise FitError(
                f"indices go up to {len(y) - 1}, but {len(missing)} smaller ones are missing (first: {missing[0]}); the loader must yield "
                "all training images, numbered from 0 without gaps"
            )
        # An image without a label is its own class: every other image is a negative.
        alone = y == UNLABELLED
        y[alone] = int(y.max()) + 1 + torch.arange(int(alone.sum()))
        if bool((y == y[0]).all()):
            raise FitError("CRD draws negatives from other classes, but all training images have the same class")
        self.y_ = y
        self._sort()
        self.report_ = {"images": len(y), "negatives": self._negatives}

    def _sort(self) -> tuple[Tensor, Tensor]:
        """Images ordered by class, so that each class is a range, and the size of each class."""
        if self._order is None or self._count is None:
            self._order, self._count = self.y_.argsort(stable=True), torch.bincount(self.y_)
            self._negatives = min(self.K, self.N - int(self._count.max()))
        return self._order, self._count

    def negatives(self, index: Int[Tensor, "b"]) -> Int[Tensor, "b K"]:
        """Images of other classes for each image, without replacement; the same ones until `update` is called."""
        self._check_fitted()
        order, count = self._sort()
        mixed = np.random.SeedSequence((self.seed, rank(), int(self.draws_))).generate_state(1, np.uint64)
        generator = torch.Generator(index.device).manual_seed(int(mixed[0]))
        c = self.y_[index]
        drawn = draw_distinct(self.N - count[c], self._negatives, generator)
        first = (count.cumsum(dim=0) - count)[c][:, None]
        return order[torch.where(drawn < first, drawn, drawn + count[c][:, None])]

    def normaliser(self, bank: Literal["S", "T"], scores: Float[Tensor, "b m"]) -> Float[Tensor, ""]:
        """Z of a bank: N times the mean exp(score) of the first batch, over positives and negatives; constant after that."""
        Z: Tensor = getattr(self, f"Z_{bank}_")
        mean = scores.detach().mean()
        estimate = (rows_of_all(mean[None]).mean() if self.training else mean) * self.N
        return torch.where(Z > 0, Z, estimate.to(Z.dtype))

    @torch.no_grad()
    def update(
        self,
        index: Int[Tensor, "b"],
        *,
        v_S: Float[Tensor, "b d"],
        v_T: Float[Tensor, "b d"],
        Z_S: Float[Tensor, ""],
        Z_T: Float[Tensor, ""],
    ) -> None:
        """Move the rows of these images towards their embeddings, store Z, and count one draw."""
        index = rows_of_all(index)
        for bank, Z_, v, Z in ((self.memory_S_, self.Z_S_, v_S, Z_S), (self.memory_T_, self.Z_T_, v_T, Z_T)):
            old = bank[index]
            new = F.normalize(self.momentum * old + (1 - self.momentum) * rows_of_all(v).to(bank.dtype), dim=1)
            # A step with NaN raises an error later; in the bank a NaN would never disappear.
            bank[index] = torch.where(new.isfinite().all(dim=1, keepdim=True), new, old)
            Z_.copy_(torch.where(Z.isfinite(), Z, Z_))
        self.draws_ += 1

    def check(self, index: Int[Tensor, "b"], y: Int[Tensor, "b"]) -> None:
        """Raise an error unless the batch consists of images that the bank was fitted to, with the same labels."""
        known = (index >= 0) & (index < self.N)
        same = known & ((self.y_[index.clamp(0, self.N - 1)] == y) | (y == UNLABELLED))
        if not bool(same.all()):
            i = int((~same).nonzero()[0])
            was = (
                f"was fitted with the label {int(self.y_[index[i]])}"
                if known[i]
                else f"is not among the {self.N} fitted images"
            )
            raise DataError(
                f"CRD got an image with index {int(index[i])} and label {int(y[i])}, which {was}; fit it to the training images"
            )

    def extra_repr(self) -> str:
        return f"feat_dim={self.feat_dim}, K={self.K}"
