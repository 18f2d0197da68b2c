"""A search: trials on the validation split, shared by any number of processes, then the winner on the test split.

Trials are run folders under `out/trials`. A process holds a lock file for the trial it works on. A trial that runs according to the
study but whose lock is free belonged to a process that ended: the next process takes it up from its last checkpoint. So `out` must be
one folder for all processes.
"""

import json
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from letkd.errors import InUseError, LetkdError, NonFiniteError, RecipeError, Stopped
from letkd.files import hold, write_whole
from letkd.progress import say
from letkd.recipes import Recipe
from letkd.runs.folder import RunFolder
from letkd.runs.grid import Cell, Grid, as_markdown
from letkd.runs.records import Result
from letkd.runs.results import mean_std
from letkd.runs.study import SHOWN, TRIALS, Record, Study, lock_of, rows_of, write_study
from letkd.search.space import Range, check_keys
from letkd.search.storage import SearchError, need_optuna, open_storage, told
from letkd.training.launchers import Launcher

REDUCTION = 3  # successive halving keeps the best third at each rung
POLL = 1.0  # seconds between looks at what other processes do


class _Enough(Exception):
    """The last epoch is done, with this accuracy on validation; the test split stays unread."""


class _Pruned(Exception):
    """Successive halving ends the trial."""


@dataclass(frozen=True)
class Search:
    """What a search is.

    Args:
        make: the recipe for more `key=value` settings; can be pickled.
        ranges: what varies.
        trials: how many in all, over all processes.
        out: folder of the trials, shared by all processes.
        storage: a database's URL, or a journal file.
        name: of the study in the storage.
        seed: of the proposals. Trial k's random draws depend on seed and k alone.
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
        """Folder of a winner's seeds; with more trials a search may have another winner."""
        return self.out / "final" / f"trial-{number:04}"

    def lock(self, number: int) -> Path:
        return lock_of(self.folder(number))

    def definition(self) -> str:
        """All that trials of one study must share, as text."""
        table = self.make([]).model_dump(mode="json", exclude_none=True)
        table["data"].pop("root", None)
        for network in ("teacher", "student"):
            table.get(network, {}).pop("weights", None)
        given = {"over": sorted(map(str, self.ranges)), "seed": self.seed, "sampler": self.sampler, "pruner": self.pruner}
        return json.dumps({"recipe": table, **given}, sort_keys=True)

    def check(self) -> None:
        """Raise for wrong keys and values before anything is written."""
        from letkd.training.build import build_distiller, read_data

        base = self.make([])
        check_keys(self.ranges, base)
        for range_ in self.ranges:
            for value in range_.ends():
                try:
                    self.make([range_.setting(value)])
                except RecipeError as error:
                    raise RecipeError(f"--over {range_}: {error}") from None
        data = read_data(base)
        if not len(data.val):
            raise SearchError(
                f"a search chooses on the validation split, and {data.name} has none here; hold images out with --set data.val=0.1"
            )
        try:
            build_distiller(self.recipe({range_.key: range_.ends()[0] for range_ in self.ranges}), data)
        except RecipeError as error:
            raise RecipeError(f"--over {', '.join(map(str, self.ranges))}: {error}") from None


@dataclass(frozen=True)
class TrialTask:
    """One trial of a search, as a launcher runs it: one that was left, or the next one."""

    search: Search
    number: int

    @property
    def label(self) -> str:
        return f"{self.search.out}, trial {self.number + 1} of {self.search.trials}"

    def __call__(self) -> None:
        with _claimed(self.search) as claim:
            if claim is not None:
                _run(self.search, *claim)


