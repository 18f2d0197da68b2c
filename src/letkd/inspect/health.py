"""How the KD layers are: which templates live, what the student keeps of the teacher's knowledge, how far p_S is from p_T."""

import torch
from torch import Tensor

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.inspect.sites import Seen, at_rest, look


def health(distiller: Distiller, batch: Batch) -> dict[str, dict[str, float]]:
    """Named values for every site of QUEST or letKD; nothing for other methods. In eval mode, leaving no trace.

    templates: K.
    used: templates that are the best match (argmax of p_S) of some pixel.
    scale_omega: the learnt scale of ω.
    entropy_S, entropy_T: of p_S and p_T in nats, mean over pixels; at most log K.
    agreement: share of pixels where p_S and p_T have the same argmax.

    Where a KD layer with α > 0 uses them:

    dead: templates with p = 0 at every pixel.
    discarded: share of pixels with p = 0 for every template, so that x̂ = x.
    added: Σ_i α‖x'_i‖ / Σ_i ‖x_i‖.
    scale_nu: the learnt scale of ν.

    `entropy_T` and `agreement` are left out where the supervision is not fitted, as none is that no loss term needs.
    """
    with at_rest(distiller):
        return {role: _of(seen) for role, seen in look(distiller, batch).items()}


def _of(seen: Seen) -> dict[str, float]:
    K, pixels = seen.omega.weight.shape[0], seen.x.shape[0] * seen.x.shape[2] * seen.x.shape[3]
    sums: dict[str, float] = {}
    best = torch.zeros(K, dtype=torch.bool, device=seen.x.device)
    alive = torch.zeros_like(best)
    for part in seen.parts():
        a = part.a()
        log_p_S = torch.log_softmax(a.float(), dim=1)
        winner = a.argmax(dim=1)
        best[winner.flatten()] = True
        found = {"entropy_S": -(log_p_S.exp() * log_p_S).sum()}
        if part.supervision.is_fitted:
            p_T = part.p_T().float()
            found |= {"entropy_T": -torch.xlogy(p_T, p_T).sum(), "agreement": (p_T.argmax(dim=1) == winner).sum()}
        if part.layer is not None and part.uses_knowledge:
            p = part.p(a)
            alive |= (p > 0).any(dim=3).any(dim=2).any(dim=0)
            x_prime = part.layer.alpha * part.layer.nu(p)
            found |= {"discarded": (p == 0).all(dim=1).sum(), "x_prime": _length(x_prime), "x": _length(part.x)}
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    values = {"templates": float(K), "used": float(best.sum()), "scale_omega": float(seen.omega.scale)}
    values |= {name: sums[name] / pixels for name in ("entropy_S", "entropy_T", "agreement") if name in sums}
    if seen.layer is not None and seen.uses_knowledge:
        values |= {"dead": float(K - alive.sum()), "discarded": sums["discarded"] / pixels}
        values |= {"added": sums["x_prime"] / max(sums["x"], 1e-12), "scale_nu": float(seen.layer.nu.scale)}
    return values


def _length(x: Tensor) -> Tensor:
    return x.float().norm(dim=1).sum()
