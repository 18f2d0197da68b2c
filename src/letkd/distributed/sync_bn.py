"""Batch normalisation over the batches of all processes: the same as one process with the global batch."""

from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from letkd.distributed.processes import is_distributed
from letkd.errors import RecipeError


class _Sum(torch.autograd.Function):
    """Σ over processes. Each process's input affects all losses, so its gradient is the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class Synced(nn.modules.batchnorm._BatchNorm):
    """Mix-in for BN: in training, mean and variance are taken over the pixels of all processes. torch's own supports GPUs only."""

    plain: ClassVar[type[nn.Module]]  # the class without this mix-in

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and is_distributed()):
            return super().forward(input)
        dims = [0, *range(2, input.ndim)]
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = _Sum.apply(torch.cat([x.sum(dim=dims), count]))
        n, mean = sums[-1], sums[:-1] / sums[-1]
        wide = (1, -1, *(1,) * (x.ndim - 2))
        centred = x - mean.reshape(wide)
        var = _Sum.apply(centred.square().sum(dim=dims)) / n
        self._track(mean.detach(), var.detach() * (n / (n - 1).clamp_min(1)))
        y = centred * (var + self.eps).rsqrt().reshape(wide)
        if self.affine:
            y = y * self.weight.reshape(wide) + self.bias.reshape(wide)
        return y.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(var.to(self.running_var.dtype), momentum)


class SyncedWithActivation(Synced):
    """Mix-in for timm's BN that contains its dropout and activation."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return self.act(self.drop(y)) if self.training and is_distributed() else y


@cache
def _synced(bn: type[nn.Module]) -> type[nn.Module]:
    """The synchronised form of a class of BN."""
    if bn.forward is nn.BatchNorm2d.forward:
        mixin = Synced
    elif any(base.__module__.startswith("timm.") and base.__name__ == "BatchNormAct2d" for base in bn.__mro__):
        mixin = SyncedWithActivation
    else:
        raise RecipeError(
            f"train.sync_bn: {bn.__module__}.{bn.__name__} has a forward pass of its own, which cannot be synchronised; set it to false"
        )
    return type(f"Synced{bn.__name__}", (mixin, bn), {"plain": bn})


def sync_batch_norms(module: nn.Module) -> None:
    """Replace every BN of a module by a synchronised one, in place; names, weights and statistics stay."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, Synced | nn.SyncBatchNorm):
            _set_class(child, _synced(type(child)))


def unsync_batch_norms(module: nn.Module) -> None:
    """Undo `sync_batch_norms`."""
    for child in module.modules():
        if isinstance(child, Synced):
            _set_class(child, type(child).plain)


def _set_class(module: Any, kind: type[nn.Module]) -> None:
    module.__class__ = kind
