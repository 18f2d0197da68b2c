"""What is fitted offline over a stream of the teacher's features: the base of all supervisions, CRD's banks and TDD's tree."""

from collections.abc import Iterable
from typing import ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from letkd.errors import FitError, NonFiniteError, NotFittedError


class Fitted(nn.Module):
    """A part of a method that is fitted to the teacher before training. Sees maps and labels, never a model.

    `partial_fit` takes the teacher's maps batch by batch in bounded memory and `finish` turns what was gathered into the buffers that
    `fitted_buffers` names, each with a trailing underscore; `fit` does both. The buffers move, save and load with everything else.
    What needs them before they are there raises `NotFittedError`.
    """

    _at: Tensor
    kind: ClassVar[str]
    fitted_buffers: ClassVar[tuple[str, ...]] = ()
    needs_labels: ClassVar[bool] = False  # whether it is fitted to images with a label alone

    def __init__(self):
        super().__init__()
        self.where = "its site"
        self.pixels: int | None = None  # of all training images at the site, if their number is known
        self.report_: dict[str, float] = {}
        self.register_buffer("_at", torch.empty(0), persistent=False)  # on the device where fitted buffers belong
        for name in self.fitted_buffers:
            self.register_buffer(name, None)

    def bind(self, where: str, *, d: int, C: int) -> None:
        """Take the name of the site (for messages), the channels of the teacher's map there and the number of classes."""
        self.where = where

    def settings(self) -> dict[str, object]:
        """What, besides teacher, tap and data, the fitted buffers depend on: part of an artefact's fingerprint."""
        return {}

    @property
    def is_fitted(self) -> bool:
        return all(getattr(self, name) is not None for name in self.fitted_buffers)

    def fit(self, stream: Iterable[tuple]) -> Self:
        """Fit to `(f_T [b d h w], y [b])` or `(f_T, y, index [b])` tuples, from scratch."""
        self.reset()
        for f_T, y, *index in stream:
            self.partial_fit(f_T, y, *index)
        self.finish()
        return self

    def reset(self) -> None:
        """Forget what was gathered and fitted before."""
        for name in self.fitted_buffers:
            setattr(self, name, None)

    def partial_fit(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"], index: Int[Tensor, "b"] | None = None) -> None:
        """Gather one batch. `index` names the images in the data set: with it the order of the stream does not matter."""

    def gather(self) -> None:
        """Of several processes that each saw a part of the stream: bring together what they gathered, before `finish`."""

    def finish(self) -> None:
        """Turn what was gathered into the fitted buffers."""

    def _check_map(self, f_T: Tensor) -> None:
        if not torch.isfinite(f_T).all():
            raise NonFiniteError(
                f"the teacher's map at {self.where!r} holds NaN or infinity; nothing was fitted. Check the teacher's weights "
                "and the normalisation of its input"
            )

    def _check_fitted(self) -> None:
        if not self.is_fitted:
            raise NotFittedError(
                f"{self} at {self.where!r} has no {self.fitted_buffers[0]} yet. Run `letkd fit`, or call distiller.fit(loader)"
            )

    def _check_channels(self, f_T: Tensor, d: int) -> None:
        if f_T.shape[1] != d:
            raise FitError(
                f"{self} at {self.where!r} was fitted to maps of {d} channels and now gets {f_T.shape[1]}: fit it to this teacher"
            )

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        # Shapes of fitted buffers are known only once fitted, so loading creates them.
        for name in self.fitted_buffers:
            value = state_dict.get(prefix + name)
            if value is not None:
                setattr(self, name, torch.empty_like(value, device=self._at.device))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"
