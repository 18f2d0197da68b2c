"""What a network costs: parameters, and multiply-accumulates of one forward."""

from torch import Tensor, nn
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from letkd.taps import Taps, run_once


def parameters(model: nn.Module) -> int:
    """How many parameters a network has; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def macs(model: nn.Module, example: Tensor) -> int:
    """Multiply-accumulates of the convolutions and matrix products in one forward; biases, norms and activations do not count.

    Args:
        model: run in eval mode, and left as it was. Parameters on the `meta` device will do.
        example: the input `[b 3 H W]`, on the model's device; the count is for all b images.
    """
    counter = FlopCounterMode(display=False)
    fused = mha.get_fastpath_enabled()
    # Attention in one fused operation is not among what the counter knows: it would count nothing.
    mha.set_fastpath_enabled(False)
    try:
        with counter, sdpa_kernel(SDPBackend.MATH):
            run_once(Taps(model, {}), example)
    finally:
        mha.set_fastpath_enabled(fused)
    return counter.get_total_flops() // 2
