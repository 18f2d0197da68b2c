"""One training run, from a recipe to a result."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from letkd.data import Dataset, Loader
from letkd.distiller import Distiller
from letkd.distiller.cache import TeacherCache
from letkd.distiller.student import save_student
from letkd.distributed.processes import objects_of_all, several, sum_of_all, wait_for_all
from letkd.distributed.sync_bn import sync_batch_norms, unsync_batch_norms
from letkd.errors import CheckpointError, DataError, NonFiniteError, Stopped
from letkd.files import tidy
from letkd.inspect.health import health
from letkd.models import load_weights, save_weights
from letkd.progress import bar, on_terminal, say
from letkd.recipes.schedule import lr_factor, phase_at
from letkd.recipes.schema import Phase, Recipe
from letkd.runs.checkpoint import check_finite, load_checkpoint, save_checkpoint
from letkd.runs.evaluation import Accuracy, judge
from letkd.runs.folder import RunFolder
from letkd.runs.records import Result
from letkd.training.board import Board, board
from letkd.training.build import build_distiller, eval_loader, fit, read_data, train_loader
from letkd.training.compiled import CompiledParts, check_device
from letkd.training.fabric import launch
from letkd.training.inputs import check_inputs
from letkd.training.optim import build_optimizer, set_lr
from letkd.training.stop import Wish, polite_stop
from letkd.training.teachers import measure_teacher

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass
class State:
    """Where a run stands: `step` steps of `epoch` are done, `sums` over them; everything else is in tensors."""

    epoch: int = 1
    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    best_val: float | None = None
    best_val_epoch: int | None = None
    seconds: float = 0.0
    teacher_top1: float | None = None
    precision: dict[str, Any] = field(default_factory=dict)


def train(
    recipe: Recipe,
    folder: str | Path,
    *,
    supervision: str | Path | None = None,
    save_minutes: float = 15.0,
    force: bool = False,
) -> Result:
    """Train as the recipe says, in `folder`. An interrupted run resumes; a finished one gives its result, or is extended if the
    recipe now has more epochs and is otherwise the same.

    Args:
        supervision: folder with fitted supervisions and what is cached of the teacher, to share between runs; `folder/supervision`
            where not given.
        save_minutes: how often the state is saved within an epoch; it is at the end of each anyway.
        force: resume although the teacher or the images are others than at the start.

    Started by torchrun or SLURM, all processes call this and share the work. The last epoch is what is reported. The epoch that
    was best on the validation split is kept beside it. The test split is read once, at the end.
    """
    fabric = launch(recipe)
    run = RunFolder(folder, recipe)
    if run.result is not None:
        say(f"{run.path}: finished already, {run.result.last_test:.2f} % on test")
        return run.result
    if recipe.train.compile:
        check_device(fabric.device)
    data = read_data(recipe)
    if not len(data.test):
        raise DataError(f"{data.name} has no test images, and a run reports the accuracy on them; add a test split")
    fabric.seed_everything(recipe.train.seed, verbose=False)  # after reading: some libraries draw a number when first imported
    distiller = build_distiller(recipe, data)
    for phase in recipe.phases:
        distiller.set_weights(phase.weights)  # each epoch sets its own; wrong ones are told before anything is written
    batches = train_loader(recipe, data, rank=fabric.global_rank, world=fabric.world_size)
    shared = Path(supervision or run.supervision)
    with run.begin() if fabric.is_global_zero else nullcontext():
        if fabric.is_global_zero:
            tidy(shared)
            check_inputs(run, distiller, data, force=force)
        wait_for_all()
        fit(distiller, recipe, data, shared)
        with polite_stop() as wish:
            return _Run(fabric, run, distiller, data, batches, shared, save_minutes, wish).train()


class _Run:
    """One run under way."""

    def __init__(
        self,
        fabric: "Fabric",
        run: RunFolder,
        distiller: Distiller,
        data: Dataset,
        batches: Loader,
        shared: Path,
        save_minutes: float,
        wish: Wish,
    ):
        self.fabric, self.run, self.distiller, self.data, self.batches = fabric, run, distiller, data, batches
        self.recipe, self.wish = run.recipe, wish
        if self.recipe.train.sync_bn:
            sync_batch_norms(distiller)
        self.compiled: AbstractContextManager[None] = nullcontext()
        if self.recipe.train.compile:
            self.compiled = CompiledParts(distiller.student, read={tap.path for tap in distiller.student_reads.values()})
        # What the methods remember is the same in every process already; DDP need not send it round at every step.
        known = [name for name, _ in distiller.named_buffers() if name.startswith("methods.")]
        object.__setattr__(distiller, "_ddp_params_and_buffers_to_ignore", known)
        wrapped: Any = fabric.setup(distiller, build_optimizer(distiller, self.recipe.optim))
        self.model: nn.Module = wrapped[0]
        self.optimizer: optim.Optimizer = wrapped[1]
        if self.recipe.train.cache_views and distiller.teacher is not None:
            distiller.cache = TeacherCache(distiller, self.batches, shared / "views")
        self.steps = min(len(self.batches), self.recipe.train.steps or len(self.batches))
        self.epochs = self.recipe.train.epochs + sum(phase.epochs for phase in self.recipe.phases)
        self.sample = next(iter(eval_loader(self.recipe, data, data.train)))  # what the health of the layers is looked at with
        self.state = self._resume()
        if self.state.teacher_top1 is None:
            self.state.teacher_top1 = measure_teacher(distiller, self.recipe, data)
        self.began = time.monotonic() - self.state.seconds
        self.saved, self.save_seconds = time.monotonic(), 60 * save_minutes

    def _resume(self) -> State:
        held = load_checkpoint(self.run.last, self.distiller, self.optimizer)
        if held is None:
            if self.fabric.global_rank:  # the networks are the same everywhere; what methods draw from here on is not
                torch.manual_seed(self.recipe.train.seed + (self.fabric.global_rank << 32))
            return State()
        sums = held.pop("sums")
        if len(sums) != self.fabric.world_size:  # other processes than before: the first takes over what all of them counted
            sums = [_added(sums)] + [{}] * self.fabric.world_size
        try:
            state = State(**held, sums=sums[self.fabric.global_rank])
            self.fabric.strategy.precision.load_state_dict(state.precision)
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            raise CheckpointError(f"{self.run.last} holds a state of another letkd ({error}); choose another folder") from None
        if state.step:
            say(f"{self.run.path}: goes on in epoch {state.epoch}, after {state.step} of {self.steps} steps")
        else:
            say(f"{self.run.path}: goes on after epoch {state.epoch - 1}")
        return state

    def train(self) -> Result:
        state = self.state
        title = f"{self.recipe.title or 'training'}, seed {self.recipe.train.seed}"
        tell = _teller()
        todo = (self.epochs + 1 - state.epoch) * self.steps - state.step
        with bar(title, todo) as tick, self._board() as show:
            while state.epoch <= self.epochs:
                lr = self._epoch(tick)
                row = self._row(lr)
                if self.fabric.is_global_zero:
                    # The row first: one too many is dropped when the run goes on, one too few could not be made up for.
                    self.run.log(row)
                    show(row)
                tell(state.epoch, self.epochs, row)
                state.epoch, state.step, state.sums = state.epoch + 1, 0, {}
                self._save()
        return self._finish()

    def _board(self) -> AbstractContextManager[Board]:
        if self.fabric.is_global_zero:
            return board(self.run.tensorboard, self.state.epoch)
        return nullcontext(lambda row: None)

    def _epoch(self, tick: Any) -> float:
        state, recipe = self.state, self.recipe
        number, phase = phase_at(state.epoch, recipe)
        self.distiller.set_weights(recipe.weights if phase is None else phase.weights)
        before = (number - 1) * self.steps
        if number == 1 and state.step == 0:
            self.optimizer.state.clear()  # a phase begins without the momentum of the one before
        self.model.train()
        self.batches.set_epoch(state.epoch, start=state.step)
        if self.distiller.cache is not None:
            with self.fabric.autocast():
                self.distiller.cache.prepare(self.batches.view(state.epoch) or 0, self._heed)
        for batch in islice(self.batches, self.steps - state.step):
            set_lr(self.optimizer, self._lr_factor(phase, before + state.step))
            batch = replace(batch.to(self.fabric.device), epoch=number)
            with self.compiled:
                step = self.model(batch)
            self.fabric.backward(step.loss)
            self._guard(step.terms)
            self.optimizer.step()
            self.optimizer.zero_grad()
            state.step += 1
            correct = int((step.logits.argmax(dim=1) == batch.y).sum())
            terms = {"loss": step.loss.item()} | {name: term.item() for name, term in step.terms.items()}
            state.sums = _added([state.sums, {"#steps": 1, "#images": len(batch.y), "#correct": correct, **terms}])
            tick(f"epoch {state.epoch}  loss {terms['loss']:.3f}")
            self._heed()
        return recipe.optim.lr * self._lr_factor(phase, before)

    def _lr_factor(self, phase: Phase | None, done: int) -> float:
        """The rate of the next step of a phase, or of the main training, over the first rate, after `done` steps of it."""
        if phase is None:
            return lr_factor(done, self.recipe, self.steps)
        return (phase.lr or self.recipe.optim.lr) / self.recipe.optim.lr

    def _guard(self, terms: dict[str, Tensor]) -> None:
        """Stop at a gradient that is not finite, before it reaches the weights, and shorten one that is too long."""
        limit = self.recipe.optim.clip
        if limit is not None:
            norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=limit, error_if_nonfinite=False)
        elif self.recipe.train.precision == "16-mixed":
            return  # there an overflow is expected now and then: the step is left out and the scale halved
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self.distiller.parameters() if p.grad is not None])
        if self.recipe.train.precision != "16-mixed" and norm is not None and not bool(torch.isfinite(norm)):
            gradients = ((name, p.grad) for name, p in self.distiller.named_parameters() if p.grad is not None)
            name = next((name for name, grad in gradients if not torch.isfinite(grad).all()), "all of them together")
            values = ", ".join(f"{term}={value.item():g}" for term, value in terms.items())
            raise NonFiniteError(
                f"the gradient of {name!r} became NaN or infinite in epoch {self.state.epoch}, step {self.state.step + 1} (terms: "
                f"{values}); stopped before it reached the weights, the last good checkpoint is in {self.run.last}. Lower the "
                "learning rate, or clip with --set optim.clip=5"
            )

    def _heed(self) -> None:
        """Save where it is time, and stop where somebody asked for it: all processes after the same step."""
        self._save_or_stop(due=time.monotonic() - self.saved >= self.save_seconds)

    def _heed_stop(self) -> None:
        """Stop where somebody asked for it; between the batches of an evaluation."""
        self._save_or_stop(due=False)

    def _save_or_stop(self, *, due: bool) -> None:
        ask = torch.tensor([float(self.wish.asked), float(due and self.fabric.is_global_zero)], device=self.fabric.device)
        stop, save = (bool(value) for value in sum_of_all(ask))
        if stop or (save and self.state.step < self.steps):
            self._save()
        if stop:
            where = (
                f"in epoch {self.state.epoch} of {self.epochs}" if self.state.epoch <= self.epochs else "after the last epoch"
            )
            raise Stopped(f"stopped {where}; run the same command again to resume")

    def _save(self) -> None:
        self.run.must_be_there()
        self.state.seconds = time.monotonic() - self.began
        self.state.precision = self.fabric.strategy.precision.state_dict()
        state = {**asdict(self.state), "sums": objects_of_all(self.state.sums)}
        save_checkpoint(self.run.last, self.distiller, self.optimizer, state)
        self.saved = time.monotonic()

    def _row(self, lr: float) -> dict[str, Any]:
        """What is told of an epoch: mean loss and terms, accuracy on what was trained on and on what was held out."""
        state = self.state
        sums = _added(objects_of_all(state.sums))
        steps, images, correct = (sums.pop(name) for name in ("#steps", "#images", "#correct"))
        self._same_batch_norms()
        check_finite(self.run.last, self.distiller, state.epoch)
        held = self._evaluate(self.distiller.student, "val")
        state.seconds = time.monotonic() - self.began
        if held is not None and (state.best_val is None or held.top1 > state.best_val):
            state.best_val, state.best_val_epoch = held.top1, state.epoch
            if self.fabric.is_global_zero:
                self.run.must_be_there()
                save_weights(self.distiller.student, self.run.best_on_validation, {"epoch": str(state.epoch)})
        row = {"epoch": state.epoch, "lr": lr, "train_top1": 100 * correct / max(images, 1)}
        row |= {name: value / steps for name, value in sums.items()}
        row |= {"val_top1": None if held is None else held.top1, "seconds": state.seconds}
        if state.epoch == 1 and state.teacher_top1 is not None:
            row["teacher_top1"] = state.teacher_top1
        found = health(self.distiller, self.sample.to(self.fabric.device)) if self.fabric.is_global_zero else {}
        return row | ({"health": found} if found else {})

    def _same_batch_norms(self) -> None:
        """The first process's running statistics are the run's, as DDP has it; before an evaluation all take them."""
        for name, buffer in self.distiller.student.named_buffers() if several() else ():
            if name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked"):
                dist.broadcast(buffer, src=0)

    def _evaluate(self, student: nn.Module, split: str) -> Accuracy | None:
        if not len(getattr(self.data, split)):
            return None
        return judge(student, self._loader(split), description=f"evaluating on {split}", heed=self._heed_stop)[0]

    def _loader(self, split: str) -> Loader:
        part = getattr(self.data, split)
        return eval_loader(self.recipe, self.data, part, rank=self.fabric.global_rank, world=self.fabric.world_size)

    def _finish(self) -> Result:
        recipe, run, data, state = self.recipe, self.run, self.data, self.state
        student = self.distiller.export()
        unsync_batch_norms(student)
        if self.fabric.is_global_zero:  # before it is evaluated, so that what was trained is there whatever happens then
            run.must_be_there()
            save_student(
                student,
                run.student,
                model=recipe.student.model,
                num_classes=data.num_classes,
                classes=data.classes,
                mean=data.mean,
                std=data.std,
                size=data.image_size,
                resize=data.train.resize,
            )
        last, found = judge(student, self._loader("test"), description="evaluating on test", heed=self._heed_stop)
        held = self._evaluate(student, "val")
        if self.fabric.is_global_zero:
            run.must_be_there()
            found.save(run.predictions)
        wait_for_all()
        best = last if state.best_val_epoch == self.epochs else self._best_on_test(student)
        result = Result(
            last_test=last.top1,
            last_test_top5=last.top5,
            last_val=None if held is None else held.top1,
            best_val=state.best_val,
            best_val_epoch=state.best_val_epoch,
            best_val_test=None if best is None else best.top1,
            parameters=sum(parameter.numel() for parameter in student.parameters()),
            epochs=recipe.train.epochs,
            seconds=time.monotonic() - self.began,
            teacher_top1=state.teacher_top1,
        )
        if self.fabric.is_global_zero:
            run.finish(result)
        wait_for_all()
        return result

    def _best_on_test(self, student: nn.Module) -> Accuracy | None:
        """What the best epoch on the validation split gives on the test split; it is a figure beside, so its loss is only told."""
        path = self.run.best_on_validation
        if not path.exists():
            return None
        try:
            load_weights(student, path)
        except CheckpointError as error:
            say(f"{error}; its accuracy on test is left out")
            return None
        return self._evaluate(student, "test")


def _added(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of tables, name by name."""
    sums: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _teller(every: float = 10.0):
    """Plain lines for logs, where no bar is seen: the epochs' rows, no more than one in `every` seconds."""
    said = time.monotonic()

    def tell(epoch: int, epochs: int, row: dict) -> None:
        nonlocal said
        if not on_terminal() and time.monotonic() - said >= every:
            said = time.monotonic()
            val = "" if row["val_top1"] is None else f"  val {row['val_top1']:.2f} %"
            say(f"epoch {epoch}/{epochs}  loss {row['loss']:.3f}  train {row['train_top1']:.2f} %{val}")

    return tell
