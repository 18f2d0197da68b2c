"""Packages look down: each can be imported where everything above it does not exist."""

import importlib
import os
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import letkd
from tests.support.source import SOURCE, layers

# One process imports what all of them need, then forks for each package and blocks those above it.
PROGRAM = """
import importlib, os, sys, traceback
import torch, numpy, pydantic, scipy, sklearn.cluster, safetensors.torch, PIL.Image, jaxtyping, faiss
class Above:
    def __init__(self, names): self.names = names
    def find_spec(self, name, path=None, target=None):
        if any(name == f"letkd.{one}" or name.startswith(f"letkd.{one}.") for one in self.names):
            raise ImportError(f"{name} lies above")
above, failed = [], []
for layer in sys.argv[1:]:
    for package in layer.split("|"):
        pid = os.fork()
        if pid == 0:
            sys.meta_path.insert(0, Above([one for one in above]))
            try:
                module = importlib.import_module(f"letkd.{package}")
                for path in getattr(module, "__path__", ()):
                    for name in sorted(os.listdir(path)):
                        if name.endswith(".py") and name not in ("__init__.py", "__main__.py"):
                            importlib.import_module(f"letkd.{package}.{name[:-3]}")
            except BaseException:
                traceback.print_exc(); sys.stderr.flush(); os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            failed.append(package)
    above += layer.split("|")
sys.exit(f"cannot be imported alone: {', '.join(failed)}" if failed else 0)
"""


def test_the_contract_names_every_package():
    named = {name for layer in layers() for name in layer.split("|")}
    there = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert named == there - {"__init__", "__main__"}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_package_imports_with_all_higher_ones_blocked():
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *layers()], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_no_name_of_a_package_hides_a_submodule():
    packages = ["letkd", *(name for _, name, package in pkgutil.walk_packages(letkd.__path__, "letkd.") if package)]
    assert {"letkd.methods", "letkd.taps", "letkd.training.launchers"} < set(packages)
    hidden = []
    for name in packages:
        package = importlib.import_module(name)
        for _, module, _ in pkgutil.iter_modules(package.__path__):
            found = getattr(package, module, None)
            if found is not None and not isinstance(found, ModuleType):
                hidden.append(f"{name}.{module}")
    assert hidden == []
