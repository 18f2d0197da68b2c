"""Cost of a network: parameters, and multiply-accumulates per forward pass."""

from torch import Tensor, nn
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from letkd.taps import Taps, run_once


def parameters(model: nn.Module) -> int:
    """Number of parameters of a network; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def macs(model: nn.Module, example: Tensor) -> int:
    """Multiply-accumulates of the convolutions and matrix products in one forward pass, without biases, norms and activations.

    Args:
        model: run in eval mode; its mode is restored. Parameters may be on the `meta` device.
        example: the input `[b 3 H W]`, on the model's device; the count is for all b images.
    """
    counter = FlopCounterMode(display=False)
    fused = mha.get_fastpath_enabled()
    # The counter does not know fused attention and would count 0 for it.
    mha.set_fastpath_enabled(False)
    try:
        with counter, sdpa_kernel(SDPBackend.MATH):
            run_once(Taps(model, {}), example)
    finally:
        mha.set_fastpath_enabled(fused)
    return counter.get_total_flops() // 2
