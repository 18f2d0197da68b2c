"""A search: trials on the validation split, shared by any number of processes, then the winner on the test split.

Trials are run folders under `out/trials`. A process locks a file for the trial it works on. If the study lists a trial as running but
its lock is free, its process has ended; another process then resumes it from its last checkpoint. So all processes must share `out`.
"""

import json
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import tomli_w

from letkd.errors import InUseError, LetkdError, NonFiniteError, RecipeError, RunError, Stopped
from letkd.files import hold, write_whole
from letkd.progress import say
from letkd.recipes import Recipe
from letkd.runs.folder import RunFolder
from letkd.runs.grid import Cell, Grid, as_markdown
from letkd.runs.records import Result
from letkd.runs.results import mean_std
from letkd.runs.study_file import SHOWN, TRIALS, Record, Study, lock_of, rows_of, write_study
from letkd.search.space import Range, check_keys
from letkd.search.storage import SearchError, need_optuna, open_storage, storage_errors
from letkd.training.launchers import Launcher

REDUCTION = 3  # successive halving keeps the best third at each rung
POLL = 1.0  # seconds between checks of the other processes


class _AllEpochsDone(Exception):
    """The last epoch is done, with this validation accuracy. Ends the run before the test split is read."""


class _Pruned(Exception):
    """Successive halving ends the trial."""


@dataclass(frozen=True)
class Search:
    """Definition of a search.

    Args:
        make: returns the recipe for additional `key=value` settings; can be pickled.
        ranges: the search space.
        trials: total number of trials, over all processes.
        out: folder of the trials, shared by all processes.
        storage: URL of a database, or path of a journal file.
        name: of the study in the storage.
        seed: of the sampler. The random draws of trial k depend only on seed and k.
        sampler: `tpe` or `random`.
        pruner: `halving` or `none`.
        save_minutes, log: as for `train`.
    """

    make: Callable[[list[str]], Recipe]
    ranges: tuple[Range, ...]
    trials: int
    out: Path
    storage: str
    name: str
    seed: int = 0
    sampler: str = "tpe"
    pruner: str = "halving"
    save_minutes: float = 15.0
    log: tuple[str, ...] | None = None

    def recipe(self, params: dict[str, Any]) -> Recipe:
        return self.make([range_.setting(params[range_.key]) for range_ in self.ranges])

    @property
    def supervision(self) -> Path:
        return RunFolder(self.out).supervision

    def folder(self, number: int) -> Path:
        return self.out / TRIALS / f"trial-{number:04}"

    def final(self, number: int) -> Path:
        """Folder for the seeds of the best trial; with more trials, another trial may be the best."""
        return self.out / "final" / f"trial-{number:04}"

    def lock(self, number: int) -> Path:
        return lock_of(self.folder(number))

    def definition(self) -> str:
        """Everything that the trials of a study must share, as text."""
        table = self.make([]).model_dump(mode="json", exclude_none=True)
        table["data"].pop("root", None)
        table.get("teacher", {}).pop("weights", None)
        if (weights := table["student"].get("weights")) is not None and Path(weights).is_file():
            table["student"]["weights"] = sha256(Path(weights).read_bytes()).hexdigest()
        given = {"over": sorted(map(str, self.ranges)), "seed": self.seed, "sampler": self.sampler, "pruner": self.pruner}
        return json.dumps({"recipe": table, **given}, sort_keys=True)

    def check(self) -> None:
        """Raise an error for wrong keys and values before anything is written."""
        from letkd.training.build import build_distiller, read_data
        from letkd.training.inputs import inputs_of

        base = self.make([])
        if base.train.time is not None:
            raise RecipeError("train.time is planned by `letkd train --time` alone; set train.epochs for a search")
        check_keys(self.ranges, base)
        for range_ in self.ranges:
            for value in range_.ends():
                try:
                    self.make([range_.setting(value)])
                except RecipeError as error:
                    raise RecipeError(f"--over {range_}: {error}") from None
        data = read_data(base)
        if not data.has_labels:
            raise SearchError(f"a search selects by accuracy on the validation split, but {data.name} has no labels")
        if not len(data.val):
            raise SearchError(
                f"a search selects on the validation split, but {data.name} has none here; hold out images with --set data.val=0.1"
            )
        try:
            distiller = build_distiller(self.recipe({range_.key: range_.ends()[0] for range_ in self.ranges}), data)
        except RecipeError as error:
            raise RecipeError(f"--over {', '.join(map(str, self.ranges))}: {error}") from None
        self._check_inputs(inputs_of(distiller, data))

    def _check_inputs(self, now: dict[str, str]) -> None:
        """Raise an error if trials of the study had another teacher or other images, unless the search varies them."""
        from letkd.training.inputs import read_inputs

        varied = {range_.key.partition(".")[0] for range_ in self.ranges}
        names = [name for name in now if ("teacher" if name == "teacher" else "data") not in varied]
        for folder in RunFolder.children(self.out / TRIALS):
            before = read_inputs(RunFolder(folder)) or {}
            if changed := [name for name in names if before.get(name, now[name]) != now[name]]:
                raise SearchError(
                    f"{folder} had other inputs ({', '.join(changed)}), so its accuracy cannot be compared; restore them, or choose "
                    "another --out"
                )


