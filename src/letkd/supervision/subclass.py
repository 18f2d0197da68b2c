"""Sub-class decisions: which sub-classes the teacher can distinguish at an intermediate layer (section 4.2.2, Alg. 2)."""

from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from letkd.errors import FitError, UnsupportedPair
from letkd.functional import pixels
from letkd.limits import Bytes, Count, Samples, Seed
from letkd.supervision.base import Supervision
from letkd.supervision.labels import Labels, Table, as_maps
from letkd.supervision.stats import ClassMoments, Reservoir, kmeans, nearest_centre


def transition_scores(i: Int[Tensor, "n"], j: Int[Tensor, "n"], M: int, *, smoothing: float = 0.0) -> Float[Tensor, "M M"]:
    """s_T[i, j] = p(h_2 = j | h_1 = i), estimated by counting; rows sum to one.

    A sub-class without pixels has no estimate: its row is one-hot on itself. `smoothing` is added to every count first.
    """
    counts = torch.bincount(i * M + j, minlength=M * M).reshape(M, M).double() + smoothing
    empty = counts.sum(dim=1) == 0
    counts[empty, empty] = 1.0
    return counts / counts.sum(dim=1, keepdim=True)  # section 4.2.2; Alg. 2, offline: p(h_2 | h_1)


class SubclassSupervision(Supervision):
    """Localised fine-grained decisions: LDA, K sub-classes per class, and how often each is mistaken for another (Alg. 2).

    Args:
        K: sub-classes per class, K_inter. Paper: 8. p_T has K·C labels.
        r: maximum number of LDA components; at most C − 1 and the rank are kept. The authors use 60.
        prototypes_online: assign pixels to the nearest prototype instead of the nearest K-means centre (Alg. 2 uses centres).
        smoothing: added to every count of s_T. Paper: 0.
        pixels_per_class: size of the random sample per class, for clusters, prototypes and counts; None: as many as fit into
            `memory`. LDA always uses all pixels.
        memory: largest size of the sample in bytes if `pixels_per_class` is None; drawing it temporarily takes two or three
            times as much.
        iterations: of Lloyd's algorithm. The authors use 20.
        seed: of the sample and of the initial centres.
        unlabelled: for images without a label, "teacher" uses the class that the teacher predicts, if it has the student's
            classes; "skip" leaves the image out of this loss.
        C: number of classes; set by a Distiller.

    One pass over the teacher's features: LDA comes from streamed moments, everything else from a uniform sample (all pixels, if they fit).
    Buffers: `W_lda_ [r d]`, `b_lda_ [r]`, `rho_ [C K r]` centres, `prototypes_ [C K r]`, `s_T_ [CK CK]`.

    Examples:
        >>> f_T, y = torch.randn(6, 8, 5, 5), torch.tensor([0, 1, 2, 0, 1, 2])
        >>> supervision = SubclassSupervision(K=2, C=3).fit([(f_T, y)])
        >>> supervision.p_T(f_T, y).shape  # K·C labels per pixel
        torch.Size([6, 6, 5, 5])
    """

    kind: ClassVar[str] = "subclass"
    reads_classes: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True
    fitted_buffers: ClassVar[tuple[str, ...]] = ("s_T_", "W_lda_", "b_lda_", "rho_", "prototypes_")
    s_T_: Tensor
    W_lda_: Tensor
    b_lda_: Tensor
    rho_: Tensor
    prototypes_: Tensor

    def __init__(
        self,
        K: Count = 8,
        r: Count = 60,
        *,
        prototypes_online: bool = False,
        smoothing: Annotated[float, Field(strict=True, ge=0, le=1e12)] = 0.0,
        pixels_per_class: Samples | None = None,
        memory: Bytes = 2**28,
        iterations: Count = 20,
        seed: Seed = 0,
        unlabelled: str = "teacher",
        C: Count | None = None,
    ):
        super().__init__()
        if unlabelled not in ("teacher", "skip"):
            raise FitError(f"sub-classes with unlabelled={unlabelled!r}: choose 'teacher' or 'skip'")
        self.unlabelled = unlabelled
        self.K, self.r, self.C = K, r, C
        self.prototypes_online, self.smoothing = prototypes_online, smoothing
        self.pixels_per_class, self.memory = pixels_per_class, memory
        self.iterations, self.seed = iterations, seed
        self._moments: ClassMoments | None = None
        self._reservoir: Reservoir | None = None

    def bind(self, where: str, *, d: int, C: int) -> None:
        super().bind(where, d=d, C=C)
        self.C = C or self.C
        if self.C is None:
            raise UnsupportedPair(
                f"sub-classes at {where!r} need classes, but the student returns no logits; pass C= to the supervision, or use K-means"
            )

    def _classes(self) -> int:
        if self.C is None:
            raise FitError(f"{self} needs the number of classes; pass C=, or use it in a Distiller")
        return self.C

    def num_labels(self) -> int:
        return self.K * self._classes()

    def settings(self) -> dict[str, object]:
        names = ("K", "r", "C", "smoothing", "pixels_per_class", "memory", "iterations", "seed")
        return {name: getattr(self, name) for name in names}

    def label_settings(self) -> dict[str, object]:
        skip: dict[str, object] = {} if self.unlabelled == "teacher" else {"unlabelled": self.unlabelled}
        return {"prototypes_online": self.prototypes_online, **skip}

    def reset(self) -> None:
        super().reset()
        self._moments = self._reservoir = None

    def partial_fit(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"], index: Int[Tensor, "b"] | None = None) -> None:
        self._check_map(f_T)
        C, d = self._classes(), f_T.shape[1]
        if len(y) and (int(y.min()) < 0 or int(y.max()) >= C):
            raise FitError(
                f"labels at {self.where!r} range from {int(y.min())} to {int(y.max())}, but with {C} classes they must be 0 to {C - 1}"
            )
        if self._moments is None or self._reservoir is None:
            self._moments = ClassMoments.zeros(C, d)
            self._reservoir = Reservoir(
                self.pixels_per_class or max(self.K, self.memory // (4 * C * d)), groups=C, seed=self.seed
            )
        self._moments.add(f_T, y)
        self._reservoir.add(f_T, y, index)

    def gather(self) -> None:
        self._moments, self._reservoir = ClassMoments.of_all(self._moments), Reservoir.of_all(self._reservoir)

    def finish(self) -> None:
        C = self._classes()
        seen = torch.zeros(C) if self._reservoir is None else self._reservoir.seen
        if not seen.any():
            raise FitError(
                f"sub-classes at {self.where!r} need labelled images, but there are none; use K-means labels (letKD-1), which need no "
                "labels, or add labelled images"
            )
        short = [f"class {c} has {int(n)}" for c, n in enumerate(seen) if n < self.K or n == 0]
        if self._moments is None or self._reservoir is None or short:
            raise FitError(
                f"every class needs at least K_inter={self.K} pixels at {self.where!r}, but {', '.join(short[:5])}"
                f"{f' and {len(short) - 5} more classes have too few' if len(short) > 5 else ''}; add images of them or lower K_inter"
            )
        if C < 2:
            raise FitError(f"LDA at {self.where!r} needs at least two classes, but there is only one")
        W, b = self._moments.lda(self.r)  # Alg. 2, offline: W_LDA, b_LDA ← LDA(F, Y)
        if not len(W):
            raise FitError(f"the teacher's maps at {self.where!r} are constant or the same for every class; choose another tap")
        F, y = self._reservoir.sample()
        self._moments = self._reservoir = None
        F_lda = F[:, : len(W)]  # overwrites F: both might not fit into memory
        for rows, z in zip(F.split(65536), F_lda.split(65536), strict=True):  # float64 for one part at a time
            z.copy_(rows.double() @ W.T + b)  # Alg. 2, offline: F_LDA ← Conv1x1(F, W_LDA, b_LDA)  [n r]
        rho = torch.stack(
            [kmeans(F_lda[y == c], self.K, iterations=self.iterations, seed=self.seed) for c in range(C)]
        )  # Alg. 2, offline: ρ_c ← KMeans(F_LDA^c, K_inter)  [C K r]
        self.W_lda_, self.b_lda_, self.rho_ = W.float(), b.float(), rho
        own = torch.empty_like(y)
        for c in range(C):
            own[y == c] = c * self.K + nearest_centre(F_lda[y == c], rho[c])  # Alg. 2, offline: P^c, by h_1(·; c)
        self.prototypes_ = _means(F_lda, own, rho.flatten(0, 1)).unflatten(0, (C, self.K))  # Alg. 2, offline: prot^{k,c}
        self.s_T_ = transition_scores(own, self.h2(F_lda), C * self.K, smoothing=self.smoothing).float()  # Alg. 2, offline
        self.report_ = {
            "pixels seen": int(seen.sum()),
            "pixels counted": len(F_lda),
            "LDA components": len(W),
            "mean of own sub-class": float(self.s_T_.diagonal().mean()),
        }

    def z(self, f_T: Float[Tensor, "b d h w"]) -> Float[Tensor, "n r"]:
        """z = LDA(f_T), a 1x1 convolution; pixels as rows."""
        self._check_fitted()
        self._check_channels(f_T, self.W_lda_.shape[1])
        return pixels(f_T.to(self.W_lda_.dtype)) @ self.W_lda_.T + self.b_lda_  # Alg. 2, online: z = LDA(f_T)  [n r]

    def h1(self, z: Float[Tensor, "n r"], c: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        """h_1(z; c): the sub-class of class c whose centre is nearest to z, as an index into all C·K."""
        centres = self.prototypes_ if self.prototypes_online else self.rho_
        half_norm = 0.5 * (centres * centres).sum(dim=2)  # [C K]
        score = (centres[c] @ z[:, :, None]).squeeze(2) - half_norm[c]  # [n K]
        return c * self.K + score.argmax(dim=1)  # section 4.2.2; Alg. 2, online: h_1, which is k*

    def h2(self, z: Float[Tensor, "n r"]) -> Int[Tensor, "n"]:
        """h_2(z): the sub-class whose prototype is nearest to z, of any class."""
        return nearest_centre(z, self.prototypes_.flatten(0, 1))  # section 4.2.2; Alg. 2, offline: h_2

    def labels(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"]) -> Labels:
        h, w = f_T.shape[-2:]
        with torch.autocast(f_T.device.type, enabled=False):  # bf16 rounding is larger than the differences between centres
            k_star = self.h1(self.z(f_T), y.repeat_interleave(h * w))
        return Table(self.s_T_, k_star)  # section 4.2.2; Alg. 2, online: p_T ← s_T(k*)

    def p_T(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"]) -> Float[Tensor, "b K h w"]:
        return as_maps(self.labels(f_T, y), (f_T.shape[-2], f_T.shape[-1]))

    def label_table(self) -> Float[Tensor, "M K"]:
        return self.s_T_

    def extra_repr(self) -> str:
        return f"K={self.K}, r={self.r}"


def _means(f: Float[Tensor, "n d"], group: Int[Tensor, "n"], otherwise: Float[Tensor, "M d"]) -> Float[Tensor, "M d"]:
    """Mean of the rows of each group; `otherwise` if a group is empty."""
    n = torch.bincount(group, minlength=len(otherwise)).double()[:, None]
    sums = torch.zeros(otherwise.shape, dtype=torch.float64)
    for rows, to in zip(f.split(65536), group.split(65536), strict=True):  # float64 for one part at a time
        sums.index_add_(0, to, rows.double())
    return torch.where(n > 0, sums / n.clamp_min(1), otherwise.double()).to(f.dtype)
