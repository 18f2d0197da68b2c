"""Paired differences between two rows, over the seeds that both have."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

LEVEL = 0.95
NOTE = (
    "Difference in test accuracy over the seeds that both rows have: mean [95 % interval] (number of seeds), by Student's t on the "
    "differences per seed; not corrected for multiple comparisons."
)


@dataclass(frozen=True)
class PairedDifference:
    """Mean difference over n seeds. `half` is half the width of its 95 % interval; None for one seed."""

    mean: float
    half: float | None
    n: int

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{_signed(self.low)}, {_signed(self.high)}]"
        return f"{_signed(self.mean)}{interval} ({self.n})"


def paired_difference(row: Mapping[int, float], reference: Mapping[int, float]) -> PairedDifference | None:
    """Row minus reference, by seed: d̄ ± t(0.975; n − 1) · s / √n, with s the sample standard deviation; None without a common seed."""
    differences = [row[seed] - reference[seed] for seed in row if seed in reference]
    n = len(differences)
    if n == 0:
        return None
    if n == 1:
        return PairedDifference(differences[0], None, 1)
    from scipy.special import stdtrit

    t = float(stdtrit(n - 1, (1 + LEVEL) / 2))
    return PairedDifference(statistics.mean(differences), t * statistics.stdev(differences) / math.sqrt(n), n)


def head(title: str) -> str:
    """Name of the column."""
    return f"Δ to {title}"


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}".replace("-", "−")  # + 0.0: no negative zero
