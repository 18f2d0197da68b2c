"""The base class of everything that is fitted offline to the teacher's features: supervisions, CRD's banks and TDD's trees."""

from collections.abc import Iterable
from typing import ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from letkd.errors import FitError, NonFiniteError, NotFittedError


class Fitted(nn.Module):
    """A part of a method that is fitted to the teacher before training. It gets maps and labels, never a model.

    `partial_fit` takes the teacher's maps batch by batch, in bounded memory; `finish` computes the buffers that `fitted_buffers` names,
    each with a trailing underscore; `fit` does both. The buffers are part of the module's state. Using them before the fit raises
    `NotFittedError`.

    Examples:
        >>> class MeanMap(Fitted):
        ...     kind, fitted_buffers = "mean", ("mean_",)
        ...
        ...     def partial_fit(self, f_T, y, index=None):
        ...         self.sum, self.n = getattr(self, "sum", 0) + f_T.sum(dim=(0, 2, 3)), getattr(self, "n", 0) + f_T[:, 0].numel()
        ...
        ...     def finish(self):
        ...         self.mean_ = self.sum / self.n
        >>> MeanMap().fit([(torch.ones(2, 3, 4, 4), torch.tensor([0, 1]))]).mean_
        tensor([1., 1., 1.])
    """

    _at: Tensor
    kind: ClassVar[str]
    fitted_buffers: ClassVar[tuple[str, ...]] = ()
    needs_labels: ClassVar[bool] = False  # whether only images with a label are used for the fit

    def __init__(self):
        super().__init__()
        self.where = "its site"
        self.pixels: int | None = None  # number of pixels of all training images at the site, if known
        self.report_: dict[str, float] = {}
        self.register_buffer("_at", torch.empty(0), persistent=False)  # its device is the device of the fitted buffers
        for name in self.fitted_buffers:
            self.register_buffer(name, None)

    def bind(self, where: str, *, d: int, C: int) -> None:
        """Set the name of the site (for messages), the channels of the teacher's map and the number of classes."""
        self.where = where

    def settings(self) -> dict[str, object]:
        """What the fitted buffers depend on in addition to teacher, tap and data: part of an artefact's fingerprint."""
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
        """Discard everything that was collected or fitted."""
        for name in self.fitted_buffers:
            setattr(self, name, None)

    def partial_fit(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"], index: Int[Tensor, "b"] | None = None) -> None:
        """Collect one batch. `index`: the images' numbers in the data set; with it the order of the stream does not matter."""

    def gather(self) -> None:
        """Combine what several processes collected, each from its part of the stream; called before `finish`."""

    def finish(self) -> None:
        """Compute the fitted buffers from what was collected."""

    def _check_map(self, f_T: Tensor) -> None:
        if not torch.isfinite(f_T).all():
            raise NonFiniteError(
                f"the teacher's map at {self.where!r} contains NaN or infinity; nothing was fitted. Check the teacher's weights "
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
                f"{self} at {self.where!r} was fitted to maps of {d} channels but gets {f_T.shape[1]}; fit it to this teacher"
            )

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        # The shapes of fitted buffers are known only after a fit, so loading creates the buffers.
        for name in self.fitted_buffers:
            value = state_dict.get(prefix + name)
            if value is not None:
                setattr(self, name, torch.empty_like(value, device=self._at.device))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"
