"""Health of the KD layers: which templates are used, how much knowledge the student keeps, how far p_S is from p_T."""

import torch
import torch.nn.functional as F
from torch import Tensor

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.inspect.sites import SiteView, at_rest, inspect_sites

PER_PIXEL = ("entropy_S", "entropy_T", "perplexity_T", "agreement")


def health(distiller: Distiller, batch: Batch) -> dict[str, dict[str, float]]:
    """Named values for every site of QUEST or letKD; empty for other methods. Runs in eval mode and changes no state.

    templates: K.
    used: templates that are the best match (argmax of p_S) of at least one pixel.
    scale_omega: the learnt scale of ω.
    entropy_S, entropy_T: of p_S and p_T in nats, mean over pixels; at most log K.
    perplexity_T: effective number of labels per pixel, mean over pixels of exp(entropy of p_T); at most K.
    agreement: share of pixels where p_S and p_T have the same argmax.

    For a KD layer with α > 0:

    matches: effective number of templates per pixel, mean over pixels of exp(entropy of p / Σ_k p_k); at most K, and 0
        at pixels that match none.
    dead: templates with p = 0 at every pixel.
    discarded: share of pixels with p = 0 for every template, so that x̂ = x.
    added: Σ_i α‖x'_i‖ / Σ_i ‖x_i‖.
    scale_nu: the learnt scale of ν.

    `entropy_T`, `perplexity_T` and `agreement` are omitted if the supervision is not fitted because no loss term needs it.
    """
    with at_rest(distiller):
        return {role: _values(view) for role, view in inspect_sites(distiller, batch).items()}


def _values(view: SiteView) -> dict[str, float]:
    K, pixels = view.omega.weight.shape[0], view.x.shape[0] * view.x.shape[2] * view.x.shape[3]
    sums: dict[str, float] = {}
    best = torch.zeros(K, dtype=torch.bool, device=view.x.device)
    alive = torch.zeros_like(best)
    for part in view.parts():
        a = part.a()
        log_p_S = torch.log_softmax(a.float(), dim=1)
        winner = a.argmax(dim=1)
        best[winner.flatten()] = True
        found = {"entropy_S": -(log_p_S.exp() * log_p_S).sum()}
        if part.supervision.is_fitted:
            p_T = part.p_T().float()
            entropy = -torch.xlogy(p_T, p_T).sum(dim=1)
            found |= {"entropy_T": entropy.sum(), "perplexity_T": entropy.exp().sum()}
            found["agreement"] = (p_T.argmax(dim=1) == winner).sum()
        if part.layer is not None and part.uses_knowledge:
            p = part.p(a)
            alive |= (p > 0).any(dim=3).any(dim=2).any(dim=0)
            share = F.normalize(p.float(), p=1, dim=1)
            found["matches"] = (-torch.xlogy(share, share).sum(dim=1)).exp()[p.any(dim=1)].sum()
            x_prime = part.layer.alpha * part.layer.nu(p)
            found |= {"discarded": (p == 0).all(dim=1).sum(), "x_prime": _length(x_prime), "x": _length(part.x)}
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    values = {"templates": float(K), "used": float(best.sum()), "scale_omega": float(view.omega.scale)}
    values |= {name: sums[name] / pixels for name in PER_PIXEL if name in sums}
    if view.layer is not None and view.uses_knowledge:
        values |= {"matches": sums["matches"] / pixels, "dead": float(K - alive.sum())}
        values |= {"discarded": sums["discarded"] / pixels}
        values |= {"added": sums["x_prime"] / max(sums["x"], 1e-12), "scale_nu": float(view.layer.nu.scale)}
    return values


def _length(x: Tensor) -> Tensor:
    return x.float().norm(dim=1).sum()
