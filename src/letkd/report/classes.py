"""Accuracy per class, and the confusions that distillation fixed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from letkd.report.charts import Chart, Series
from letkd.runs.evaluation import Predictions


@dataclass(frozen=True)
class Confusion:
    """Number of images of class `true` predicted as `taken`, by the student without teacher and by the distilled one, mean over seeds."""

    true: str
    taken: str
    alone: float
    taught: float

    @property
    def fixed(self) -> float:
        return self.alone - self.taught


def confusion_matrix(predictions: Sequence[Predictions], C: int) -> Tensor:
    """Number of images of class i predicted as class j, `[C C]`, mean over the runs."""
    counts = torch.zeros(C, C, dtype=torch.float64)
    for one in predictions:
        counts += torch.bincount(one.labels * C + one.predicted, minlength=C * C).reshape(C, C)
    return counts / max(len(predictions), 1)


def per_class(matrix: Tensor) -> list[float | None]:
    """Accuracy per class in per cent; None for a class without images."""
    n = matrix.sum(dim=1)
    return [100 * float(matrix[c, c] / n[c]) if n[c] else None for c in range(len(matrix))]


def confusions(alone: Tensor, taught: Tensor, classes: Sequence[str]) -> list[Confusion]:
    """All confusions of either student, from the most improved to the most worsened."""
    found = [
        Confusion(classes[i], classes[j], float(alone[i, j]), float(taught[i, j]))
        for i in range(len(classes))
        for j in range(len(classes))
        if i != j and (alone[i, j] > 0 or taught[i, j] > 0)
    ]
    return sorted(found, key=lambda one: -one.fixed)


def class_chart(
    pair: str, matrices: dict[str, Tensor], classes: Sequence[str], colours: Mapping[str, int], *, most: int = 24
) -> Chart:
    """Accuracy per class, one point per method; if there are many classes, those on which the methods differ most."""
    columns = {title: per_class(matrix) for title, matrix in matrices.items()}
    ranges = []
    for c in range(len(classes)):
        known = [value for column in columns.values() if (value := column[c]) is not None]
        ranges.append(max(known) - min(known) if known else 0.0)
    shown = sorted(sorted(range(len(classes)), key=lambda c: -ranges[c])[:most])
    series = [Series(title, [column[c] for c in shown], colours[title]) for title, column in columns.items()]
    note = f"The {most} of {len(classes)} classes on which the methods differ most." if len(classes) > most else ""
    names = [classes[c] for c in shown]
    return Chart("classes", "Accuracy by class", "class", "test accuracy, %", names, series, kind="dots", note=note, group=pair)
