"""Functions of tensors that several packages share: pixels as rows, pooling one map to the size of another, the per-pixel KL divergence."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from letkd.errors import UnsupportedPair


def pixels(f: Float[Tensor, "b d h w"]) -> Float[Tensor, "n d"]:
    """Every pixel of a map as a row of its own, image by image, row by row: n = b·h·w."""
    return f.permute(0, 2, 3, 1).reshape(-1, f.shape[1])


def pool_ratio(have: tuple[int, int], want: tuple[int, int], where: str) -> tuple[int, int]:
    """How many teacher pixels, down and across, make one student pixel; they must be whole."""
    ratio = (have[0] // want[0], have[1] // want[1])
    if min(ratio) < 1 or (ratio[0] * want[0], ratio[1] * want[1]) != have:
        raise UnsupportedPair(
            f"the teacher's map at {where!r} is {have[0]}x{have[1]} and the student's {want[0]}x{want[1]}: average pooling needs "
            "a whole ratio of teacher to student size; choose taps whose sizes divide, or another size of the teacher's images"
        )
    return ratio


def pool_to(f_T: Float[Tensor, "b d H W"], size: tuple[int, int], where: str) -> Float[Tensor, "b d h w"]:
    """Average-pool the teacher's map to the student's size (supplement, "Heterogeneous distillation cases")."""
    have = (f_T.shape[-2], f_T.shape[-1])
    if have == tuple(size):
        return f_T
    return F.avg_pool2d(f_T, pool_ratio(have, (size[0], size[1]), where))  # supplement 2.2


def fit_spatially(f_S: Float[Tensor, "b d h w"], f_T: Float[Tensor, "b e H W"]) -> tuple[Tensor, Tensor]:
    """Average-pool whichever map is larger to the other's size, as the feature methods of the field do."""
    size = (min(f_S.shape[-2], f_T.shape[-2]), min(f_S.shape[-1], f_T.shape[-1]))
    return _shrink(f_S, size), _shrink(f_T, size)


def _shrink(f: Tensor, size: tuple[int, int]) -> Tensor:
    return f if f.shape[-2:] == size else F.adaptive_avg_pool2d(f, size)


def pixel_kl(p_T: Float[Tensor, "b K h w"], a: Float[Tensor, "b K h w"]) -> Float[Tensor, ""]:
    """KL(p_T ‖ p_S), summed over the K labels and averaged over all pixels of the batch; p_S = softmax(a).

        L_KD = 1/(b·h·w) Σ_i Σ_k p_T(i)_k · (log p_T(i)_k − log p_S(i)_k)                          (3.1), Alg. 3

    It is 0 where the two agree; adding a number to all K of a pixel's `a` changes nothing.
    """
    p_T = p_T.to(torch.promote_types(p_T.dtype, torch.float32))
    log_p_S = F.log_softmax(a.to(p_T.dtype), dim=1)  # section 4.1: p_S(i) = softmax(a_{|i})
    return (torch.xlogy(p_T, p_T) - p_T * log_p_S).sum(dim=1).mean()  # (3.1); Alg. 3: KL(p_T ‖ p_S)
