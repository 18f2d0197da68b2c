"""CRD: contrastive representation distillation (Tian et al. 2020)."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from letkd.errors import UnsupportedPair
from letkd.limits import Bytes, Count, Scale, Seed, Share
from letkd.methods.base import Fitting, Lessons, Method, Side, View
from letkd.supervision.crd_bank import CRDBank, need_index


def contrast(
    v: Float[Tensor, "b d"],
    bank: Float[Tensor, "N d"],
    positive: Int[Tensor, "b"],
    negative: Int[Tensor, "b K"],
    tau: float = 0.07,
) -> Float[Tensor, "b m"]:
    """exp(v_i · bank_j / τ) for every anchor, its positive row j of the bank (first column) and its K negative rows: m = K + 1."""
    rows = torch.cat([positive[:, None], negative], dim=1)
    # Computing all N products and then selecting takes less memory than selecting the [b m d] rows first, unless N > K·d.
    return torch.exp((v @ bank.T).gather(1, rows) / tau)


def nce_loss(P_pos: Float[Tensor, "b"], P_neg: Float[Tensor, "b K"], N: int) -> Float[Tensor, ""]:
    """−1/b Σ_i [ log P⁺_i / (P⁺_i + K/N + ε) + Σ_k log (K/N) / (P⁻_ik + K/N + ε) ], ε = 1e-7: noise-contrastive estimation.

    Computed with log(1 + x): for a P⁻ far below K/N, the logarithm of the quotient would lose most digits in float32.
    """
    noise, eps = P_neg.shape[1] / N, 1e-7
    pull = torch.log1p((noise + eps) / P_pos)
    push = torch.log1p((P_neg + eps) / noise).sum(dim=1)
    return (pull + push).mean()


class CRD(Method):
    """Contrastive loss: each network's embedding of an image must identify the other network's embedding of the same image among
    embeddings of images of other classes.

    Args:
        feat_dim: length of the embeddings. Usual value: 128.
        K: negatives per image; fewer if there are not as many images of other classes. Usual value: 16384.
        tau: temperature of the scores. Usual value: 0.07.
        momentum: share of the old row in a bank's update. Usual value: 0.5.
        memory: largest size of both banks in bytes; they take feat_dim · 8 bytes per training image.
        seed: of the banks' initial rows and of the negatives.

    Reads `pooled`. Both embeddings are linear, trained, and dropped at inference. The batches must carry the images' indices.
    In training mode a step updates the banks; in eval mode it does not. Term: `crd`, student against the teacher's bank plus
    teacher against the student's. Usual weight: 0.8, with 1 for `ce` (and 1 for `kd` in CRD+KD).

    Examples:
        >>> import letkd
        >>> student, teacher = (letkd.create_model(name, num_classes=3) for name in ("resnet8_tiny", "resnet14_tiny"))
        >>> batch = torch.randn(6, 3, 32, 32), torch.arange(6) % 3, torch.arange(6)  # with the images' indices
        >>> list(letkd.Distiller(student, teacher, CRD(K=4)).fit([batch])(batch).terms)
        ['ce', 'crd']
    """

    name: ClassVar[str] = "crd"
    paper: ClassVar[str] = "Tian, Krishnan, Isola, 2020"
    loss: ClassVar[str] = "noise-contrastive loss between student's and teacher's embeddings, against memory banks"
    formulae: ClassVar = (contrast, nce_loss)
    reads_logits: ClassVar[bool] = False
    knows_images: ClassVar[bool] = True
    unmixable: ClassVar[str] = "its memory has one row per image, and a mixed image would belong to two"

    def __init__(
        self,
        feat_dim: Count = 128,
        K: Count = 16384,
        *,
        tau: Scale = 0.07,
        momentum: Share = 0.5,
        memory: Bytes = 2**30,
        seed: Seed = 0,
    ):
        super().__init__()
        self.feat_dim, self.tau = feat_dim, float(tau)
        self.bank = CRDBank(feat_dim, K, momentum=momentum, memory=memory, seed=seed)

    def build(self, student: Side, teacher: Side) -> None:
        if student.num_classes == 1:
            raise UnsupportedPair("CRD draws negatives from other classes, and there is only one class")
        self.embed_S = nn.Linear(student.width("pooled"), self.feat_dim)
        self.embed_T = nn.Linear(teacher.width("pooled"), self.feat_dim)
        self.bank.bind(self.name, d=self.embed_T.in_features, C=student.num_classes)
        self.reads.student["pooled"] = student.taps["pooled"]
        self.reads.teacher["pooled"] = teacher.taps["pooled"]

    def fittings(self) -> dict[str, Fitting[CRDBank]]:
        return {self.name: Fitting(self.bank, "pooled", self.name)}

    def lessons(self) -> Lessons:
        return Lessons(vectors=("pooled",))

    def terms(self, view: View) -> dict[str, Tensor]:
        index, bank = need_index(view.batch.index), self.bank
        bank.check(index, view.batch.y)
        with torch.autocast(index.device.type, enabled=False):  # bf16 scores divided by τ would have an error of about 0.1
            v_S, v_T = _embed(self.embed_S, view.student["pooled"]), _embed(self.embed_T, view.teacher["pooled"])
            negative = bank.negatives(index)
            # Copies, because the banks are updated before the backward pass, which needs their current values.
            to_T = contrast(v_S, bank.memory_T_.clone(), index, negative, self.tau)
            to_S = contrast(v_T, bank.memory_S_.clone(), index, negative, self.tau)
            Z_T, Z_S = bank.normaliser("T", to_T), bank.normaliser("S", to_S)
            P_T, P_S = to_T / Z_T, to_S / Z_S
            loss = nce_loss(P_T[:, 0], P_T[:, 1:], bank.N) + nce_loss(P_S[:, 0], P_S[:, 1:], bank.N)
            if self.training:
                bank.update(index, v_S=v_S, v_T=v_T, Z_S=Z_S, Z_T=Z_T)
        return {self.name: loss}


def _embed(linear: nn.Linear, pooled: Tensor) -> Tensor:
    return F.normalize(linear(pooled.flatten(1).to(linear.weight.dtype)), dim=1)
