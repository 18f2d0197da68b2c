"""The scripts under examples/ as modules."""

import importlib.util
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def script(name: str, monkeypatch):
    """An example as a module, found beside its siblings as `python examples/….py` would find them."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "plain_pytorch", raising=False)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}
