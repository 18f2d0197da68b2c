"""MLKD: match predictions per image, per class and over the batch, of a weak and a strong view (Jin, Wang, Lin 2023)."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from letkd.limits import Scale
from letkd.methods.base import Method, View
from letkd.methods.kd import kd_loss

BOTH, WEAK = (3.0, 5.0), (2.0, 6.0)  # temperatures in addition to T: for both views, and for the weak view only


def class_relation(q_S: Float[Tensor, "b C"], q_T: Float[Tensor, "b C"]) -> Float[Tensor, ""]:
    """1/C · Σ (q_Tᵀ q_T − q_Sᵀ q_S)²: how often two classes are predicted together. Grows with the batch size."""
    return (q_T.T @ q_T - q_S.T @ q_S).square().sum() / q_S.shape[1]


def batch_relation(q_S: Float[Tensor, "b C"], q_T: Float[Tensor, "b C"]) -> Float[Tensor, ""]:
    """1/b · Σ (q_T q_Tᵀ − q_S q_Sᵀ)²: how similarly two images are predicted. Grows with the batch size."""
    return (q_T @ q_T.T - q_S @ q_S.T).square().sum() / q_S.shape[0]


def share_up_to_median(values: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    """Share of the values that are not above their median (the mean of the middle two if n is even): ½ for an even n without ties."""
    return (values <= values.quantile(0.5)).to(values.dtype).mean()


def mlkd_terms(
    logits_S: Float[Tensor, "b C"],
    logits_T: Float[Tensor, "b C"],
    strong_S: Float[Tensor, "b C"],
    strong_T: Float[Tensor, "b C"],
    T: float = 4.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
    """The three levels, at the temperatures T, 3, 5, 2 and 6; KL_t is `kd_loss` at t, q = softmax(logits / t).

        instance = μ Σ_all KL_t(weak) + Σ_{T,3,5} KL_t(strong) + Σ_{2,6} KL_t(weak)
        class    = ν Σ_all class_relation(q of the weak view)
        batch    = μ Σ_all batch_relation(q of the weak view)

        μ = share of images whose largest teacher's probability at temperature 1 is not above the batch's median
        ν = share of classes whose teacher's probability at temperature 1, summed over the batch, is not above the median

    This is what the authors' code computes. Its confidence masks act as the factors μ and ν, and the temperatures 2 and 6 read the
    weak view twice.
    """
    dtype = torch.promote_types(logits_S.dtype, torch.float32)
    logits_S, logits_T, strong_S, strong_T = (logits.to(dtype) for logits in (logits_S, logits_T, strong_S, strong_T))
    p_T = torch.softmax(logits_T, dim=1)
    mu, nu = share_up_to_median(p_T.amax(dim=1)), share_up_to_median(p_T.sum(dim=0))
    both, weak_only = [kd_loss(logits_S, logits_T, t) for t in (T, *BOTH)], [kd_loss(logits_S, logits_T, t) for t in WEAK]
    strong = [kd_loss(strong_S, strong_T, t) for t in (T, *BOTH)]
    instance = mu * _sum(both + weak_only) + _sum(strong) + _sum(weak_only)
    soft = [[torch.softmax(logits / t, dim=1) for logits in (logits_S, logits_T)] for t in (T, *BOTH, *WEAK)]
    with torch.autocast(logits_S.device.type, enabled=False):  # autocast would compute these products in half precision
        by_class = nu * _sum([class_relation(*pair) for pair in soft])
        by_batch = mu * _sum([batch_relation(*pair) for pair in soft])
    return instance, by_class, by_batch


def _sum(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).sum()


class MLKD(Method):
    """`mlkd_terms` of two views of each image. Adds nothing to the student, but both networks see twice the images.

    Args:
        T: the first of five temperatures; the others are 3, 5, 2 and 6. The authors use 4 on CIFAR, 1 on ImageNet.

    The batch's `x` is the weak view, its `second` the strong one (`data.second_view = "strong"`). With several processes, each computes
    medians and relations on its own part of the batch. Terms: `mlkd/ce`, the cross-entropy of the strong view, `mlkd/instance`,
    `mlkd/class`, `mlkd/batch`. The authors use weight 0.1 for both cross-entropies and 0.9 for the others; on ImageNet 0.5 for all.

    Examples:
        >>> import letkd
        >>> student, teacher = (letkd.create_model(name, num_classes=3) for name in ("resnet8_tiny", "resnet14_tiny"))
        >>> weak, strong = torch.randn(2, 4, 3, 32, 32)
        >>> step = letkd.Distiller(student, teacher, MLKD())(letkd.Batch(weak, torch.tensor([0, 1, 2, 0]), second=strong))
        >>> list(step.terms)
        ['ce', 'mlkd/ce', 'mlkd/instance', 'mlkd/class', 'mlkd/batch']
    """

    name: ClassVar[str] = "mlkd"
    paper: ClassVar[str] = "Jin, Wang, Lin, 2023"
    loss: ClassVar[str] = (
        "CE of a second, strong view + KL of the predictions at five temperatures, of both views + squared differences of the weak "
        "view's class and batch similarities. Sees two views of every image, so twice the images per epoch"
    )
    formulae: ClassVar = (class_relation, batch_relation, mlkd_terms)
    two_views: ClassVar[bool] = True
    unmixable: ClassVar[str] = "its two views of an image would show two mixtures"

    def __init__(self, T: Scale = 4.0):
        super().__init__()
        self.T = float(T)

    def term_names(self) -> tuple[str, ...]:
        return "mlkd/ce", "mlkd/instance", "mlkd/class", "mlkd/batch"

    def terms(self, view: View) -> dict[str, Tensor]:
        weak, strong = ((one.student["logits"], one.teacher["logits"]) for one in (view, view.of_second()))
        losses = view.batch.over_labels(F.cross_entropy, strong[0]), *mlkd_terms(*weak, *strong, self.T)
        return dict(zip(self.term_names(), losses, strict=True))
