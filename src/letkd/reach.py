"""Whether what a layer gives reaches the loss."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


@contextmanager
def outputs_of(model: nn.Module, paths: Collection[str]) -> Iterator[dict[str, Tensor]]:
    """Within `with`, what the modules at these paths gave last, by path."""
    seen: dict[str, Tensor] = {}

    def keep(path: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        seen[path] = output

    handles = [model.get_submodule(path).register_forward_hook(partial(keep, path)) for path in paths]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


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
