"""What a network costs at inference."""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from letkd.report.sites import at_rest


def macs(model: nn.Module, example: Tensor) -> int:
    """Multiply-accumulates of convolutions and matrix products for one example, `[1 3 H W]`."""
    with at_rest(model), torch.random.fork_rng([]), FlopCounterMode(display=False) as counter:
        model(example)
    return counter.get_total_flops() // 2
