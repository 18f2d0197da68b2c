"""How well a student that nothing classifies has learnt: the loss terms on images that it did not see."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.distributed.processes import objects_of_all
from letkd.inspect.sites import at_rest
from letkd.methods.base import Method


def held_out_terms(
    distiller: Distiller, batches: Iterable[Batch], *, heed: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Mean of every distillation term over images, in eval mode; of several processes each passes its own part.

    A method that remembers its training images (CRD) has no term for others and is left out, and so is the cross-entropy.

    Args:
        heed: called before each batch, by all processes equally often; it may raise to stop.
    """
    weights, cache = distiller.weights, distiller.cache
    methods = [method for method in distiller.methods if isinstance(method, Method)]
    left_out = {"ce", *(name for method in methods if method.knows_images for name in method.term_names())}
    wanted = {name: 0.0 if name in left_out else weight for name, weight in weights.items()}
    if not any(wanted.values()):
        return {}
    sums: dict[str, float] = {}
    like = next(distiller.student.parameters())
    device = like.device
    distiller.set_weights(wanted)
    distiller.cache = None  # it knows the training images alone
    try:
        with at_rest(distiller), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for batch in batches:
                heed()
                if not len(batch.y):
                    continue
                terms = distiller(replace(batch.to(device), x=batch.x.to(device, like.dtype))).terms
                found = {name: terms[name].item() for name, weight in wanted.items() if weight}
                for name, value in {**found, "#images": 1.0}.items():
                    sums[name] = sums.get(name, 0.0) + value * len(batch.y)
    finally:
        distiller.set_weights(weights)
        distiller.cache = cache
    parts = objects_of_all(sums)
    total = {name: sum(part.get(name, 0.0) for part in parts) for name in {name for part in parts for name in part}}
    images = total.pop("#images", 0.0)
    return {name: total[name] / images for name in wanted if name in total}
