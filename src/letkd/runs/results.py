"""Results as rows of a table: mean ± std over seeds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from letkd.runs.records import Result

FAILED = "failed"  # how the note of a failed row begins


@dataclass(frozen=True)
class Row:
    """One method and its finished runs, and a note if runs are missing.

    Args:
        name: name of the method or of the user's row.
        seeds: of the results, in their order.
    """

    title: str
    results: Sequence[Result]
    note: str = ""
    name: str = ""
    seeds: Sequence[int] = ()

    @property
    def failed(self) -> bool:
        """Whether an error ended the row; a method that does not support the pair did not fail."""
        return self.note.startswith(FAILED)

    def by_seed(self) -> dict[int, float]:
        """Test accuracy of the last epoch by seed."""
        found = zip(self.seeds, self.results, strict=False)
        return {seed: result.last_test for seed, result in found if result.last_test is not None}


def mean_std(values: Sequence[float | None]) -> str:
    """`mean ± std` (sample std, n − 1) with two decimals; a single value without std; a dash without values."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    if len(known) == 1:
        return f"{known[0]:.2f}"
    return f"{statistics.mean(known):.2f} ± {statistics.stdev(known):.2f}"
