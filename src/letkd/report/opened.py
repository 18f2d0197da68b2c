"""Open finished runs: data, student and trained distiller, each if its files are available."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.data import AnySplit, Augment, Dataset, Loader
from letkd.data.loader import eval_batch, normalise
from letkd.distiller import Distiller
from letkd.distiller.facts import facts_from
from letkd.distiller.student import load_student, read_header
from letkd.distiller.teacher_input import AdaptedTeacher
from letkd.errors import LetkdError, RunError
from letkd.models import list_models
from letkd.models.cost import macs
from letkd.progress import say
from letkd.report.collect import Run
from letkd.runs.checkpoint import load_trained
from letkd.runs.evaluation import Predictions, predict
from letkd.training.build import build_distiller, read_data
from letkd.training.teachers import build_teacher

What = TypeVar("What")


@dataclass
class RunOpener:
    """Opens runs for a report and collects messages on what could not be opened.

    Args:
        root: folder of the data sets' files, instead of the one in each recipe.
        trust: also build custom networks, named as `file.py:function` in a recipe; this runs their code.
    """

    root: Path | None = None
    trust: bool = False
    missing: list[str] = field(default_factory=list)
    _data: dict[str, Dataset] = field(default_factory=dict)

    def attempt(self, what: str, open_it: Callable[[], What]) -> What | None:
        """The result of `open_it`; if it fails, None, and the reason is added to `missing`."""
        try:
            return open_it()
        except (LetkdError, OSError) as error:
            sentence = f"{what} left out: {str(error).splitlines()[0]}"
            if sentence not in self.missing:
                self.missing.append(sentence)
            return None

    def note(self, sentence: str) -> None:
        """Log a message now, and add it to the page."""
        say(sentence)
        self.missing.append(sentence)

    def data(self, run: Run) -> Dataset:
        """The run's data set; read once for all runs that use it."""
        recipe = run.recipe
        if self.root is not None:
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": str(self.root)})})
        key = recipe.data.model_dump_json()
        if key not in self._data:
            self._data[key] = read_data(recipe)
        return self._data[key]

    def tested(self, run: Run) -> Dataset:
        """The run's data set, which must have labelled test images."""
        data = self.data(run)
        if not data.has_labels:
            raise RunError(f"{data.name} has no labels and no test images")
        return data

    def student(self, run: Run) -> nn.Module:
        """The exported student."""
        path = run.folder.student
        if not path.is_file():
            raise RunError(f"{run.path} has no {path.name}; finish the run with the command that started it")
        self._must_be_known(run, read_header(path)["model"])
        return load_student(path, model=run.recipe.student.model if self.trust else None)

    def teacher(self, run: Run) -> nn.Module:
        """The run's teacher, with its own preprocessing."""
        if run.recipe.teacher is None or run.recipe.teacher.weights is None:
            raise RunError(f"{run.path} had no teacher")
        self._must_be_known(run, run.recipe.teacher.model)
        return AdaptedTeacher(*build_teacher(run.recipe.teacher, self.data(run))).eval()

    def macs(self, run: Run) -> int:
        """Multiply-accumulates of the exported student for one image."""
        student = self.student(run)
        facts = facts_from(read_header(run.folder.student), run.folder.student)
        return macs(student, torch.zeros(1, 3, *(facts.size or self.data(run).image_size)))

    def classes(self, run: Run) -> tuple[str, ...]:
        """The names of the classes in the student's file."""
        facts = facts_from(read_header(run.folder.student), run.folder.student)
        return tuple(_printable(facts.name_of(c)) for c in range(facts.num_classes))

    def predictions(self, run: Run) -> Predictions:
        """The student's predictions on the test images: from the run's file, or by running the student."""
        file = run.folder.predictions
        if file.exists():
            return Predictions.load(file, len(self.classes(run)))
        data = self.tested(run)
        loader = Loader(data.test, eval_batch(data.test.image_size, run.recipe.data.batch_size), mean=data.mean, std=data.std)
        return predict(self.student(run), loader, description=f"test images of {run.path.name}")

    def distiller(self, run: Run) -> Distiller:
        """Student, teacher, templates and fitted supervision from the last checkpoint."""
        networks = (run.recipe.student, run.recipe.teacher)
        self._must_be_known(run, *(network.model for network in networks if network is not None))
        last = run.folder.last
        if not last.is_dir():
            raise RunError(f"{run.path} has no checkpoint in {last.name}/, which contains the templates")
        distiller = build_distiller(run.recipe, self.data(run))
        load_trained(distiller, last)
        return distiller.eval()

    def _must_be_known(self, run: Run, *models: str) -> None:
        for model in models:
            if model not in list_models() and not self.trust:
                raise RunError(
                    f"{run.path} names the network {model!r}, which is not in the zoo; code named in a file is not run unless "
                    "you trust it and add --trust"
                )


def _printable(name: str) -> str:
    """A name from a file, with characters that UTF-8 cannot encode replaced."""
    return name.encode("utf-8", "replace").decode()


def balanced_sample(labels: Tensor, n: int) -> Tensor:
    """Indices of n images, balanced over the classes as far as possible: the first images of each class, sorted by class.

    Images without a label are left out, unless no image has one.
    """
    if (labels >= 0).any() and (labels < 0).any():
        labelled = (labels >= 0).nonzero().flatten()
        return labelled[balanced_sample(labels[labelled], n)]
    rank = torch.zeros_like(labels)
    for c in labels.unique():
        at = (labels == c).nonzero().flatten()
        rank[at] = torch.arange(len(at))
    order = sorted(range(len(labels)), key=lambda i: (int(rank[i]), int(labels[i])))[:n]
    return torch.tensor(sorted(order, key=lambda i: (int(labels[i]), i)), dtype=torch.int64)


def batch_of(data: Dataset, split: AnySplit, index: Tensor) -> tuple[Batch, Tensor]:
    """Images of a split without augmentation: normalised in a batch, and raw as uint8 `[b 3 h w]`."""
    images = next(iter(split.read([(index, ())], Augment())))
    return Batch(normalise(images, data.mean, data.std), split.labels[index], index), images
