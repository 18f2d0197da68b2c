"""The processes of a run, as started by a launcher. This is the only file that imports Fabric."""

import atexit
import gc
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from letkd.errors import RecipeError
from letkd.progress import is_quiet, set_quiet
from letkd.recipes.schema import Recipe
from letkd.recipes.tables import leaves
from letkd.training.device import choices

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def launch(recipe: Recipe) -> "Fabric":
    """Fabric, with as many processes as torchrun or SLURM started; all but the first are quiet."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    devices, nodes = processes_from(os.environ)
    if devices * nodes > 1:
        # Without weight, or with α = 0 (D32), parameters have no gradient.
        no_layer = any(path[-1] == "alpha" and value == 0 for path, value in leaves(recipe.methods))
        some_unused = bool(recipe.phases) or not all(recipe.weights.values()) or no_layer
        strategy = DDPStrategy(find_unused_parameters=some_unused)
    else:
        strategy = "auto"
    if recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    precision = choices(recipe)["precision"]
    with _silent("lightning_fabric"):
        fabric = Fabric(accelerator="auto", devices=devices, num_nodes=nodes, strategy=strategy, precision=precision)
    if precision.endswith("mixed"):
        # Autocast casts where needed. If the images were rounded first, they would differ from those that the labels were fitted to.
        object.__setattr__(fabric.strategy.precision, "convert_input", lambda data: data)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and not dist.is_initialized():
        _rejoin(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    fabric.launch()
    if dist.is_initialized():
        atexit.unregister(_leave)  # each run of this process registers it
        atexit.register(_leave)
    set_quiet(is_quiet() or not fabric.is_global_zero)
    return fabric


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Hide the information that another library logs; its warnings are shown."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _leave() -> None:
    """Close the process group before the interpreter ends: gloo's threads can otherwise abort a process that has finished its work."""
    gc.collect()  # DDP, which holds the group and its threads, is part of a cycle
    if dist.is_initialized():
        dist.destroy_process_group()


def _rejoin(restart: int) -> None:
    """Join the process group under new keys: torchrun may keep its store after a restart, with the addresses of dead processes in it."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(iter(rendezvous("env://")))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=PrefixStore(f"restart {restart}", store), rank=rank, world_size=world)


def need_one_process(command: str) -> None:
    """Raise an error if a launcher started several processes as one run, but `command` starts its runs itself."""
    devices, nodes = processes_from(os.environ)
    if devices * nodes > 1:
        raise RecipeError(
            f"{command} starts its runs itself, but torchrun or SLURM started it in {devices * nodes} processes, which would be one run; "
            "start it in one process"
        )


def processes_from(environment: Mapping[str, str]) -> tuple[int, int]:
    """Processes per node and number of nodes, from the variables of torchrun or else of SLURM; 1 and 1 without a launcher."""
    if "LOCAL_WORLD_SIZE" in environment:
        local = int(environment["LOCAL_WORLD_SIZE"])
        return local, int(environment["WORLD_SIZE"]) // local
    if "SLURM_NTASKS_PER_NODE" in environment and "SLURM_PROCID" in environment:
        return int(environment["SLURM_NTASKS_PER_NODE"]), int(environment.get("SLURM_NNODES", "1"))
    return 1, 1