def run_search(search: Search, launcher: Launcher | None = None) -> None:
    """Run trials until the study has as many as asked for; returns when all of them have ended, whichever process ran them."""
    study = _open(search)
    while left := _open_trials(study, search):
        if launcher is not None:
            for k, outcome in launcher.run([TrialTask(search, search.trials - left + k) for k in range(left)]):
                if outcome.state != "done":
                    raise SearchError(f"trial {search.trials - left + k}: {outcome.sentence}")
            if _open_trials(study, search) == left:
                time.sleep(POLL)  # other processes run what is left
            continue
        with _claimed(search) as claim:
            if claim is not None:
                _run(search, *claim)
                continue
        time.sleep(POLL)
    if (search.sampler, search.pruner) != ("random", "none") and _overlapped(study, search):
        say(
            "trials ran at the same time: what TPE proposes and what halving ends depends on which trials have finished by then, so "
            "another run of this search may find another best; with --sampler random --pruner none it does not"
        )


def _overlapped(study: Any, search: Search) -> bool:
    """Whether a trial began before an earlier one had ended."""
    with told(search.storage):
        trials = study.get_trials(deepcopy=False)
    ends = [trial.datetime_complete for trial in trials]
    return any(trial.datetime_start < max(ends[:k]) for k, trial in enumerate(trials) if k)


def _open_trials(study: Any, search: Search) -> int:
    """How many trials have not ended, those that have not begun included."""
    with told(search.storage):
        return search.trials - sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))