@dataclass(frozen=True)
class TrialTask:
    """Runs one trial of a search in a launcher: an abandoned one or the next one."""

    search: Search
    number: int

    @property
    def label(self) -> str:
        return f"{self.search.out}, trial {self.number + 1} of {self.search.trials}"

    def __call__(self) -> None:
        with _claim_trial(self.search) as claim:
            if claim is not None:
                _run(self.search, *claim)


def run_search(search: Search, launcher: Launcher | None = None) -> None:
    """Run trials until the study has `search.trials` of them; returns when all have ended, in this or in other processes."""
    study = _open(search)
    while unfinished := _count_unfinished(study, search):
        if launcher is not None:
            for k, outcome in launcher.run([TrialTask(search, search.trials - unfinished + k) for k in range(unfinished)]):
                if outcome.state != "done":
                    raise SearchError(f"trial {search.trials - unfinished + k}: {outcome.sentence}")
            if _count_unfinished(study, search) == unfinished:
                time.sleep(POLL)  # other processes run the remaining trials
            continue
        with _claim_trial(search) as claim:
            if claim is not None:
                _run(search, *claim)
                continue
        time.sleep(POLL)
    if (search.sampler, search.pruner) != ("random", "none") and _ran_in_parallel(study, search):
        say(
            "trials ran in parallel: TPE's proposals and halving depend on which trials have finished by then, so another run of this "
            "search may find another best trial; with --sampler random --pruner none it does not"
        )


def _ran_in_parallel(study: Any, search: Search) -> bool:
    """Whether a trial started before an earlier one ended."""
    with storage_errors(search.storage):
        trials = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    ends = [trial.datetime_complete for trial in trials]
    return any(trial.datetime_start < max(ends[:k]) for k, trial in enumerate(trials) if k)


def _count_unfinished(study: Any, search: Search) -> int:
    """Number of trials that have not ended, including those not yet started."""
    with storage_errors(search.storage):
        return max(search.trials - sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False)), 0)


