"""The run folder: names of its files, readers and writers."""

import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import tomli_w
from pydantic import TypeAdapter

from letkd.distiller.student import STUDENT
from letkd.errors import LetkdError, RunError
from letkd.files import SCRAP, hold, must_be_utf8, read_plain, refuse_link, refuse_links, sweep, write_whole
from letkd.progress import say
from letkd.recipes.schedule import why_not_extended
from letkd.recipes.schema import Recipe, validate
from letkd.runs.environment import environment
from letkd.runs.records import NOTE, RESULT, TABLE, EpochRow, Note, Result, reason

FREE = frozenset(("title", "data.workers"))  # settings that change nothing in a run
# These may change until the run is finished, because `inputs` has fingerprints of what was there.
PLACES = frozenset(("data.root", "data.unlabelled", "teacher.weights"))
Tell = Callable[[str], object]


class RunFolder:
    """One run on disk: recipe, environment, log, fitted supervision, checkpoint, student, predictions, result.

    Every reader checks what it reads. A damaged file raises a RunError that names the file and says what to do; only damaged rows of
    the log are skipped, with a message. Nothing is written before `begin`, so a wrong command leaves nothing behind.

    Args:
        path: the folder.
        recipe: of a run to train here; a folder with another recipe or with other files is refused. If only the number of epochs is
            larger, the run is extended, provided that its learning rates so far would have been the same. Default: the recipe in
            the folder.
    """

    RECIPE: ClassVar = "recipe.toml"
    ENVIRONMENT: ClassVar = "env.json"
    INPUTS: ClassVar = "inputs.json"
    LOG: ClassVar = "metrics.jsonl"
    RESULT: ClassVar = "result.json"
    NOTE: ClassVar = "note.json"
    LOCK: ClassVar = ".lock"
    SUPERVISION: ClassVar = "supervision"

    def __init__(self, path: str | Path, recipe: Recipe | None = None):
        self.path = must_be_utf8(Path(path))
        self._lock: int | None = None
        self.extends = False  # whether `recipe` differs from the folder's only by more epochs
        self.restates = False  # whether the recipe differs only in what changes nothing in the run, such as its title
        self.replaces = False  # whether `recipe` takes the place of one that trained nothing
        if recipe is not None:
            self.recipe = recipe
            self._check_ownership()

    # -------------------------------------------------------------------------------------------- names

    @property
    def recipe_file(self) -> Path:
        return self.path / self.RECIPE

    @property
    def log_file(self) -> Path:
        """One JSON object per epoch: line n is epoch n; a lost line stays empty."""
        return self.path / self.LOG

    @property
    def supervision(self) -> Path:
        """Folder of fitted supervisions and of the teacher's cache."""
        return self.path / self.SUPERVISION

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def trackers(self) -> Path:
        """The run's ids in trackers, so that it resumes there, too; see `letkd.training.trackers`."""
        return self.path / "trackers.json"

    @property
    def last(self) -> Path:
        """Folder of the last two checkpoints; see `letkd.runs.checkpoint`."""
        return self.path / "last"

    @property
    def student(self) -> Path:
        """The trained student; see `letkd.distiller.student`."""
        return self.path / STUDENT

    @property
    def averaged_student(self) -> Path:
        """The student with averaged weights, of runs with `train.ema`."""
        return self.path / "student_ema.safetensors"

    @property
    def predictions(self) -> Path:
        """The student's predictions on the test images; see `letkd.runs.evaluation.Predictions`."""
        return self.path / "predictions.safetensors"

    @property
    def best_on_validation(self) -> Path:
        """Weights of the best validation epoch."""
        return self.path / "best_on_validation.safetensors"

    @property
    def inputs(self) -> Path:
        """Fingerprints of the teacher and the images at the start of the run; see `letkd.training.inputs`."""
        return self.path / self.INPUTS

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return self.recipe_file.is_file()

    @classmethod
    def children(cls, folder: Path) -> list[Path]:
        """The direct subfolders that hold a run."""
        return sorted(found.parent for found in folder.glob(f"*/{cls.RECIPE}"))

    def other_seeds(self) -> list["RunFolder"]:
        """The runs next to this one with the same recipe and another seed; damaged ones are left out."""
        found = []
        for path in self.children(self.path.parent):
            other = RunFolder(path)
            try:
                changed = differences(other._table(), self._table())
            except LetkdError:
                continue
            if set(changed) - FREE - PLACES == {"train.seed"}:
                found.append(other)
        return found

    @classmethod
    def below(cls, folder: Path) -> list[Path]:
        """This folder and all folders below it that hold a run; links are not followed."""
        return sorted(found.parent for found in folder.rglob(cls.RECIPE))

    @classmethod
    def noted_below(cls, folder: Path) -> list[Path]:
        """This folder and all folders below it in which a comparison left a note."""
        return sorted(found.parent for found in folder.rglob(cls.NOTE))

    # -------------------------------------------------------------------------------------------- readers

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        if not self.recipe_file.exists():
            raise RunError(f"{self.path} is not a run folder: it has no {self.RECIPE}")
        return validate(self._recipe_table(), str(self.recipe_file))

    @property
    def epochs(self) -> int:
        """Number of epochs, including phases."""
        return self.recipe.train.epochs + sum(phase.epochs for phase in self.recipe.phases)

    def rows(self, *, before: float = math.inf, tell: Tell = say) -> list[dict[str, Any]]:
        """The rows of the log for the epochs before `before`; later rows belong to work that was lost in a kill.

        Args:
            tell: gets a message if rows are damaged; these are skipped.
        """
        return [row for row in self._log_lines(tell) if row is not None and row["epoch"] < before]

    @property
    def result(self) -> Result | None:
        """The result of the run; None if it is not finished."""
        if self.extends:
            return None
        path = self.path / self.RESULT
        advice = "remove this file; `letkd train` then computes the result again"
        return self._read(path, RESULT, advice)

    @property
    def note(self) -> Note | None:
        """Why a comparison has no runs here; None without a note."""
        return self._read(self.path / self.NOTE, NOTE, "remove it; the comparison then writes it again")

    # -------------------------------------------------------------------------------------------- writers

    @contextmanager
    def begin(self, **choices: Any) -> Iterator[None]:
        """Lock the folder against other processes; write recipe and environment unless an earlier start did.

        Args:
            choices: settings resolved for this machine, added to the environment.
        """
        now = environment() | choices
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"the run folder {self.path} could not be created: {error.strerror}; choose another with `out=`"
            ) from None
        with hold(self.path / self.LOCK) as self._lock:
            try:
                self._check_ownership()  # again: another process may have started here in the meantime
                for folder in (self.last, self.supervision, self.tensorboard):
                    refuse_links(folder)
                refuse_link(self.wandb)  # wandb puts its own links into it
                for folder in (self.path, self.last):
                    sweep(folder, older=0)
                if self.extends:
                    self._extend()
                if self.replaces:
                    self._replace()
                if self.recipe_file.exists():
                    self.keep_recipe()
                    self._report_changes(now)
                    self.rows()  # reports lost rows once; `log` does not report them
                else:
                    write_whole(self.path / self.ENVIRONMENT, json.dumps(now, indent=1).encode())
                    write_whole(self.recipe_file, tomli_w.dumps(self._table()).encode())
                yield
            finally:
                self._lock = None

    def keep_recipe(self) -> None:
        """Write the recipe if it differs in what changes nothing in the run."""
        if self.restates:
            write_whole(self.recipe_file, tomli_w.dumps(self._table()).encode())
            self.restates = False

    def _extend(self) -> None:
        before = RunFolder(self.path).recipe
        say(f"{self.path}: extended from {before.train.epochs} to {self.recipe.train.epochs} epochs")
        (self.path / self.RESULT).unlink(missing_ok=True)  # first: it is not the result of the longer run
        write_whole(self.recipe_file, tomli_w.dumps(self._table()).encode())
        self.extends = False

    def _replace(self) -> None:
        say(f"{self.path}: an earlier start with another recipe trained nothing; its files are replaced")
        for path in (self.inputs, self.recipe_file):
            path.unlink(missing_ok=True)
        self.replaces = False

    def check_present(self) -> None:
        """Raise an error if the folder was removed or replaced since `begin`."""
        if self._lock is None:
            return
        lock = self.path / self.LOCK
        ours = not lock.exists() or os.path.samestat(os.fstat(self._lock), lock.lstat())
        if not (ours and self.exists):
            raise RunError(f"{self.path} was removed or replaced during training; run the same command to start again")

    def log(self, row: dict[str, Any]) -> None:
        """Write the row of an epoch to the log and drop later rows, atomically."""
        self.check_present()
        lines = [b"" if other is None else json.dumps(other).encode() for other in self._log_lines(lambda line: None)]
        lines = lines[: row["epoch"] - 1]
        lines += [b""] * (row["epoch"] - 1 - len(lines))
        write_whole(self.log_file, b"".join(line + b"\n" for line in [*lines, json.dumps(row).encode()]))

    def finish(self, result: Result) -> None:
        self.check_present()
        write_whole(self.path / self.RESULT, json.dumps(asdict(result), indent=1).encode())

    def keep_note(self, note: Note) -> None:
        """Write a note, or remove an older one if this one is empty."""
        path = self.path / self.NOTE
        if note.note:
            write_whole(path, json.dumps(asdict(note), indent=1).encode())
        else:
            path.unlink(missing_ok=True)

    # -------------------------------------------------------------------------------------------- inside

    def _check_ownership(self) -> None:
        """Raise an error if the folder holds another run or other files."""
        if self.recipe_file.exists():
            changed = differences(self._recipe_table(), json.loads(json.dumps(self._table(), default=str)))
            free = FREE if (self.path / self.RESULT).exists() else FREE | PLACES
            self.restates = bool(changed) and free.issuperset(changed)
            changed = [key for key in changed if key not in free]
            why = f"it differs in {', '.join(changed)}" if changed else None
            self.replaces = bool(changed) and self._is_untrained()
            if self.replaces:
                return
            if "train.epochs" in changed and {"train.epochs", "optim.milestones"}.issuperset(changed):
                why = why_not_extended(RunFolder(self.path).recipe, self.recipe)
                self.extends = why is None
            if why is not None:
                raise RunError(f"{self.path} holds another run ({why}); choose another folder with `out=`, or remove it")
        elif self.path.exists() and (not self.path.is_dir() or any(map(self._is_foreign, self.path.iterdir()))):
            raise RunError(f"{self.path} exists and holds files that are not a run; choose another folder with `out=`")

    def _is_untrained(self) -> bool:
        """Whether a start ended before anything was saved, so that nothing is lost with another recipe."""
        return not any(path.exists() for path in (self.last, self.log_file, self.path / self.RESULT, self.student))

    def _is_foreign(self, path: Path) -> bool:
        """Whether this file is not allowed in a folder without a recipe; supervision and remains of a failed start are."""
        return path.name not in (self.SUPERVISION, self.LOCK, self.ENVIRONMENT) and SCRAP.fullmatch(path.name) is None

    def _table(self) -> dict[str, Any]:
        return self.recipe.model_dump(exclude_none=True)

    def _recipe_table(self) -> dict[str, Any]:
        try:
            return tomllib.loads(read_plain(self.recipe_file).decode())
        except (ValueError, RecursionError, OSError) as error:
            raise RunError(f"{self.recipe_file} is damaged: {reason(error)}") from None

    def _log_lines(self, tell: Tell) -> list[dict[str, Any] | None]:
        """The lines of the log; None for a line that is not the row of its epoch."""
        try:
            lines = read_plain(self.log_file).splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            tell(f"{self.log_file} cannot be read ({error.strerror}); its rows are skipped")
            return []
        rows = [_row(line, epoch) for epoch, line in enumerate(lines, start=1)]
        if lost := rows.count(None):
            tell(f"{self.log_file} is damaged: {lost} of its {len(rows)} rows cannot be read and are skipped")
        return rows

    def _read(self, path: Path, kind: TypeAdapter, advice: str) -> Any:
        try:
            return kind.validate_json(read_plain(path), strict=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise RunError(f"{path} is damaged ({reason(error)}); {advice}") from None

    def _report_changes(self, now: dict[str, Any]) -> None:
        path = self.path / self.ENVIRONMENT
        try:
            before = self._read(path, TABLE, "")
        except RunError:
            before = None
        if before is None:
            say(f"{path} is damaged: the environment at the start of the run is unknown")
            return
        changed = [key for key in differences(before, json.loads(json.dumps(now))) if key != "command"]
        if changed and self.result is None:
            say(f"{self.path}: started in another environment ({', '.join(changed)} differ); the last digits may differ, too")


def _row(line: bytes, epoch: int) -> dict[str, Any] | None:
    try:
        row = EpochRow.model_validate_json(line)
    except ValueError:
        return None
    return row.model_dump(exclude_unset=True) if row.epoch == epoch else None


def differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys in which two tables differ."""
    changed = []
    for key in sorted(one.keys() | other.keys()):
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            changed += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            changed.append(f"{prefix}{key}")
    return changed