def _open(search: Search) -> Any:
    """The study; one that is there must be of the same search."""
    optuna = need_optuna()
    search.out.mkdir(parents=True, exist_ok=True)
    epochs = search.make([]).train.epochs
    halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=max(1, epochs // REDUCTION**2), reduction_factor=REDUCTION)
    with _waiting(search.out / ".study.lock"), told(search.storage):
        study = optuna.create_study(
            storage=open_storage(search.storage),
            study_name=search.name,
            direction="maximize",
            load_if_exists=True,
            pruner=halving if search.pruner == "halving" else optuna.pruners.NopPruner(),
        )
        held = study.user_attrs.get("letkd")
        if held is None:
            study.set_user_attr("letkd", search.definition())
        elif held != search.definition():
            raise SearchError(
                f"the study {search.name!r} is another search: its {_difference(held, search.definition())} differs; choose another "
                "--study name and --out folder"
            )
    return study


def _difference(held: str, asked: str) -> str:
    a, b = json.loads(held), json.loads(asked)
    keys = [key for key in b if a.get(key) != b[key]]
    return " and ".join("--over" if key == "over" else str(key) for key in keys) or "definition"


Claim = tuple[Any, Any]  # the study and a trial of it


@contextmanager
def _claimed(search: Search) -> Iterator[Claim | None]:
    """A trial for this process alone: one whose process ended, or the next one; None if there is none now."""
    optuna = need_optuna()
    study = _open(search)
    with ExitStack() as held:
        claim: Claim | None = None
        with _waiting(search.out / ".study.lock"), told(search.storage):
            trials = study.get_trials(deepcopy=False)
            for trial in trials:
                if trial.state == optuna.trial.TrialState.RUNNING and _hold(search.lock(trial.number), held):
                    say(f"trial {trial.number}: its process ended; taken up again")
                    claim = study, optuna.trial.Trial(study, trial._trial_id)
                    break
            if claim is None and len(trials) < search.trials and _hold(search.lock(len(trials)), held):
                study.sampler = _sampler(optuna, search, len(trials))
                trial = study.ask({range_.key: range_.distribution(optuna) for range_ in search.ranges})
                claim = study, trial
        yield claim


def _sampler(optuna: Any, search: Search, number: int) -> Any:
    """Seeded by search and trial, so that what a process draws does not depend on what it drew before."""
    seed = random.Random(f"{search.seed} {number}").randrange(2**31)
    return optuna.samplers.RandomSampler(seed) if search.sampler == "random" else optuna.samplers.TPESampler(seed=seed)


def _hold(lock: Path, held: ExitStack) -> bool:
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(hold(lock))
    except InUseError:
        return False
    return True


@contextmanager
def _waiting(lock: Path) -> Iterator[None]:
    """Hold a lock, once whoever holds it lets go."""
    with ExitStack() as held:
        while not _hold(lock, held):
            time.sleep(0.05)
        yield


def _run(search: Search, study: Any, trial: Any) -> None:
    """Train the trial's recipe, epoch by epoch, until it ends or is pruned."""
    optuna = need_optuna()
    from letkd.training.loop import train

    states = optuna.trial.TrialState
    folder = search.folder(trial.number)
    with told(search.storage):
        done = set(study.get_trials(deepcopy=False)[trial.number].intermediate_values)
    shown = ", ".join(f"{key} {_short(value)}" for key, value in trial.params.items())

    def watch(row: dict[str, Any]) -> None:
        if row["epoch"] not in done:
            done.add(row["epoch"])
            with told(search.storage):
                trial.report(row["val_top1"], step=row["epoch"])
        if row["epoch"] >= epochs:
            raise _Enough(row["val_top1"])
        with told(search.storage):
            ended = trial.should_prune()
        if ended:
            raise _Pruned

    value, state, note, epochs = None, states.COMPLETE, "", 0
    try:
        recipe = search.recipe(trial.params)
        run = RunFolder(folder, recipe)
        epochs = run.epochs
        say(f"trial {trial.number} of {search.trials}: {shown}")
        for row in run.rows() if run.exists else ():
            watch(row)
        how = {"save_minutes": search.save_minutes, "log": search.log}
        train(recipe, folder, supervision=search.supervision, watch=watch, **how)
    except _Enough as enough:
        value = enough.args[0]
    except _Pruned:
        state = states.PRUNED
    except NonFiniteError as error:
        state, note = states.PRUNED, f"diverged: {error}"
    except (Stopped, SearchError):  # the trial stays open, to be taken up again
        raise
    except LetkdError as error:
        state, note = states.FAIL, str(error)
    with told(search.storage):
        if note:
            trial.set_user_attr("note", " ".join(note.split())[:500])
            say(f"trial {trial.number} {note}")
        study.tell(trial.number, value, state=state)
    say(f"trial {trial.number}: " + (f"{value:.2f} % on validation" if value is not None else state.name.lower()))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Winner:
    """The best trial, its recipe, and its results on the test split."""

    record: Record
    recipe: Recipe
    results: list[Result]


def finish(search: Search, final_trials: int, launcher: Launcher | None = None) -> Winner:
    """Write best.toml, table.md and study.json; then train the winner with several seeds and read the test split for them.

    Of several processes, one does so; the others wait and read what it wrote.
    """
    optuna = need_optuna()
    from letkd.training.trials import run_trials

    study = _open(search)
    with told(search.storage):
        trials = study.get_trials(deepcopy=False)
    records = [Record.of(trial) for trial in trials]
    complete = [record for record in records if record.value is not None]
    if not complete:
        why = next((record.note for record in records if record.note), "all were pruned")
        raise SearchError(f"none of the {len(records)} trials ran to its end: {why}")
    best = max(complete, key=lambda record: (record.value or 0.0, -record.number))
    recipe = search.recipe(best.params)
    with _waiting(search.out / ".final.lock"):
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
    """The best trials, and the winner on test."""
    head, rows = rows_of([range_.key for range_ in search.ranges], records, best)
    test = mean_std([result.last_test for result in results])
    notes = [
        *([f"The {SHOWN} best of {len(records)} trials."] if len(records) > SHOWN else []),
        "Trials are compared on the validation split alone.",
        f"Trial {best} on the test split, last epoch: {test} % (n = {len(results)} seeds).",
    ]
    return as_markdown(Grid(f"Trials of {search.name}", head, [[Cell(text) for text in row] for row in rows], notes))


def _importance(optuna: Any, study: Any) -> dict[str, float]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Target and region")  # equal shares for all keys would say nothing
            return {key: float(value) for key, value in optuna.importance.get_param_importances(study).items()}
    except (ValueError, RuntimeError, UserWarning) as error:  # all values equal, or too few trials
        say(f"importances are left out: {str(error).splitlines()[0]}")
        return {}
