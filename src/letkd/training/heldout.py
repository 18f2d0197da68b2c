"""Evaluation without labels: the loss terms on images that were not used for training."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.distributed.processes import objects_of_all
from letkd.inspect.sites import at_rest
from letkd.methods.base import Method


def held_out_terms(
    distiller: Distiller, batches: Iterable[Batch], *, check_stop: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Mean of every distillation term over images, in eval mode; with several processes, each passes its own share.

    Omits the cross-entropy, methods that store their training images (CRD) and methods that compare two views (MLKD): they have no term
    for these images. Terms that warm up have their full weight. A batch too small for a method (SRD: one image) is left out.

    Args:
        check_stop: called before each batch, equally often in all processes; it may raise to stop.
    """
    weights, cache = distiller.weights, distiller.cache
    methods = [method for method in distiller.methods if isinstance(method, Method)]
    without = [method for method in methods if method.knows_images or method.two_views]
    omitted = {"ce", *(name for method in without for name in method.term_names())}
    least = max((method.least_images for method in methods if method not in without), default=1)
    wanted = {name: float(bool(weight) and name not in omitted) for name, weight in weights.items()}
    if not any(wanted.values()):
        return {}
    sums: dict[str, float] = {}
    like = next(distiller.student.parameters())
    device = like.device
    distiller.set_weights(wanted)
    distiller.cache = None  # it holds the training images only
    try:
        with at_rest(distiller), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for batch in batches:
                check_stop()
                if len(batch.y) < least:
                    continue
                terms = distiller(replace(batch.to(device), x=batch.x.to(device, like.dtype), epoch=None)).terms
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
