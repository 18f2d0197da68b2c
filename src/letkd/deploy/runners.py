"""Shipped models as something that takes images and gives logits, whatever kind of file they lie in."""

import importlib
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sympy
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from letkd.data.loader import normalise
from letkd.deploy.facts import KEY, Facts, facts_from, facts_from_json
from letkd.errors import CheckpointError, LetkdError
from letkd.student import load_student, read_header
from letkd.taps import as_logits

FACTS_FILE = f"{KEY}.json"
# What torch writes into the sizes of an exported program.
FUNCTIONS = {
    *("Symbol", "Integer", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Mod"),
    *("FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "PythonMod", "ModularIndexing", "CeilToInt", "FloorToInt"),
    *("Equality", "Unequality", "LessThan", "StrictLessThan", "GreaterThan", "StrictGreaterThan", "And", "Or", "Not"),
}


class Runner(nn.Module):
    """A shipped model: uint8 images in, logits out; its facts say what lies between.

    Args:
        run: takes what `facts.input` says and gives logits.
        facts: of the file.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], facts: Facts):
        super().__init__()
        self.run, self.facts = run, facts

    @torch.no_grad()
    def forward(self, images: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b C"]:
        if self.facts.input == "uint8":
            return self.run(images)
        if self.facts.mean is None or self.facts.std is None:
            raise CheckpointError(
                "the model takes normalised images, and neither its file nor you say by which mean and std; "
                "save it with save_student(…, mean=…, std=…)"
            )
        return self.run(normalise(images, self.facts.mean, self.facts.std))


def student_runner(student: nn.Module, facts: Facts) -> Runner:
    """A student in memory."""
    student.eval()
    return Runner(lambda x: as_logits(student(x), student), facts)


def program_runner(content: bytes, path: object) -> Runner:
    """A `torch.export` file; letkd's own code plays no part in running it."""
    extra = {FACTS_FILE: ""}
    try:
        with _no_code():
            program = torch.export.load(io.BytesIO(content), extra_files=extra)
    except Exception as error:  # damaged archives make the reader fail in many ways
        raise CheckpointError(f"{path} is damaged or no torch.export file ({type(error).__name__}); export it again") from error
    return Runner(program.module(), facts_from_json(_text(extra[FACTS_FILE]), path))


@contextmanager
def _no_code() -> Iterator[None]:
    """While this lasts torch runs no code out of an archive: it refuses pickles, and sizes that are more than arithmetic.

    torch.export unpickles what an archive says is no plain tensor, and sympy evaluates the sizes in it as Python.
    """
    original = sympy.sympify

    def arithmetic(text: Any, *args: Any, **options: Any) -> Any:
        if isinstance(text, str):
            plain = re.sub(r"Symbol\('\w+'", "Symbol(", text)
            if not re.fullmatch(r"[\w\s+*/(),<>=-]*", plain) or set(re.findall(r"(\w+)\s*\(", plain)) - FUNCTIONS:
                raise ValueError(f"{text!r:.60} is no size")
        return original(text, *args, **options)

    with patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}), patch.object(sympy, "sympify", arithmetic):
        yield


def onnx_runner(content: bytes, path: object) -> Runner:
    """An ONNX file, run by onnxruntime on as many threads as torch has."""
    runtime = need("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no class
        raise CheckpointError(f"{path} is damaged or no ONNX file ({type(error).__name__}); export it again") from error
    facts = facts_from_json(session.get_modelmeta().custom_metadata_map.get(KEY), path)
    name = session.get_inputs()[0].name

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: x.numpy()})[0])

    return Runner(run, facts)


def open_model(path: str | Path, *, student: str | None = None) -> Runner:
    """Open a shipped model by its suffix: `.onnx`, `.pt2`, or a student's `.safetensors`.

    Args:
        student: the network's name, for a student file whose network is none of the zoo.
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
        return student_runner(network, with_size(facts_from(read_header(path), path), network))
    readers = {".onnx": onnx_runner, ".pt2": program_runner}
    if path.suffix not in readers:
        raise CheckpointError(f"{path} is no model file: those end in {', '.join([*readers, '.safetensors'])}")
    return readers[path.suffix](path.read_bytes(), path)


def with_size(facts: Facts, network: nn.Module) -> Facts:
    """Student files of training runs do not say the images' size; a network of the zoo says which it was made for."""
    size = getattr(network, "input_size", None)
    return facts if facts.size is not None or size is None else replace(facts, size=(size[-2], size[-1]))


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def need(*packages: str) -> Any:
    """Import what only the `onnx` extra brings, or say how to get it; returns the last."""
    module = None
    for package in packages:
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise LetkdError(f"ONNX files need {error.name}, which is not installed: pip install 'letkd[onnx]'") from None
    return module
