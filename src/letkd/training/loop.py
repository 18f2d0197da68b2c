"""One training run, from a recipe to a result."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from letkd.data import Dataset, Loader
from letkd.distiller import Distiller
from letkd.distiller.cache import TeacherCache
from letkd.distributed.processes import is_distributed, objects_of_all, wait_for_all
from letkd.errors import DataError, NonFiniteError, Stopped
from letkd.files import tidy
from letkd.inspect.health import health
from letkd.models import save_weights
from letkd.progress import say
from letkd.recipes.schedule import lr_factor, phase_at
from letkd.recipes.schema import Phase, Recipe
from letkd.runs.checkpoint import check_finite, kept
from letkd.runs.evaluation import Accuracy
from letkd.runs.folder import RunFolder
from letkd.runs.records import Result
from letkd.training.agree import Agreement
from letkd.training.build import build_distiller, eval_loader, fit, read_data, train_loader
from letkd.training.compiled import check_device
from letkd.training.device import chosen
from letkd.training.fabric import launch
from letkd.training.finish import Evaluation, finish
from letkd.training.inputs import check_inputs
from letkd.training.logbook import Logbook, Row, logbook
from letkd.training.probe import check_probe
from letkd.training.state import Clock, State, restore_state, save_state, sum_tables
from letkd.training.steps import Steps
from letkd.training.stop import StopRequest, polite_stop
from letkd.training.tally import COUNTS, Tally
from letkd.training.teachers import measure_teacher

if TYPE_CHECKING:
    from lightning_fabric import Fabric

READ_SECONDS = 1.0  # between two reads of the loss from the device
AUTO_SHARE = 0.1  # of the steps of the main training, in which automatic weights are measured
OnStep = Callable[[State], object]


def train(
    recipe: Recipe,
    folder: str | Path,
    *,
    supervision: str | Path | None = None,
    save_minutes: float = 15.0,
    force: bool = False,
    log: Sequence[str] | None = None,
    watch: Callable[[Row], object] = lambda row: None,
    on_step: OnStep = lambda state: None,
) -> Result:
    """Train a recipe in `folder`. An interrupted run resumes. A finished run returns its result, or is extended if the recipe now
    has more epochs and is otherwise the same.

    Args:
        supervision: folder with fitted supervisions and the teacher's cache, to share between runs; default: `folder/supervision`.
        save_minutes: minutes between checkpoints within an epoch; a checkpoint is always written at the end of an epoch.
        force: resume even if the teacher or the images have changed since the start.
        log: names of trackers that get the row of every epoch; see `letkd.training.trackers`.
        watch: called with the row of every epoch after its checkpoint is written. If it raises, the run ends there, before the test
            split is read.
        on_step: called after every step, with the epoch and the number of its completed steps.

    Under torchrun or SLURM, all processes call this function and share the work. The result is that of the last epoch. The best
    validation epoch is saved as well. The test split is used only after the last epoch.

    Examples:
        >>> import tempfile, letkd
        >>> result = train(letkd.resolve("digits/tiny/ce", quick=True), tempfile.mkdtemp())
        >>> result.epochs
        1
    """
    fabric = launch(recipe)
    run = RunFolder(folder, recipe)
    if run.result is not None and not run.student.is_file():
        say(f"{run.path}: {run.student.name} is missing and is written again from the last checkpoint")
    elif run.result is not None:
        test = "" if run.result.last_test is None else f", {run.result.last_test:.2f} % on test"
        say(f"{run.path}: finished already{test}")
        if fabric.is_global_zero:
            run.keep_recipe()
        return run.result
    if recipe.train.compile:
        check_device(fabric.device)
    data = read_data(recipe)
    if data.has_labels and not len(data.test):
        raise DataError(f"{data.name} has no test images, but a run reports the accuracy on them; add a test split")
    fabric.seed_everything(
        recipe.train.seed, verbose=False
    )  # after reading: some libraries draw a random number when first imported
    distiller = build_distiller(recipe, data)
    if recipe.probe is not None:
        check_probe(distiller.export(), recipe.student.taps, data, recipe.probe)  # errors are raised here, before any work
    for phase in recipe.phases:
        distiller.set_weights(
            phase.weights
        )  # each epoch sets its own; wrong ones raise an error here, before anything is written
    batches = train_loader(recipe, data, rank=fabric.global_rank, world=fabric.world_size)
    shared = Path(supervision or run.supervision)
    with run.begin(**chosen(recipe)) if fabric.is_global_zero else nullcontext():
        if fabric.is_global_zero:
            tidy(shared)
            check_inputs(run, distiller, data, force=force)
        wait_for_all()
        fit(distiller, recipe, data, shared)
        with polite_stop() as request:
            return _Run(fabric, run, distiller, data, batches, shared, save_minutes, request, on_step).train(log, watch)


class _Run:
    """One run in training."""

    def __init__(
        self,
        fabric: "Fabric",
        run: RunFolder,
        distiller: Distiller,
        data: Dataset,
        batches: Loader,
        shared: Path,
        save_minutes: float,
        request: StopRequest,
        on_step: OnStep,
    ):
        self.fabric, self.run, self.distiller, self.batches = fabric, run, distiller, batches
        self.recipe, self.on_step = run.recipe, on_step
        self.learner = Steps(fabric, distiller, self.recipe)
        if self.recipe.train.cache_views and self.recipe.train.cache_teacher and distiller.teacher is not None:
            distiller.cache = TeacherCache(distiller, self.batches, shared / "views")
        self.steps = min(len(self.batches), self.recipe.train.steps or len(self.batches))
        self.agreement = Agreement(request, fabric.device, 60 * save_minutes)
        self.evaluation = Evaluation(fabric, run, data, self._check_stop)
        self.sample = next(iter(eval_loader(self.recipe, data, data.train)))  # for the health of the layers
        if distiller.auto is not None:
            distiller.auto.steps = ceil(AUTO_SHARE * self.recipe.train.epochs * self.steps)
        self.state = self._resume()
        if self.state.teacher_top1 is None:
            self.state.teacher_top1 = measure_teacher(distiller, self.recipe, data)
        self.clock = Clock(self.state)
        self.tally, self.last_read = Tally(self.state.sums), time.monotonic()

    def _resume(self) -> State:
        state = restore_state(self.run.last, self.learner)
        if state.step:
            say(f"{self.run.path}: resumes in epoch {state.epoch}, after {state.step} of {self.steps} steps")
        elif state.epoch > 1:
            say(f"{self.run.path}: resumes after epoch {state.epoch - 1}")
        return state

    def train(self, log: Sequence[str] | None, watch: Callable[[Row], object]) -> Result:
        state = self.state
        title = f"{self.recipe.title or 'training'}, seed {self.recipe.train.seed}"
        todo = (self.run.epochs + 1 - state.epoch) * self.steps - state.step
        writes = self.fabric.is_global_zero
        with logbook(title, self.run, log, first=state.epoch, steps=todo, epochs=self.run.epochs, writes=writes) as book:
            while state.epoch <= self.run.epochs:
                row = self._row(self._epoch(book))
                book.epoch(row)
                state.epoch, state.step, self.tally = state.epoch + 1, 0, Tally()
                self._save()
                watch(row)
        self.distiller.set_weights(self.recipe.weights)  # after a resume without a step, they are those of the last phase
        return finish(self.evaluation, self.learner, state, self.clock)

    def _epoch(self, book: Logbook) -> float:
        state, recipe = self.state, self.recipe
        number, phase = phase_at(state.epoch, recipe)
        self.distiller.set_weights(recipe.weights if phase is None else phase.weights)
        before = (number - 1) * self.steps
        if number == 1 and state.step == 0:
            self.learner.optimizer.state.clear()  # a phase begins without the momentum of the one before
        self.learner.model.train()
        self.distiller.checks = True  # in the first step; the tally checks the other steps without waiting for each
        self.batches.set_epoch(state.epoch, start=state.step)
        if self.distiller.cache is not None:
            with self.fabric.autocast():
                self.distiller.cache.prepare(self.batches.view(state.epoch) or 0, self._check_stop)
        for batch in islice(self.batches, self.steps - state.step):
            batch = replace(batch.to(self.fabric.device), epoch=number)
            step = self.learner.take(batch, self._lr_factor(phase, before + state.step), done=state.step, of=self.steps)
            self.distiller.checks = False
            self._tell_weights()
            self.tally.add(step, batch.y, self.learner.norms, self.learner.gradients)
            state.step += 1
            self._note_progress(book)
            self.on_step(state)
            self._after_step()
        return recipe.optim.lr * self._lr_factor(phase, before)

    def _tell_weights(self) -> None:
        """Print automatic weights once they are constant."""
        if self.distiller.auto is None or self.state.weights_told or not self.distiller.auto.done:
            return
        self.state.weights_told = True
        values = ", ".join(f"{name} {value:.4g}" for name, value in self.distiller.auto_weights().items())
        say(f"automatic weights after {self.distiller.auto.steps} steps: {values}")

    def _lr_factor(self, phase: Phase | None, done: int) -> float:
        """Learning rate of the next step of a phase or of the main training, as a multiple of the first rate, after `done` of its steps."""
        if phase is None:
            return lr_factor(done, self.recipe, self.steps)
        return (phase.lr or self.recipe.optim.lr) / self.recipe.optim.lr

    def _note_progress(self, book: Logbook) -> None:
        if time.monotonic() - self.last_read >= READ_SECONDS:
            book.note(self.state.epoch, self._read())
        book.step()

    def _read(self) -> dict[str, float]:
        """The sums over this epoch's steps. Waits for the device; raises an error if a step was not finite."""
        sums, fault = self.tally.read()
        self.last_read = time.monotonic()
        if fault:
            raise NonFiniteError(
                f"epoch {self.state.epoch}: {fault}{kept(self.run.last)}. Lower the learning rate, or clip with `optim.clip=5`"
            )
        return sums

    def _after_step(self) -> None:
        """Save if it is time and stop if requested: all processes after the same step."""
        if not self.learner.can_save(self.state.step, self.steps):
            return
        stop, save = self.agreement.after_step()
        if stop:
            self._stop()
        if save and self.state.step < self.steps:
            self._save()

    def _check_stop(self) -> None:
        """Stop if requested, between the batches of an evaluation."""
        if self.agreement.should_stop():
            self._stop()

    def _stop(self) -> None:
        self._save()
        epoch, epochs = self.state.epoch, self.run.epochs
        position = f"in epoch {epoch} of {epochs}" if epoch <= epochs else "after the last epoch"
        raise Stopped(f"stopped {position}; run the same command again to resume")

    def _save(self) -> None:
        self.run.check_present()
        self.state.seconds, self.state.cpu_seconds = self.clock.seconds(), self.clock.cpu_seconds()
        self.state.sums = self._read()
        save_state(self.run.last, self.state, self.learner)
        self.agreement.saved()

    def _row(self, lr: float) -> dict[str, Any]:
        """The row of an epoch: mean loss and terms, accuracy on training and validation images."""
        state = self.state
        sums = sum_tables(objects_of_all(self._read()))
        steps, images, correct = (sums.pop(name) for name in COUNTS)
        self._same_batch_norms()
        check_finite(self.run.last, self.distiller, state.epoch)
        validates = state.epoch % self.recipe.train.validate_every == 0 or state.epoch == self.run.epochs
        val = self.evaluation.on("val", self.distiller.student) if validates else None
        averaged = self._averaged() if validates else None
        state.seconds = self.clock.seconds()
        if val is not None and (state.best_val is None or val.top1 > state.best_val):
            state.best_val, state.best_val_epoch = val.top1, state.epoch
            if self.fabric.is_global_zero:
                self.run.check_present()
                save_weights(self.distiller.student, self.run.best_on_validation, {"epoch": str(state.epoch)})
        row = {"epoch": state.epoch, "lr": lr, "train_top1": 100 * correct / images if images else None}
        row |= {name: value / steps for name, value in sums.items()}
        if validates:
            row |= {f"val/{name}": value for name, value in self.evaluation.held_out(self.distiller).items()}
        row |= {"val_top1": None if val is None else val.top1, "seconds": state.seconds}
        row |= {f"weight/{name}": value for name, value in self.distiller.auto_weights().items()}
        if averaged is not None:
            row["ema_val_top1"] = averaged.top1
        if state.epoch == 1 and state.teacher_top1 is not None:
            row["teacher_top1"] = state.teacher_top1
        found = health(self.distiller, self.sample.to(self.fabric.device)) if self.fabric.is_global_zero else {}
        return row | ({"health": found} if found else {})

    def _averaged(self) -> Accuracy | None:
        """Accuracy of the averaged weights on the validation split."""
        if self.learner.average is None:
            return None
        with self.learner.average.in_place():
            self._same_batch_norms()
            return self.evaluation.on("val", self.distiller.student)

    def _same_batch_norms(self) -> None:
        """Copy the running statistics of the first process to all, as DDP does, before an evaluation."""
        for name, buffer in self.distiller.named_buffers() if is_distributed() else ():
            if name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked"):
                dist.broadcast(buffer, src=0)
