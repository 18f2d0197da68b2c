"""The end of a run: export, evaluation on the test split, result."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from letkd.data import Dataset, Loader
from letkd.distiller import Distiller
from letkd.distiller.student import save_student
from letkd.distributed.processes import wait_for_all
from letkd.distributed.sync_bn import unsync_batch_norms
from letkd.errors import CheckpointError
from letkd.models import load_weights
from letkd.progress import say
from letkd.runs.evaluation import Accuracy, Predictions, score
from letkd.runs.folder import RunFolder
from letkd.runs.records import Result
from letkd.training.build import HEAD, count_logits, eval_loader
from letkd.training.heldout import held_out_terms
from letkd.training.probe import probe_student
from letkd.training.state import Clock, State
from letkd.training.steps import Steps

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Evaluation:
    """Evaluates students on the splits of a run's data.

    Args:
        check_stop: called before each batch; it may raise to stop.
    """

    def __init__(self, fabric: "Fabric", run: RunFolder, data: Dataset, check_stop: Callable[[], object]):
        self.fabric, self.run, self.data, self._check_stop = fabric, run, data, check_stop

    def on(self, split: str, student: nn.Module) -> Accuracy | None:
        """None if the split is empty or has no labels."""
        return self.predict(split, student)[0] if self.data.has_labels and len(getattr(self.data, split)) else None

    def held_out(self, distiller: Distiller) -> dict[str, float]:
        """The distillation terms on the validation images, if the data has no labels."""
        if self.data.has_labels or not len(self.data.val):
            return {}
        with self.fabric.autocast():
            return held_out_terms(distiller, self._loader("val"), check_stop=self._check_stop)

    def probe(self, student: nn.Module) -> dict[str, float]:
        """Accuracy of classifiers on the student's features, if the recipe names images for it; computed by the first process."""
        recipe = self.run.recipe
        if recipe.probe is None or not self.fabric.is_global_zero:
            return {}
        return probe_student(student, recipe.student.taps, self.data, recipe.probe)

    def predict(self, split: str, student: nn.Module) -> tuple[Accuracy, Predictions]:
        return score(student, self._loader(split), description=f"evaluating on {split}", check_stop=self._check_stop)

    def _loader(self, split: str) -> Loader:
        part = getattr(self.data, split)
        return eval_loader(self.run.recipe, self.data, part, rank=self.fabric.global_rank, world=self.fabric.world_size)


def finish(evaluation: Evaluation, steps: Steps, state: State, clock: Clock) -> Result:
    """Write the students and evaluate them on the test split."""
    run, first = evaluation.run, evaluation.fabric.is_global_zero
    student = _exported(evaluation, steps)
    averaged = None
    if steps.average is not None:
        with steps.average.in_place():
            averaged = _exported(evaluation, steps, averaged=True)
    last = None
    if evaluation.data.has_labels:
        last, predictions = evaluation.predict("test", student)
        if first:
            run.check_present()
            predictions.save(run.predictions)
    val = evaluation.on("val", student)
    held_out, probed = evaluation.held_out(steps.distiller), evaluation.probe(student)
    wait_for_all()
    ema = None if averaged is None else evaluation.on("test", averaged)
    ema_val = None if averaged is None else evaluation.on("val", averaged)
    best = last if state.best_val_epoch == run.epochs else _best_on_test(evaluation, student)
    result = Result(
        last_test=None if last is None else last.top1,
        last_test_top5=None if last is None else last.top5,
        last_val=None if val is None else val.top1,
        best_val=state.best_val,
        best_val_epoch=state.best_val_epoch,
        best_val_test=None if best is None else best.top1,
        parameters=sum(parameter.numel() for parameter in student.parameters()),
        epochs=run.recipe.train.epochs,
        seconds=clock.seconds(),
        cpu_seconds=clock.cpu_seconds(),
        teacher_top1=state.teacher_top1,
        ema_test=None if ema is None else ema.top1,
        ema_val=None if ema_val is None else ema_val.top1,
        held_out=held_out,
        probe=probed,
        auto_weights=steps.distiller.auto_weights(),
    )
    if first:
        run.finish(result)
    wait_for_all()
    return result


def _exported(evaluation: Evaluation, steps: Steps, *, averaged: bool = False) -> nn.Module:
    """The exported student. It is written before it is evaluated, so that an error in the evaluation does not lose it."""
    run, data = evaluation.run, evaluation.data
    student = steps.distiller.export()
    unsync_batch_norms(student)
    if evaluation.fabric.is_global_zero:
        run.check_present()
        save_student(
            student,
            run.averaged_student if averaged else run.student,
            model=run.recipe.student.model,
            num_classes=data.num_classes or count_logits(student, torch.zeros(1, 3, *data.image_size)) or HEAD,
            classes=data.classes,
            mean=data.mean,
            std=data.std,
            size=data.image_size,
            resize=data.train.resize,
        )
    return student


def _best_on_test(evaluation: Evaluation, student: nn.Module) -> Accuracy | None:
    """Test accuracy of the best validation epoch. It is an additional figure, so a missing or damaged file is only reported."""
    path = evaluation.run.best_on_validation
    if not path.exists():
        return None
    try:
        load_weights(student, path)
    except CheckpointError as error:
        say(f"{error}; its test accuracy is omitted")
        return None
    return evaluation.on("test", student)
