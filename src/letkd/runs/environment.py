"""The environment of a run, which env.json records."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from letkd.distributed.processes import world

LIBRARIES = ("letkd", "torch", "numpy", "faiss-cpu", "scikit-learn", "lightning-fabric", "safetensors")


def environment() -> dict[str, Any]:
    """What could affect the numbers: versions, machine, threads, processes."""
    import torch

    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "libraries": versions,
        "threads": torch.get_num_threads(),
        "processes": world(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "tf32": torch.backends.cuda.matmul.allow_tf32 if cuda else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "command": [word.encode("utf-8", "backslashreplace").decode() for word in sys.argv[1:]],
    }
