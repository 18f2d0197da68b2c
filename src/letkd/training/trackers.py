"""Trackers for a run's metrics: TensorBoard, Weights & Biases, MLflow. `metrics.jsonl` always has the metrics as well.

A tracker gets the rows of `metrics.jsonl`. If a tracker fails, this is reported once, it gets no more rows, and the run continues.
"""

import importlib.util
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from letkd.errors import RecipeError, nearest
from letkd.files import read_plain, write_whole
from letkd.optional import need
from letkd.progress import say
from letkd.recipes.tables import as_toml, dotted, leaves
from letkd.runs.folder import RunFolder


class Tracker(Protocol):
    """Receives the rows of metrics.jsonl."""

    def row(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars per epoch in `tensorboard/`; what an earlier start wrote from epoch `first` on is purged."""

    package, extra = "tensorboard", "tensorboard"

    def __init__(self, run: RunFolder, id: str, first: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.tensorboard), purge_step=first if first > 1 else None)

    def row(self, row: Mapping[str, Any]) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["epoch"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run in Weights & Biases: offline in `wandb/` of the run folder unless WANDB_MODE is set; `wandb sync` uploads it."""

    package, extra = "wandb", "wandb"

    def __init__(self, run: RunFolder, id: str, first: int):
        wandb = need("wandb", "wandb", "--log wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "letkd"),
            name=run.path.name,
            id=id,
            resume="allow",
            dir=str(run.path),
            config=run.recipe.model_dump(mode="json", exclude_none=True),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
        )

    def row(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(row)), step=row["epoch"])

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run in MLflow, on the server that MLFLOW_TRACKING_URI names, in the experiment MLFLOW_EXPERIMENT_NAME (letkd if not set)."""

    package, extra = "mlflow", "mlflow"

    def __init__(self, run: RunFolder, id: str, first: int):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # a server that is down must not delay the training
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        mlflow = need("mlflow", "mlflow", "--log mlflow")
        self._entities, self._client = mlflow.entities, mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "letkd")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        existing = self._client.search_runs([experiment_id], f"tags.`letkd.run` = '{id}'", max_results=1)
        if existing:
            self._id = existing[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment_id, run_name=run.path.name, tags={"letkd.run": id}).info.run_id
        values = {
            _plain(dotted(path)): as_toml(value)[:500] for path, value in leaves(run.recipe.model_dump(exclude_none=True))
        }
        for chunk in _chunks(list(values.items()), 100):
            self._client.log_batch(self._id, params=[self._entities.Param(key, value) for key, value in chunk])

    def row(self, row: Mapping[str, Any]) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(_plain(name), float(value), now, row["epoch"]) for name, value in scalars(row)]
        for chunk in _chunks(metrics, 500):
            self._client.log_batch(self._id, metrics=chunk)

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED")


TRACKERS: dict[str, Callable[[RunFolder, str, int], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def parse_trackers(text: str | None) -> tuple[str, ...] | None:
    """The names in a comma-separated list; an unknown or missing tracker raises an error before any work."""
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in TRACKERS:
            raise RecipeError(f"--log {name!r}: unknown tracker; nearest: {nearest(name, TRACKERS)}")
        tracker: Any = TRACKERS[name]
        need(tracker.package, tracker.extra, f"--log {name}")
    return names


@contextmanager
def tracked(run: RunFolder, names: Sequence[str] | None, first: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Pass rows to trackers, each opened at the first row: importing them earlier would delay the first step.

    Args:
        names: of trackers; TensorBoard if omitted and installed.
        first: the first epoch of this start. A tracker that is new to the run also gets the rows of earlier epochs.
    """
    if names is None:
        names = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    opened: dict[str, Tracker | None] = {}

    def add(row: Mapping[str, Any]) -> None:
        for name in names:
            if name not in opened:
                opened[name] = None
                with _report_failure(name, opened):
                    opened[name] = _opened(name, run, first)
            tracker = opened[name]
            if tracker is not None:
                with _report_failure(name, opened):
                    tracker.row(row)

    try:
        yield add
    finally:
        for name, tracker in opened.items():
            if tracker is not None:
                with _report_failure(name, {}):
                    tracker.close()


def _opened(name: str, run: RunFolder, first: int) -> Tracker:
    ids: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError):
        ids = {
            str(key): str(value)
            for key, value in json.loads(read_plain(run.trackers)).items()
            if re.fullmatch("[0-9a-f]{32}", value)
        }
    new = not run.tensorboard.exists() if name == "tensorboard" else name not in ids
    if new and name != "tensorboard":
        ids[name] = uuid.uuid4().hex
        write_whole(run.trackers, json.dumps(ids, indent=1).encode())
    tracker = TRACKERS[name](run, ids.get(name, ""), first)
    for row in run.rows(before=first) if new else ():
        tracker.row(row)
    return tracker


@contextmanager
def _report_failure(name: str, opened: dict[str, Tracker | None]) -> Iterator[None]:
    """Report an error of a tracker once; it gets no more rows."""
    try:
        yield
    except Exception as error:  # trackers' errors share no base class, and none of them should end a run
        opened[name] = None
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        say(f"--log {name} failed ({why:.300}); it gets no more rows, the run continues, and its own log has all rows")


def _plain(name: str) -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w\-. /:]", "-", name)


def _chunks(values: list[Any], size: int) -> Iterator[list[Any]]:
    for k in range(0, len(values), size):
        yield values[k : k + size]


def scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a row; those in a nested table as `table/name`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "epoch":
            yield f"{prefix}{name}", value
