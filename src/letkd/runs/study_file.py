"""The trials of a search in study.json, which reports read."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from letkd.errors import RunError
from letkd.files import read_plain, write_whole
from letkd.runs.records import Percent

STUDY, TRIALS = "study.json", "trials"
FORMAT = "letkd-study-1"
SHOWN = 20  # rows of the table

Text = Annotated[str, Field(max_length=10_000)]
Value = float | int | str


@dataclass(frozen=True)
class Record:
    """One ended trial: `state` as in Optuna; `value` is the validation accuracy of the last epoch if the trial completed."""

    number: int
    state: Text
    params: dict[Text, Value]
    value: Percent | None
    epochs: int
    last: Percent | None
    note: Text = ""

    @classmethod
    def of(cls, trial: Any) -> "Record":
        steps = trial.intermediate_values
        ended = trial.value if trial.state.name == "COMPLETE" else None
        last = steps[max(steps)] if steps else None
        note = str(trial.user_attrs.get("note", ""))
        return cls(trial.number, trial.state.name, dict(trial.params), ended, max(steps, default=0), last, note)


@dataclass(frozen=True)
class Study:
    """A search as a report reads it.

    Args:
        over: what varied, as the user wrote it.
        log: keys with a logarithmic range.
        best: number of the best trial.
        importance: share of each key in the variation of the accuracy, if there are enough trials.
    """

    name: Text
    over: list[Text]
    log: list[Text]
    trials: list[Record]
    best: int
    importance: dict[Text, float]
    format: Text = FORMAT


def is_trial(run: Path) -> bool:
    """Whether a run folder is a trial of a search; trials have no test result and do not appear in tables."""
    return run.parent.name == TRIALS and ((run.parent.parent / STUDY).is_file() or lock_of(run).is_file())


def lock_of(trial: Path) -> Path:
    """The file that a process locks while it works on a trial."""
    return trial.with_name(f".{trial.name}.lock")


def write_study(out: Path, study: Study) -> None:
    write_whole(out / STUDY, json.dumps(asdict(study), indent=1).encode())


def read_study(folder: Path) -> Study:
    """Read and check what `write_study` wrote."""
    path = folder / STUDY
    try:
        study = TypeAdapter(Study).validate_json(read_plain(path))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged ({str(error).splitlines()[0]}); run the search again to write it again") from None
    if study.format != FORMAT or not study.trials:
        raise RunError(f"{path} is damaged or was written by another version of letkd; run the search again to write it again")
    return study


def ranked(records: Sequence[Record]) -> list[Record]:
    """The best first, then pruned trials by their number of epochs, then failed ones."""
    return sorted(records, key=lambda r: (r.value is None, -(r.value or 0.0), -r.epochs, -(r.last or 0.0), r.number))


def rows_of(keys: Sequence[str], records: Sequence[Record], best: int) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of trials."""
    head = ["trial", *keys, "validation %, last epoch", "epochs", "state"]
    rows = []
    for record in ranked(records)[:SHOWN]:
        values = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in map(record.params.get, keys)]
        accuracy = "–" if record.last is None else f"{record.last:.2f}"
        state = "best" if record.number == best else record.state.lower() + (f": {record.note}" if record.note else "")
        rows.append([str(record.number), *values, accuracy, str(record.epochs), state])
    return head, rows
