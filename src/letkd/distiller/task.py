"""The loss terms of a step, checked: the cross-entropy over images with a label, or the user's own task, and those of the methods."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from letkd.batch import Batch
from letkd.errors import LetkdError
from letkd.methods.base import Method, View

Criterion = Callable[[Tensor, Tensor], Tensor]
Task = Callable[[Any, Batch], Mapping[str, Tensor]]


def class_terms(criterion: Criterion, logits: Tensor | None, batch: Batch) -> dict[str, Tensor]:
    """`ce`: the criterion over images with a label."""
    rows = [] if logits is None else [logits]
    return {"ce": batch.over_labels(lambda logits, y: _scalar(criterion(logits, y), "criterion"), *rows)}


def task_terms(task: Task, output: Any, batch: Batch, *, weights: Collection[str], taken: Collection[str]) -> dict[str, Tensor]:
    """The terms that a task returns for the student's output, checked.

    Args:
        weights: names of the terms that have a weight.
        taken: names of the methods' terms.
    """
    terms = task(output, batch)
    if not isinstance(terms, Mapping) or not terms:
        raise LetkdError(
            f"the task must return its loss terms by name, {{name: scalar}}, but it returned a {type(terms).__name__}"
        )
    if wrong := [name for name in weights if name not in taken and name not in terms]:
        raise LetkdError(f"there is a weight for {wrong[0]!r}, but the task returns {', '.join(map(repr, terms))}")
    if twice := [name for name in terms if name in taken]:
        raise LetkdError(f"the task and a method both have the term {twice[0]!r}, but only one would count; rename the task's")
    return {name: _scalar(term, "task") for name, term in terms.items()}


def method_terms(method: Method, view: View, *, learning: bool) -> dict[str, Tensor]:
    """The terms that a method returns: those of its `term_names()`, which have weights; unused ones may be missing.

    Args:
        learning: whether a term without a gradient is an error.
    """
    names, terms = method.term_names(), method.terms(view)
    if not isinstance(terms, Mapping):
        raise LetkdError(
            f"{method.name}: terms() must return loss terms by name, {{name: scalar}}, not a {type(terms).__name__}"
        )
    if wrong := [name for name in names if name not in terms and name not in view.unused] or terms.keys() - set(names):
        raise LetkdError(
            f"{method.name}: terms() returned {', '.join(map(repr, terms)) or 'no term'}, but term_names() names "
            f"{', '.join(map(repr, names))}, so the weight of {next(iter(wrong))!r} is unclear; use the same names in both"
        )
    found = {name: _scalar(term, f"method {method.name}") for name, term in terms.items()}
    constant = [name for name, term in found.items() if name not in view.unused and not term.requires_grad]
    if constant and learning and torch.is_grad_enabled():
        raise LetkdError(
            f"the term {constant[0]!r} has no gradient: the student's features that it reads are frozen or detached; choose another tap, "
            "or set its weight to 0 (with checkpointing, use_reentrant=False)"
        )
    return found


def _scalar(loss: Any, who: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.ndim:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise LetkdError(f"the {who} must return a scalar tensor, but it returned {got}; average it over the batch")
    return loss
