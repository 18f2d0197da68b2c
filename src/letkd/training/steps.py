"""The steps of a run: forward, backward, clipping, the optimiser and the average of the weights."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim

from letkd.batch import Batch
from letkd.distiller import Distiller, Step
from letkd.distributed.processes import is_distributed
from letkd.distributed.sync_bn import sync_batch_norms
from letkd.recipes.schema import Recipe
from letkd.training.average import Average
from letkd.training.compiled import CompiledParts
from letkd.training.optim import build_optimizer, set_lr

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Steps:
    """A distiller and its optimiser, set up according to the recipe.

    `norms` holds the norms of the last gradients, on the device, and `gradients` the names of their parameters. `norms` is None in
    half precision, where overflows are expected: the step is skipped and the scale halved.
    """

    def __init__(self, fabric: "Fabric", distiller: Distiller, recipe: Recipe):
        self.fabric, self.distiller, self.recipe = fabric, distiller, recipe
        if recipe.train.sync_bn:
            sync_batch_norms(distiller)
        self._compiled: AbstractContextManager[None] = nullcontext()
        if recipe.train.compile:
            self._compiled = CompiledParts(distiller.student, read={tap.path for tap in distiller.student_reads.values()})
        # DDP need not broadcast these buffers at every step: most are the same in every process, and BN's are copied before evaluations.
        ignored = [name for name, _ in distiller.named_buffers() if name.startswith(("methods.", "auto."))]
        object.__setattr__(distiller, "_ddp_params_and_buffers_to_ignore", ignored)
        if is_distributed():
            distiller.register_forward_hook(_detach_all_but_loss)
        wrapped: Any = fabric.setup(distiller, build_optimizer(distiller, recipe.optim))
        self.model: Any = wrapped[0]
        self.optimizer: optim.Optimizer = wrapped[1]
        self.average = None if recipe.train.ema is None else Average(distiller, recipe.train.ema)
        self.accumulate = recipe.train.accumulate or 1
        self.updates = 0  # of the weights, so far
        self.norms: Tensor | None = None
        self.gradients: list[str] = []

    def take(self, batch: Batch, lr_factor: float, *, done: int, of: int) -> Step:
        """Train on one batch of an epoch. The weights are updated after every `train.accumulate` batches and after the last one.

        Args:
            lr_factor: learning rate as a multiple of the first rate; of accumulated batches, the value of the first one is used.
            done: number of batches of the epoch before this one.
            of: number of batches in the epoch.
        """
        first = done - done % self.accumulate
        count = min(self.accumulate, of - first)
        if done == first:
            set_lr(self.optimizer, lr_factor)
        updates = done + 1 == first + count
        self.norms = None
        with self.fabric.no_backward_sync(self.model, enabled=not updates):
            with self._compiled:
                step = self.model(batch)
            self.fabric.backward(step.loss / count if count > 1 else step.loss)
        if updates:
            self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.average is not None:
                self.average.update(self.updates)
            self.updates += 1
        return step

    def can_save(self, done: int, of: int) -> bool:
        """Whether the weights were updated after the last of `done` batches; only then can a run be saved."""
        return done % self.accumulate == 0 or done == of

    def _clip(self) -> None:
        limit = self.recipe.optim.clip
        if self.recipe.train.precision == "16-mixed":
            if limit is not None:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=limit, error_if_nonfinite=False)
            return
        gradients = {name: p.grad for name, p in self.distiller.named_parameters() if p.grad is not None}
        self.gradients = list(gradients)
        self.norms = torch.stack(torch._foreach_norm(list(gradients.values())))  # pyright: ignore[reportPrivateImportUsage]
        if limit is not None:
            nn.utils.clip_grads_with_norm_(self.distiller.parameters(), limit, torch.linalg.vector_norm(self.norms))


def _detach_all_but_loss(distiller: nn.Module, args: tuple, step: Step) -> Step:
    """Detach everything but the loss: DDP waits for the gradients of all parameters that any output depends on."""
    return replace(step, terms={name: term.detach() for name, term in step.terms.items()}, logits=step.logits.detach())
