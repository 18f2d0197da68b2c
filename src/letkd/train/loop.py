"""One training run, from a recipe to a result: the only file that imports Fabric."""

import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

from letkd.data import Dataset
from letkd.distiller import Distiller
from letkd.models import load_weights, save_weights
from letkd.progress import bar, on_terminal, say
from letkd.recipes.schema import Recipe
from letkd.student import save_student
from letkd.train.build import build_distiller, eval_loader, fit, read_data, train_loader
from letkd.train.checkpoint import load_checkpoint, save_checkpoint
from letkd.train.evaluate import Accuracy, evaluate
from letkd.train.optim import lr_at, phase_at, sgd
from letkd.train.runs import Result, RunFolder


def train(recipe: Recipe, folder: str | Path, *, supervision: str | Path | None = None) -> Result:
    """Train as the recipe says, in `folder`; a run that was stopped goes on, one that is finished just gives its result.

    Args:
        supervision: folder with fitted supervisions to share between runs; `folder/supervision` where not given.

    The last epoch is what is reported. The epoch that was best on the validation split is kept beside it. The test split is
    read once, at the end.
    """
    from lightning_fabric import Fabric

    run = RunFolder(folder, recipe)
    if run.result is not None:
        say(f"{run.path}: finished already, {run.result.last_test:.2f} % on test")
        return run.result
    started = time.monotonic()
    fabric = Fabric(accelerator="auto", devices=1, precision=recipe.train.precision)
    fabric.seed_everything(recipe.train.seed, verbose=False)
    data = read_data(recipe)
    distiller = build_distiller(recipe, data)
    run.begin()
    fit(distiller, recipe, data, supervision or run.path / "supervision")
    model, optimizer = fabric.setup(distiller, sgd(distiller, recipe.optim))
    batches = train_loader(recipe, data)
    extra = {"best_val": None, "best_val_epoch": None, "seconds": 0.0}
    resumed = load_checkpoint(run.last, distiller, optimizer)
    first = 1
    if resumed is not None:
        first, extra = resumed[0] + 1, resumed[1]
        run.rewind(resumed[0])
        say(f"{run.path}: goes on after epoch {resumed[0]}")
    before = extra["seconds"]
    steps = min(len(batches), recipe.train.steps or len(batches))
    tell = _teller()
    epochs = recipe.train.epochs + sum(phase.epochs for phase in recipe.phases)
    with bar(f"{recipe.title or 'training'}, seed {recipe.train.seed}", (epochs + 1 - first) * steps) as tick:
        for epoch in range(first, epochs + 1):
            batches.set_epoch(epoch)
            number, phase = phase_at(epoch, recipe)
            distiller.set_weights(recipe.weights if phase is None else phase.weights)
            lr = lr_at(number, recipe.optim) if phase is None else (phase.lr or recipe.optim.lr)
            for group in optimizer.param_groups:
                group["lr"] = lr
            if number == 1:
                optimizer.state.clear()  # a phase begins without the momentum of the one before
            model.train()
            seen, correct, sums = 0, 0, {}
            for batch in islice(batches, steps):
                batch = replace(batch.to(fabric.device), epoch=number)
                step = model(batch)
                fabric.backward(step.loss)
                optimizer.step()
                optimizer.zero_grad()
                seen += len(batch.y)
                correct += int((step.logits.argmax(dim=1) == batch.y).sum())
                for name, term in {"loss": step.loss, **step.terms}.items():
                    sums[name] = sums.get(name, 0.0) + term.item()
                tick(f"epoch {epoch}  loss {step.loss.item():.3f}")
            held = evaluate(distiller.student, eval_loader(recipe, data, data.val)) if len(data.val) else None
            extra["seconds"] = before + time.monotonic() - started
            if held is not None and (extra["best_val"] is None or held.top1 > extra["best_val"]):
                extra |= {"best_val": held.top1, "best_val_epoch": epoch}
                save_weights(distiller.student, run.best_on_validation, {"epoch": str(epoch)})
            row = {"epoch": epoch, "lr": lr, "train_top1": 100 * correct / max(seen, 1)}
            row |= {name: value / steps for name, value in sums.items()}
            row |= {"val_top1": None if held is None else held.top1, "seconds": extra["seconds"]}
            # The row first: one too many is dropped when the run goes on, one too few could not be made up for.
            run.log(row)
            save_checkpoint(run.last, distiller, optimizer, epoch=epoch, extra=extra)
            tell(epoch, epochs, row)

    return _finish(run, distiller, recipe, data, extra, before + time.monotonic() - started)


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


def _finish(run: RunFolder, distiller: Distiller, recipe: Recipe, data: Dataset, extra: dict, seconds: float) -> Result:
    student = distiller.export()
    test = eval_loader(recipe, data, data.test)
    last = evaluate(student, test)
    held = evaluate(student, eval_loader(recipe, data, data.val)) if len(data.val) else None
    save_student(
        student,
        run.student,
        model=recipe.student.model,
        num_classes=data.num_classes,
        classes=data.classes,
        mean=data.mean,
        std=data.std,
    )
    best: Accuracy | None = None
    if run.best_on_validation.exists():
        load_weights(student, run.best_on_validation)
        best = evaluate(student, test)
    result = Result(
        last_test=last.top1,
        last_test_top5=last.top5,
        last_val=None if held is None else held.top1,
        best_val=extra["best_val"],
        best_val_epoch=extra["best_val_epoch"],
        best_val_test=None if best is None else best.top1,
        parameters=sum(parameter.numel() for parameter in student.parameters()),
        epochs=recipe.train.epochs,
        seconds=seconds,
    )
    run.finish(result)
    return result
