"""Shipped models as something that takes images and gives logits, whatever kind of file they are in."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from letkd.data.loader import normalise
from letkd.deploy import worker
from letkd.deploy.process import KINDS, SECONDS, ModelProcess
from letkd.distiller.facts import Facts, facts_from, facts_from_json
from letkd.distiller.student import load_student, read_header
from letkd.errors import CheckpointError, LetkdError, NonFiniteError
from letkd.taps import as_logits

Places = list[tuple[str, list[int | None]]]  # type and shape of each input or output; None is an open size


class Runner(nn.Module):
    """A shipped model: uint8 images in, logits out; its facts say what is in between.

    Args:
        run: takes what `facts.input` says and gives logits.
        facts: of the file.
        name: the file, for errors.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], facts: Facts, name: object = "the model"):
        super().__init__()
        self.run, self.facts, self.name = run, facts, name

    @torch.no_grad()
    def forward(self, images: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b C"]:
        facts, x = self.facts, images
        if facts.input == "normalised":
            if facts.mean is None or facts.std is None:
                raise CheckpointError(
                    f"{self.name} takes normalised images, and its file does not say by which mean and std; "
                    "save it with save_student(…, mean=…, std=…)"
                )
            x = normalise(images, facts.mean, facts.std)
        if "batch" in facts.dynamic:
            return self._checked(self.run(x), len(x))
        parts = [self._checked(self.run(_filled(part, facts.batch)), facts.batch) for part in x.split(facts.batch)]
        return torch.cat(parts)[: len(x)]

    def _checked(self, logits: Tensor, n: int) -> Tensor:
        if logits.shape != (n, self.facts.num_classes):
            raise CheckpointError(
                f"{self.name} is damaged: for {n} images it gives {list(logits.shape)} and should give "
                f"{[n, self.facts.num_classes]}; export it again"
            )
        if not torch.isfinite(logits).all():
            raise NonFiniteError(f"{self.name} gives logits that are NaN or infinite; it diverged in training, or is damaged")
        return logits


def _filled(images: Tensor, n: int) -> Tensor:
    """The last batch of a model that takes n images at once: its first image again, as often as needed."""
    return images if len(images) == n else torch.cat([images, images[:1].expand(n - len(images), -1, -1, -1)])


def student_runner(student: nn.Module, facts: Facts, name: object = "the student") -> Runner:
    """A student in memory."""
    student.eval()

    def run(x: Tensor) -> Tensor:
        try:
            return as_logits(student(x), student)
        except RuntimeError as error:  # torch's only class for wrong shapes
            if "memory" in str(error):
                raise
            why = (str(error).splitlines() or [""])[0]
            raise CheckpointError(
                f"{name} does not run on images of {list(x.shape)} ({why}); check the size it says"
            ) from error

    return Runner(run, facts, name)


def program_runner(content: bytes, path: object) -> Runner:
    """A `torch.export` file that this process has just written; `open_model` opens those of others."""
    opened = worker.open_program(content, torch.get_num_threads())
    return Runner(_with_tensors(opened), facts_from_json(opened.facts, path), path)


def onnx_runner(content: bytes, path: object) -> Runner:
    """An ONNX file that this process has just written; `open_model` opens those of others."""
    need("onnxruntime")
    opened = worker.open_onnx(content, torch.get_num_threads())
    return Runner(_with_tensors(opened), facts_from_json(opened.facts, path), path)


def open_model(path: str | Path, *, student: str | None = None, trust: bool = False, seconds: float = SECONDS) -> Runner:
    """Open a shipped model by its suffix: `.onnx`, a student's `.safetensors`, or with `trust` a `.pt2`.

    Args:
        student: the network's name, for a student file whose network is none of the zoo.
        trust: open a `.pt2` although that can run any code in it.
        seconds: that opening an `.onnx` or `.pt2` file, or one batch, may take; they run in a process of their own.
    """
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder; name a model file: one that `letkd export` wrote, or the student's own in it"
        )
    if not path.is_file():
        raise CheckpointError(f"there is no model file {path}; check the path, or make it with `letkd export`")
    if path.suffix == ".safetensors":
        network = load_student(path, model=student)
        return student_runner(network, with_size(facts_from(read_header(path), path), network), path)
    if path.suffix not in KINDS:
        raise CheckpointError(f"{path} is no model file: those end in {', '.join([*KINDS, '.safetensors'])}")
    if path.suffix == ".pt2" and not trust:
        raise CheckpointError(
            f"{path} was not opened: opening a torch.export file can run any code that is in it; if you trust where it comes from, "
            "add `trust=True`, otherwise use an .onnx or .safetensors file, which cannot run code"
        )
    if path.suffix == ".onnx" and importlib.util.find_spec("onnxruntime") is None:
        need("onnxruntime")
    process = ModelProcess(path, seconds)
    facts = facts_from_json(process.about.get("facts"), path)
    if path.suffix == ".onnx":
        must_fit_graph(facts, process.about["inputs"], process.about["outputs"], path)
    return Runner(process, facts, path)


def must_fit_graph(facts: Facts, inputs: Places, outputs: Places, path: object) -> None:
    """Raise if an ONNX graph does not take the images, or give the logits, that the file's facts say."""
    size = facts.size or (None, None)
    sizes = [None if axis in facts.dynamic else n for axis, n in zip(("height", "width"), size, strict=True)]
    batch = None if "batch" in facts.dynamic else facts.batch
    takes = ("tensor(uint8)" if facts.input == "uint8" else "tensor(float)", [batch, 3, *sizes])
    gives = ("tensor(float)", [batch, facts.num_classes])
    for what, has, said in (("takes", inputs, takes), ("gives", outputs, gives)):
        fits = len(has) == 1 and has[0][0] == said[0] and len(has[0][1]) == len(said[1])
        if not fits or any(None not in (one, two) and one != two for one, two in zip(has[0][1], said[1], strict=True)):
            found = ", ".join(_place(*place) for place in has[:4]) or "nothing"
            raise CheckpointError(
                f"{path} is damaged: its graph {what} {found}, and its facts say {_place(*said)}; export it again"
            )


def _place(kind: str, shape: list[int | None]) -> str:
    return f"{kind} [{', '.join('?' if size is None else str(size) for size in shape)}]"


def _with_tensors(opened: worker.Opened) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.from_numpy(opened.run(x.contiguous().numpy()))


def with_size(facts: Facts, network: nn.Module) -> Facts:
    """Student files of training runs do not say the images' size; a network of the zoo says which it was made for."""
    size = getattr(network, "input_size", None)
    return facts if facts.size is not None or size is None else facts.replace(size=(size[-2], size[-1]))


def need(*packages: str) -> Any:
    """Import what only the `onnx` extra brings, or say how to get it; returns the last."""
    module = None
    for package in packages:
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise LetkdError(f"ONNX files need {error.name}, which is not installed: pip install 'letkd[onnx]'") from None
    return module