def _open(search: Search) -> Any:
    """Open or create the study; an existing study must belong to the same search."""
    optuna = need_optuna()
    search.out.mkdir(parents=True, exist_ok=True)
    epochs = search.make([]).train.epochs
    halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=max(1, epochs // REDUCTION**2), reduction_factor=REDUCTION)
    with _wait_for_lock(search.out / ".study.lock"), storage_errors(search.storage):
        study = optuna.create_study(
            storage=open_storage(search.storage),
            study_name=search.name,
            direction="maximize",
            load_if_exists=True,
            pruner=halving if search.pruner == "halving" else optuna.pruners.NopPruner(),
        )
        definition = study.user_attrs.get("letkd")
        if definition is None:
            study.set_user_attr("letkd", search.definition())
        elif definition != search.definition():
            raise SearchError(
                f"the study {search.name!r} belongs to another search: its {_difference(definition, search.definition())} differs; choose "
                "another --study name and --out folder"
            )
    return study


def _difference(existing: str, requested: str) -> str:
    a, b = json.loads(existing), json.loads(requested)
    keys = [key for key in b if a.get(key) != b[key]]
    return " and ".join("--over" if key == "over" else str(key) for key in keys) or "definition"


Claim = tuple[Any, Any]  # the study and a trial of it


@contextmanager
def _claim_trial(search: Search) -> Iterator[Claim | None]:
    """Claim a trial for this process: an abandoned one or the next one; None if none is available now."""
    optuna = need_optuna()
    study = _open(search)
    with ExitStack() as locks:
        claim: Claim | None = None
        with _wait_for_lock(search.out / ".study.lock"), storage_errors(search.storage):
            trials = study.get_trials(deepcopy=False)
            for trial in trials:
                if trial.state == optuna.trial.TrialState.RUNNING and _try_lock(search.lock(trial.number), locks):
                    say(f"trial {trial.number}: its process ended; resumed")
                    claim = study, optuna.trial.Trial(study, trial._trial_id)
                    break
            if claim is None and len(trials) < search.trials and _try_lock(search.lock(len(trials)), locks):
                study.sampler = _sampler(optuna, search, len(trials))
                trial = study.ask({range_.key: range_.distribution(optuna) for range_ in search.ranges})
                claim = study, trial
        yield claim


def _sampler(optuna: Any, search: Search, number: int) -> Any:
    """Seeded by search and trial, so that a draw does not depend on earlier draws of the process."""
    seed = random.Random(f"{search.seed} {number}").randrange(2**31)
    return optuna.samplers.RandomSampler(seed) if search.sampler == "random" else optuna.samplers.TPESampler(seed=seed)


def _try_lock(lock: Path, locks: ExitStack) -> bool:
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        locks.enter_context(hold(lock))
    except InUseError:
        return False
    return True


@contextmanager
def _wait_for_lock(lock: Path) -> Iterator[None]:
    """Hold a lock; waits until it is free."""
    with ExitStack() as locks:
        while not _try_lock(lock, locks):
            time.sleep(0.05)
        yield


def _run(search: Search, study: Any, trial: Any) -> None:
    """Train the trial's recipe, epoch by epoch, until it ends or is pruned."""
    optuna = need_optuna()
    from letkd.training.loop import train

    states = optuna.trial.TrialState
    folder = search.folder(trial.number)
    with storage_errors(search.storage):
        done = set(study.get_trials(deepcopy=False)[trial.number].intermediate_values)
    shown = ", ".join(f"{key} {_short(value)}" for key, value in trial.params.items())

    def watch(row: dict[str, Any]) -> None:
        if row["epoch"] not in done and row["val_top1"] is not None:  # see train.validate_every
            done.add(row["epoch"])
            with storage_errors(search.storage):
                trial.report(row["val_top1"], step=row["epoch"])
        if row["epoch"] >= epochs:
            raise _AllEpochsDone(row["val_top1"])
        with storage_errors(search.storage):
            prune = trial.should_prune()
        if prune:
            raise _Pruned

    value, state, note, epochs = None, states.COMPLETE, "", 0
    try:
        recipe = search.recipe(trial.params)
        run = RunFolder(folder, recipe)
        epochs = run.epochs
        say(f"trial {trial.number} of {search.trials}: {shown}")
        for row in run.rows() if run.exists else ():
            watch(row)
        options = {"save_minutes": search.save_minutes, "log": search.log}
        train(recipe, folder, supervision=search.supervision, watch=watch, **options)
    except _AllEpochsDone as end:
        value = end.args[0]
    except _Pruned:
        state = states.PRUNED
    except NonFiniteError as error:
        state, note = states.PRUNED, f"diverged: {error}"
    except (Stopped, SearchError, RunError):  # not due to its values: the trial stays open, to be resumed
        raise
    except LetkdError as error:
        state, note = states.FAIL, str(error)
    except OSError:  # such as a full disk
        raise
    except Exception as error:  # such as too little memory for its batch size, or an error in a method of one's own
        state, note = states.FAIL, f"{type(error).__name__}: {error}"
    with storage_errors(search.storage):
        if note:
            trial.set_user_attr("note", " ".join(note.split())[:500])
            say(f"trial {trial.number} {note}")
        study.tell(trial.number, value, state=state)
    say(f"trial {trial.number}: " + (f"{value:.2f} % on validation" if value is not None else state.name.lower()))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Winner:
    """The best trial, its recipe and its results on the test split."""

    record: Record
    recipe: Recipe
    results: list[Result]


def finish(search: Search, final_trials: int, launcher: Launcher | None = None) -> Winner:
    """Write best.toml, table.md and study.json; then train the winner with several seeds and evaluate them on the test split.

    With several processes, one does so; the others wait and read its files.
    """
    optuna = need_optuna()
    from letkd.training.trials import run_trials

    study = _open(search)
    with storage_errors(search.storage):
        trials = study.get_trials(deepcopy=False)
    records = [Record.of(trial) for trial in trials]
    complete = [record for record in records if record.value is not None]
    if not complete:
        why = next((record.note for record in records if record.note), "all were pruned")
        raise SearchError(f"none of the {len(records)} trials completed: {why}")
    best = max(complete, key=lambda record: (record.value or 0.0, -record.number))
    recipe = search.recipe(best.params)
    with _wait_for_lock(search.out / ".final.lock"):
        importance = _importance(optuna, study) if len(search.ranges) > 1 and len(complete) > 2 else {}
        log = [range_.key for range_ in search.ranges if range_.log]
        write_study(search.out, Study(search.name, list(map(str, search.ranges)), log, records, best.number, importance))
        write_whole(search.out / "best.toml", tomli_w.dumps(recipe.model_dump(exclude_none=True)).encode())
        results = run_trials(
            recipe, search.final(best.number), final_trials, supervision=search.supervision, log=search.log, launcher=launcher
        )
        write_whole(search.out / "table.md", _table(search, records, best.number, results).encode())
    return Winner(best, recipe, results)


def _table(search: Search, records: list[Record], best: int, results: list[Result]) -> str:
    """Table of the best trials, with the winner's test accuracy."""
    head, rows = rows_of([range_.key for range_ in search.ranges], records, best)
    test = mean_std([result.last_test for result in results])
    notes = [
        *([f"The {SHOWN} best of {len(records)} trials."] if len(records) > SHOWN else []),
        "Trials are compared on the validation split only.",
        f"Trial {best} on the test split, last epoch: {test} % (n = {len(results)} seeds).",
    ]
    return as_markdown(Grid(f"Trials of {search.name}", head, [[Cell(text) for text in row] for row in rows], notes))


def _importance(optuna: Any, study: Any) -> dict[str, float]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Target and region")  # equal shares for all keys would be meaningless
            return {key: float(value) for key, value in optuna.importance.get_param_importances(study).items()}
    except (ValueError, RuntimeError, UserWarning) as error:  # all values equal, or too few trials
        say(f"importances are omitted: {str(error).splitlines()[0]}")
        return {}
