"""λ of the loss terms: numbers, or from the gradients of the first steps."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from letkd.distributed.processes import sum_of_all
from letkd.errors import LetkdError, nearest
from letkd.limits import parse_weight, share_of

Weight = float | str
STEPS = 100  # with measurements, if the length of training is not known
RECENT = 0.1  # share of a step in the averages, once as many steps are measured
SCALE = 2.0**12  # of the terms while gradients are measured, so that they do not underflow in half precision


def check_weights(
    weights: Mapping[str, Weight], names: Sequence[str], *, own: Sequence[str], warmup: Mapping[str, int]
) -> dict[str, Any]:
    """The weight of every term, 1 if not named.

    Args:
        names: of all terms.
        own: those of the student's own loss.
        warmup: epochs in which a term rises, by name.
    """
    if unknown := [f"{name!r} (nearest: {nearest(name, names)})" for name in weights if name not in names]:
        raise LetkdError(f"there is a weight for {', '.join(unknown)}, but the terms are {', '.join(names)}")
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise LetkdError(f"two methods have the term {twice[0]!r}, but only one of them would count; remove one method")
    found = {name: weights.get(name, 1.0) for name in names}
    try:
        found = {name: parse_weight(weight) for name, weight in found.items()}
    except ValueError as error:
        raise LetkdError(f"weights {dict(weights)!r:.200}: {error}") from None
    auto = [name for name, weight in found.items() if isinstance(weight, str)]
    if wrong := [name for name in auto if name in own]:
        raise LetkdError(f"the weight of {wrong[0]!r} is {found[wrong[0]]!r}, but others are shares of it; give a number")
    if rising := [name for name in auto if warmup.get(name)]:
        raise LetkdError(
            f"the weight of {rising[0]!r} is {found[rising[0]]!r}, which is measured in the first steps, but the term rises over "
            f"{warmup[rising[0]]} epochs; set its method's warmup to 0, or give a number"
        )
    if auto and own and not any(found[name] for name in own):
        raise LetkdError(
            f"the weight of {auto[0]!r} is {found[auto[0]]!r}, a share of the gradient of {own[0]!r}, whose weight is 0; give a number"
        )
    return found


def nothing_to_learn(terms: Iterable[str]) -> LetkdError:
    return LetkdError(f"all terms ({', '.join(terms)}) have weight 0, so there is nothing to learn; set a weight")


class AutoWeights(nn.Module):
    """Weights that make a term's gradient a share of that of the student's own loss.

        λ = share · ‖∂L/∂f‖ / ‖∂L_KD/∂f‖

    L is the student's own weighted loss (cross-entropy), L_KD a term without its weight, f the student's features that the term reads
    (`Method.measured_at`): those of a tap, or the logits. The squared norms are measured in the first `steps` training steps and
    averaged, recent steps more; λ follows them and is constant afterwards. The averages are buffers, so that a checkpoint contains them.
    All processes have the same λ, and no step waits for the device.

    Args:
        places: the roles of f by term.
    """

    squares: Tensor
    measured: Tensor

    def __init__(self, places: Mapping[str, Sequence[str]]):
        super().__init__()
        self.places = dict(places)
        self.steps = STEPS
        self.register_buffer("squares", torch.zeros(2, len(self.places)))  # of ∂L/∂f and ∂L_KD/∂f
        self.register_buffer("measured", torch.zeros((), dtype=torch.int64))
        self._measured: int | None = 0  # the buffer's value, without waiting for the device; None if not known

    @classmethod
    def of(cls, weights: Mapping[str, Weight], places: Mapping[str, Sequence[str]], made: Self | None) -> Self | None:
        """Those for the automatic weights among `weights`; if some were `made` before, these.

        Args:
            places: as for the class, for all terms of methods.
        """
        auto = [name for name, weight in weights.items() if isinstance(weight, str)]
        if made is not None and (new := [name for name in auto if name not in made.places]):
            raise LetkdError(
                f"the weight of {new[0]!r} became automatic after the Distiller was made; make it with that weight"
            )
        return cls({name: places[name] for name in auto}) if auto and made is None else made

    @property
    def done(self) -> bool:
        """Whether the weights are constant from now on."""
        if self._measured is None:
            self._measured = int(self.measured)
        return self._measured >= self.steps

    def values(self) -> dict[str, Tensor]:
        """λ for a share of 1, by term; 1 for a term without a measurement."""
        L, L_KD = self.squares
        ratio = torch.where((L > 0) & (L_KD > 0), (L / L_KD).sqrt(), 1.0)
        return dict(zip(self.places, ratio.unbind(), strict=True))

    def as_numbers(self, weights: Mapping[str, Weight]) -> dict[str, float]:
        """The automatic ones among the weights; waits for the device."""
        values = self.values()
        return {
            name: share * values[name].item() for name, weight in weights.items() if (share := share_of(weight)) is not None
        }

    def weigh(
        self,
        weights: Mapping[str, Weight],
        own: Mapping[str, Tensor],
        terms: Mapping[str, Tensor],
        features: Mapping[str, Tensor],
        *,
        checks: bool,
    ) -> dict[str, Any]:
        """The weights with the automatic ones filled in; in training mode they are measured first.

        Args:
            own: terms of the student's own loss.
            terms: all terms.
            features: the student's, by role.
            checks: as for `measure`.
        """
        shares = {name: share for name, weight in weights.items() if (share := share_of(weight)) is not None}
        if shares and self.training and torch.is_grad_enabled() and not self.done:
            loss = torch.stack([float(weights.get(name, 1.0)) * term for name, term in own.items()]).sum()
            self.measure(loss, terms, features, checks=checks)
        values = self.values() if shares else {}
        return {name: float(weight) for name, weight in weights.items() if name not in shares} | {
            name: share * values[name] for name, share in shares.items()
        }

    def measure(self, own: Tensor, terms: Mapping[str, Tensor], features: Mapping[str, Tensor], *, checks: bool) -> None:
        """Take in one step.

        Args:
            own: the student's own loss.
            terms: by name. One that has a place but weight 0 is not among them, and its measurements stay.
            features: the student's, by role.
            checks: raise an error if a term has no gradient where the own loss has one; this waits for the device.
        """
        none = own.new_zeros(2, dtype=torch.float32)
        found = [self._squares(name, own, terms[name], features) if name in terms else none for name in self.places]
        now = torch.stack(found, dim=1)
        if self.squares.device != now.device:  # the student was moved after the first weights were set
            self.to(now.device)
        now = sum_of_all(now.to(self.squares.dtype))
        if checks:
            for name, (own_square, square) in zip(self.places, now.T.tolist(), strict=True):
                if square == 0 and own_square > 0 and name in terms:
                    raise self._no_gradient(name)
        done = self._measured or 0
        moved = self.squares.lerp(now, max(RECENT, 1 / (done + 1)))
        # A batch without labels has no gradient of L, or of a term that needs labels, and is skipped.
        self.squares.copy_(torch.where((now > 0).all(dim=0) & torch.isfinite(now).all(dim=0), moved, self.squares))
        self._measured = done + 1
        self.measured.fill_(self._measured)

    def _squares(self, name: str, own: Tensor, term: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """Squared norms of both gradients at the places of a term."""
        roles = [role for role in self.places[name] if role in features and features[role].requires_grad]
        if not roles or not own.requires_grad or not term.requires_grad:
            raise self._no_gradient(name)
        # Gradients of a map that was made of tokens are those of its tokens: the network goes on from these.
        read = getattr(features, "read", {})
        f = [read[role][0] if role in read else features[role] for role in roles]
        pairs = [torch.autograd.grad(SCALE * loss, f, retain_graph=True, allow_unused=True) for loss in (own, term)]
        common = [
            tuple(read[role][1].to_map(g) if role in read else g for g in both)
            for role, *both in zip(roles, *pairs, strict=True)
            if all(g is not None for g in both)
        ]
        if not common:
            raise self._no_gradient(name)
        return torch.stack([_square(side) for side in zip(*common, strict=True)])

    def _no_gradient(self, name: str) -> LetkdError:
        return LetkdError(
            f'the weight of {name!r} is "auto", but at {", ".join(self.places[name])} of the student this term or the student\'s own loss '
            "has no gradient; give a number"
        )

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._measured = None


def _square(gradients: Sequence[Tensor]) -> Tensor:
    """Squared norm of several tensors together, in single precision at least."""
    return torch.stack([g.to(torch.promote_types(g.dtype, torch.float32)).square().sum() for g in gradients]).sum()
