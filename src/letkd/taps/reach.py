"""Whether what a grafted layer gives reaches the loss."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from letkd.errors import TapError


class Reach:
    """Shows once for every layer that the loss depends on what it gives; later steps cost nothing."""

    def __init__(self):
        self.proven: set[str] = set()

    @contextmanager
    def watch(self, model: nn.Module, paths: Collection[str]) -> Iterator[dict[str, Tensor]]:
        """Within `with`, what the layers at these paths give, by path; those that are proven or frozen are left out."""
        seen: dict[str, Tensor] = {}

        def keep(path: str, module: nn.Module, args: tuple, output: Tensor) -> None:
            seen[path] = output

        layers = {path: model.get_submodule(path) for path in paths if path not in self.proven}
        trained = {path: layer for path, layer in layers.items() if any(p.requires_grad for p in layer.parameters())}
        handles = [layer.register_forward_hook(partial(keep, path)) for path, layer in trained.items()]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def prove(self, model: nn.Module, loss: Tensor, outputs: Mapping[str, Tensor]) -> None:
        """Raises where the loss does not depend on one of the outputs that `watch` gave."""
        if outputs and (lost := unreached(loss, outputs)):
            raise TapError(
                f"the KD layer at {lost[0]!r} of the student {type(model).__name__} does nothing: the loss does not depend on what it "
                "gives, so its ν and BN get no gradient. The place is in a side branch, or what follows is detached; name a tap "
                "whose output reaches the logits (`letkd taps` lists the modules)"
            )
        self.proven |= outputs.keys()


def unreached(loss: Tensor, outputs: Mapping[str, Tensor]) -> list[str]:
    """The names of the outputs that the loss does not depend on, by autograd's graph. Nothing is computed, so that a gradient that
    happens to be zero, as behind a head that starts at zero, counts as one.
    """
    nodes: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [following for following, _ in node.next_functions]
    return [name for name, output in outputs.items() if output.grad_fn not in nodes]
