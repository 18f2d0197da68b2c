"""Shipped models of any file format as modules from images to logits."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from letkd.batch import input_size_of
from letkd.data.loader import normalise
from letkd.deploy import worker
from letkd.deploy.process import KINDS, SECONDS, ModelProcess
from letkd.distiller.facts import Facts, facts_from, facts_from_json
from letkd.distiller.student import load_student, read_header
from letkd.errors import CheckpointError, LetkdError, NonFiniteError
from letkd.taps import as_logits

Ports = list[tuple[str, list[int | None]]]  # type and shape of each input or output; None is a dynamic size


class Runner(nn.Module):
    """A shipped model: takes uint8 images, returns logits. Its facts describe the preprocessing.

    Args:
        run: from the input that `facts.input` names to logits.
        facts: facts of the file.
        name: name of the file, for errors.
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
                    f"{self.name} takes normalised images, but its file does not contain mean and std; "
                    "save it with save_student(…, mean=…, std=…)"
                )
            x = normalise(images, facts.mean, facts.std)
        if "batch" in facts.dynamic:
            return self._checked(self.run(x), len(x))
        parts = [self._checked(self.run(_padded(part, facts.batch)), facts.batch) for part in x.split(facts.batch)]
        return torch.cat(parts)[: len(x)]

    def _checked(self, logits: Tensor, n: int) -> Tensor:
        if logits.shape != (n, self.facts.num_classes):
            raise CheckpointError(
                f"{self.name} is damaged: for {n} images it returns the shape {list(logits.shape)} instead of "
                f"{[n, self.facts.num_classes]}; export it again"
            )
        if not torch.isfinite(logits).all():
            raise NonFiniteError(
                f"{self.name} returns logits that are NaN or infinite; it diverged in training, or the file is damaged"
            )
        return logits


def _padded(images: Tensor, n: int) -> Tensor:
    """Pad a batch to n images by repeating its first image, for a model with a fixed batch size."""
    return images if len(images) == n else torch.cat([images, images[:1].expand(n - len(images), -1, -1, -1)])


def student_runner(student: nn.Module, facts: Facts, name: object = "the student") -> Runner:
    """A runner for a student in memory."""
    student.eval()

    def run(x: Tensor) -> Tensor:
        try:
            return as_logits(student(x), student)
        except RuntimeError as error:  # torch's only class for wrong shapes
            if "memory" in str(error):
                raise
            why = (str(error).splitlines() or [""])[0]
            raise CheckpointError(
                f"{name} does not run on images of shape {list(x.shape)} ({why}); check the image size in its file"
            ) from error

    return Runner(run, facts, name)


def program_runner(content: bytes, path: object) -> Runner:
    """A runner for a `torch.export` file written by this process; use `open_model` for other files."""
    opened = worker.open_program(content, torch.get_num_threads())
    return Runner(_with_tensors(opened), facts_from_json(opened.facts, path), path)


def onnx_runner(content: bytes, path: object) -> Runner:
    """A runner for an ONNX file written by this process; use `open_model` for other files."""
    need("onnxruntime")
    opened = worker.open_onnx(content, torch.get_num_threads())
    return Runner(_with_tensors(opened), facts_from_json(opened.facts, path), path)


def open_model(path: str | Path, *, student: str | None = None, trust: bool = False, seconds: float = SECONDS) -> Runner:
    """Open a shipped model by its suffix: `.onnx`, `.safetensors` (a student), or with `trust` `.pt2`.

    Args:
        student: name of the network, for a student file whose network is not in the zoo.
        trust: allow `.pt2` files, which can run any code they contain.
        seconds: time limit for opening an `.onnx` or `.pt2` file, and for each batch; they run in a separate process.
    """
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder; name a model file: one written by `letkd export`, or the student file in the folder"
        )
    if not path.is_file():
        raise CheckpointError(f"there is no model file {path}; check the path, or create it with `letkd export`")
    if path.suffix == ".safetensors":
        network = load_student(path, model=student)
        return student_runner(network, with_size(facts_from(read_header(path), path), network), path)
    if path.suffix not in KINDS:
        raise CheckpointError(f"{path} is not a model file: their names end in {', '.join([*KINDS, '.safetensors'])}")
    if path.suffix == ".pt2" and not trust:
        raise CheckpointError(
            f"{path} was not opened: opening a torch.export file can run any code that is in it; if you trust its source, "
            "add `trust=True`, otherwise use an .onnx or .safetensors file, which cannot run code"
        )
    if path.suffix == ".onnx" and importlib.util.find_spec("onnxruntime") is None:
        need("onnxruntime")
    process = ModelProcess(path, seconds)
    facts = facts_from_json(process.about.get("facts"), path)
    if path.suffix == ".onnx":
        must_fit_graph(facts, process.about["inputs"], process.about["outputs"], path)
    return Runner(process, facts, path)


def must_fit_graph(facts: Facts, inputs: Ports, outputs: Ports, path: object) -> None:
    """Raise if inputs or outputs of an ONNX graph do not match the file's facts."""
    size = facts.size or (None, None)
    sizes = [None if axis in facts.dynamic else n for axis, n in zip(("height", "width"), size, strict=True)]
    batch = None if "batch" in facts.dynamic else facts.batch
    takes = ("tensor(uint8)" if facts.input == "uint8" else "tensor(float)", [batch, 3, *sizes])
    returns = ("tensor(float)", [batch, facts.num_classes])
    for what, actual, expected in (("takes", inputs, takes), ("returns", outputs, returns)):
        fits = len(actual) == 1 and actual[0][0] == expected[0] and len(actual[0][1]) == len(expected[1])
        if not fits or any(None not in (a, b) and a != b for a, b in zip(actual[0][1], expected[1], strict=True)):
            found = ", ".join(_port(*port) for port in actual[:4]) or "nothing"
            raise CheckpointError(
                f"{path} is damaged: its graph {what} {found}, but its facts say {_port(*expected)}; export it again"
            )


def _port(kind: str, shape: list[int | None]) -> str:
    return f"{kind} [{', '.join('?' if size is None else str(size) for size in shape)}]"


def _with_tensors(opened: worker.OpenedFile) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.from_numpy(opened.run(x.contiguous().numpy()))


def with_size(facts: Facts, network: nn.Module) -> Facts:
    """Add the image size from the network, if the facts have none: student files of training runs do not contain it."""
    size = input_size_of(network)
    return facts if facts.size is not None or size is None else facts.replace(size=size[1:])


def need(*packages: str) -> Any:
    """Import packages of the `onnx` extra, or raise an error that says how to install them; returns the last one."""
    module = None
    for package in packages:
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise LetkdError(f"ONNX files need {error.name}, which is not installed: pip install 'letkd[onnx]'") from None
    return module
