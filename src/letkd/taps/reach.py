"""Whether the output of a grafted layer reaches the loss."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from letkd.errors import TapError


class Reach:
    """Checks once for every layer that the loss depends on its output; later steps cost nothing."""

    def __init__(self):
        self.proven: set[str] = set()

    @contextmanager
    def watch(self, model: nn.Module, paths: Collection[str]) -> Iterator[dict[str, Tensor]]:
        """Within `with`, collect the outputs of the layers at these paths, except proven and frozen layers."""
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
        """Raise an error if the loss does not depend on one of the outputs that `watch` collected."""
        if outputs and (lost := unreached(loss, outputs)):
            raise TapError(
                f"the KD layer at {lost[0]!r} of the student {type(model).__name__} has no effect: the loss does not depend on its "
                "output, so its ν and BN get no gradient. The layer is in a side branch, or the features after it are detached; name "
                "a tap whose output reaches the logits (`letkd taps` lists the modules)"
            )
        self.proven |= outputs.keys()


def unreached(loss: Tensor, outputs: Mapping[str, Tensor]) -> list[str]:
    """The names of the outputs that the loss does not depend on, according to autograd's graph. No gradient is computed, so a
    gradient of zero, as before a head that is initialised with zeros, counts as a dependence.
    """
    nodes: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [following for following, _ in node.next_functions]
    return [name for name, output in outputs.items() if output.grad_fn not in nodes]
