"""Export of a student to a file that runs without letkd (torch.export, ONNX), and comparison with the student."""

import io
import logging
import re
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode

from letkd.deploy.runners import Runner, need, onnx_runner, program_runner, student_runner
from letkd.deploy.worker import KEY
from letkd.distiller.facts import Axis, Facts
from letkd.errors import ExportError, LetkdError
from letkd.layer.folded import fold_batch_norms
from letkd.modules import copied
from letkd.progress import say
from letkd.taps import as_logits

TOLERANCE = 1e-3  # relative to max(1, largest logit); float32 rounding gives about 1e-6


class Shipped(nn.Module):
    """A student as it is exported: takes images as the facts describe, returns logits.

    logits = student((images / 255 − mean) / std)        if the facts' input is uint8
    """

    mean: Tensor
    std: Tensor

    def __init__(self, student: nn.Module, facts: Facts):
        super().__init__()
        self.student = student
        self.raw = facts.input == "uint8"
        for name in ("mean", "std"):
            values = torch.tensor(getattr(facts, name) or [0.0], dtype=torch.float64)
            self.register_buffer(name, (255 * values).float()[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        if self.raw:
            images = (images.float() - self.mean) / self.std
        return as_logits(self.student(images), self.student)


@dataclass(frozen=True)
class Traced:
    """The graph of a student, its facts, and the number of BNs folded into convolutions."""

    program: ExportedProgram
    facts: Facts
    folded: int


def trace(
    student: nn.Module, facts: Facts, *, fold: bool = True, batch: int | None = None, any_size: bool | None = None
) -> Traced:
    """Trace a student with `torch.export`.

    Args:
        student: in eval mode; not modified.
        facts: `size` must be known, `mean` and `std` too if the input is uint8.
        fold: fold each BN into the preceding convolution, if nothing else reads that convolution's output.
        batch: images per call; None: any number, or 1 if torch.export can only trace the network at one batch size.
        any_size: whether height and width may differ between calls; None: only if the network is fully convolutional.
    """
    if (size := facts.size) is None:
        raise ExportError("the size of the images is unknown; give their height and width with `size=`")
    if facts.input == "uint8" and (facts.mean is None or facts.std is None):
        raise ExportError("mean and std are unknown, so the file cannot normalise images itself; use `input=normalised`")
    facts = facts.replace(batch=batch or 1)
    model = Shipped(copied(student), facts).eval().requires_grad_(False)
    must_take_rgb(model, facts, size)
    program, dynamic = _trace(model, facts, size, batch, any_size)
    folded = 0
    if fold:
        program, folded = _folded(model, program, facts, size, dynamic)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # contains paths of source files on this machine
    return Traced(program, facts.replace(dynamic=dynamic), folded)


def as_program(traced: Traced) -> bytes:
    """The content of a `.pt2` file for `torch.export.load`, with the facts in its extra file `letkd.json`."""
    file = io.BytesIO()
    with quietly():
        torch.export.save(traced.program, file, extra_files={f"{KEY}.json": traced.facts.as_json()})
    return file.getvalue()


def as_onnx(traced: Traced, opset: int | None = None) -> bytes:
    """The content of an ONNX file with input `images` and output `logits`; the facts are in its metadata under `letkd`.

    Args:
        opset: version of the ONNX operators; torch's default if None.
    """
    onnx = need("onnxruntime", "onnxscript", "onnx")
    try:
        with quietly():
            exported = torch.onnx.export(
                traced.program, (), dynamo=True, verbose=False, output_names=["logits"], opset_version=opset
            )
    except Exception as error:  # torch.onnx's errors have no common class
        other = "`to=torch-export`" if opset is None else "without `opset=`"
        raise ExportError(f"torch.onnx cannot write the network: {_first_line(error)}; try {other}") from error
    if exported is None:
        raise ExportError("torch.onnx returned no model; update torch and onnxscript")
    model = exported.model_proto
    version = next(part.version for part in model.opset_import if part.domain in ("", "ai.onnx"))
    if opset not in (None, version):
        raise ExportError(
            f"`opset={opset}`: the network's operators can only be written in opset {version}; use that opset or omit the option"
        )
    graph = model.graph
    # Remove leftovers of tracing: paths of source files on this machine, and generated names of dimensions.
    for part in (*graph.node, *graph.input, *graph.output, *graph.initializer, graph, model):
        part.ClearField("metadata_props")
    for node in graph.node:
        node.ClearField("doc_string")
    graph.ClearField("value_info")
    shape = graph.input[0].type.tensor_type.shape
    for axis, name in ((0, "batch"), (2, "height"), (3, "width")):
        if name in traced.facts.dynamic:
            shape.dim[axis].dim_param = name
    if "batch" in traced.facts.dynamic:
        graph.output[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.helper.set_model_props(model, {KEY: traced.facts.as_json()})
    onnx.checker.check_model(model)
    return model.SerializeToString()


@dataclass(frozen=True)
class Format:
    """A file format: its suffix, its writer and its runner."""

    suffix: str
    write: Callable[[Traced], bytes]
    run: Callable[[bytes, object], Runner]


FORMATS = {"torch-export": Format(".pt2", as_program, program_runner), "onnx": Format(".onnx", as_onnx, onnx_runner)}


@torch.no_grad()
def must_take_rgb(model: Shipped, facts: Facts, size: tuple[int, int]) -> None:
    """Raise if the network does not run on RGB images of this size."""
    images = _noise(facts, facts.batch, size)
    try:
        model(images)
    except LetkdError:
        raise
    except Exception as error:  # a network may raise anything
        if channels := _channels(model.student, facts.batch, size):
            raise ExportError(
                f"{facts.model or 'the network'} takes images with {channels} channel{'s' * (channels > 1)}, but letkd's commands "
                "read RGB images; export it with torch.export, or add a first layer that converts RGB"
            ) from error
        hint = "`size=` and `batch=`" if facts.batch > 1 else "`size=`"
        raise ExportError(
            f"{facts.model or 'the network'} does not run on images of shape {list(images.shape)}: {_first_line(error)}; check {hint}"
        ) from error


def _channels(network: nn.Module, batch: int, size: tuple[int, int]) -> int | None:
    """The number of channels other than 3 that a network runs on; None if none is found."""
    of_layers = [module.in_channels for module in network.modules() if isinstance(module, nn.Conv2d)]
    for channels in dict.fromkeys(n for n in (*of_layers, 1, 2, 4) if n != 3):
        try:
            network(torch.randn(batch, channels, *size))
        except Exception:  # as above
            continue
        return channels
    return None


def _trace(
    model: nn.Module, facts: Facts, size: tuple[int, int], batch: int | None, any_size: bool | None
) -> tuple[ExportedProgram, tuple[Axis, ...]]:
    """Export with as many dynamic axes as requested or possible."""
    errors: list[Exception] = []
    for dynamic in _choices(model, facts, size, batch, any_size):
        try:
            program = _traced(model, facts, size, dynamic)
        except Exception as error:  # torch.export's errors have no common class
            errors.append(error)
            continue
        if batch is None and "batch" not in dynamic:
            say(
                "the batch is fixed to 1: torch.export can only trace the network at one batch size (len(x) in its code fixes the "
                "batch; x.shape[0] does not)"
            )
        if any_size is None and "height" not in dynamic:
            tell_fixed_size(facts)
        return program, dynamic
    where, hint = (" at any size", "; omit `size=dynamic`") if any_size else ("", "")
    raise ExportError(f"torch.export cannot trace the network{where}: {_first_line(errors[-1])}{hint}") from errors[-1]


def tell_fixed_size(facts: Facts) -> None:
    """Print that the file takes images of one size only."""
    size = "x".join(map(str, facts.size or ()))
    say(f"the image size is fixed to {size}: at other sizes the network does not run, or computes something else")


def _choices(
    model: nn.Module, facts: Facts, size: tuple[int, int], batch: int | None, any_size: bool | None
) -> list[tuple[Axis, ...]]:
    """The sets of dynamic axes to try: the batch is fixed only if no set with it can be traced."""
    free: tuple[Axis, ...] = ("height", "width")
    sides: list[tuple[Axis, ...]] = [free] if any_size else [()]
    if any_size is None and is_convolutional(model, facts, size):
        sides = [free, ()]
    batches: list[tuple[Axis, ...]] = [("batch",), ()] if batch is None else [()]
    return [(*first, *rest) for first in batches for rest in sides]


ATTENTION = re.compile(r"attention|transformer|softmax|bmm")


class _Operations(TorchDispatchMode):
    """Records the name of every operation."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def is_convolutional(model: nn.Module, facts: Facts, size: tuple[int, int]) -> bool:
    """Whether a network runs the same operations at other sizes, and no attention.

    Attention and position embeddings can run at other sizes, but compute another function there, and torch.export needs minutes to
    derive the valid sizes.
    """
    names = []
    for other in _sizes(size):
        try:
            with torch.no_grad(), _Operations() as operations:
                model(_noise(facts, 1, other))
        except Exception:  # a network may raise anything at a size it was not made for
            return False
        names.append(operations.names)
    return names[0] == names[1] == names[2] and not any(ATTENTION.search(name) for name in names[0])


def _sizes(size: tuple[int, int]) -> list[tuple[int, int]]:
    """The size and two other sizes to try."""
    h, w = size
    return [size, (2 * h, 2 * w), (h + 8, w + 16)]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _folded(
    model: nn.Module, program: ExportedProgram, facts: Facts, size: tuple[int, int], dynamic: tuple[Axis, ...]
) -> tuple[ExportedProgram, int]:
    """The program of a copy with folded BNs, and their number; the given program if the copy fails or differs from the model."""
    copy = copied(model)
    if not (n := fold_batch_norms(copy, program)):
        return program, 0
    try:
        return _traced(copy, facts, size, dynamic, same_as=model), n
    except Exception:  # as in `_trace`
        say(
            "the BNs are not folded into convolutions: without them, the network fails or differs, as it reads parameters itself"
        )
        return program, 0


def _traced(
    model: nn.Module, facts: Facts, size: tuple[int, int], dynamic: tuple[Axis, ...], same_as: nn.Module | None = None
) -> ExportedProgram:
    """The program of a model, checked to compute what `same_as` computes; default: the model itself."""
    axes = {"batch": 0, "height": 2, "width": 3}
    shapes = ({axes[name]: Dim.AUTO for name in dynamic},)
    example = _noise(facts, 2 if "batch" in dynamic else facts.batch, size)
    with quietly():
        program = torch.export.export(model, (example,), dynamic_shapes=shapes)
        _must_match_model(same_as or model, program, facts, size, dynamic)
    return program


def _must_match_model(
    model: nn.Module, program: ExportedProgram, facts: Facts, size: tuple[int, int], dynamic: tuple[Axis, ...]
) -> None:
    """Raise if the program fails or differs from the model at another batch size or image size than it was traced with."""
    run: Any = program.module()
    for batch, other in zip((1, 3, 1), _sizes(size), strict=True):
        x = _noise(facts, batch if "batch" in dynamic else facts.batch, other if "height" in dynamic else size)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), rtol=TOLERANCE, atol=TOLERANCE)


@torch.no_grad()
def right_at_other_sizes(runner: Runner, student: nn.Module, facts: Facts) -> bool:
    """Whether an ONNX file gives what the student gives at other image sizes, if it takes them and the student runs on them.

    torch.onnx writes the kernel of an adaptive pool for the traced size; at some multiples of that size, this makes no difference.
    """
    if facts.size is None or "height" not in facts.dynamic:
        return True
    model, (h, w) = Shipped(student, facts).eval(), facts.size
    for other in (*_sizes(facts.size)[1:], (h + 1, w + 3)):
        x = _noise(facts, facts.batch, other)
        try:
            wanted = model(x)
        except Exception:  # as in `must_take_rgb`
            continue
        try:
            torch.testing.assert_close(runner.run(x), wanted, rtol=TOLERANCE, atol=TOLERANCE)
        except Exception:  # onnxruntime's errors have no common class
            return False
    return True


def _noise(facts: Facts, batch: int, size: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    if facts.input == "uint8":
        return torch.randint(256, (batch, 3, *size), generator=generator, dtype=torch.uint8)
    return torch.randn(batch, 3, *size, generator=generator)


@contextmanager
def quietly():
    """Suppress the warnings and log messages of the exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # what fails is also raised
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class Difference:
    """Difference between the logits of two models on the same images.

    Args:
        largest: largest absolute difference.
        logit: largest absolute logit.
        agreeing: number of images with the same top-1 class.
        n: number of images.
    """

    largest: float
    logit: float
    agreeing: int
    n: int

    @property
    def close(self) -> bool:
        return self.largest <= TOLERANCE * max(1.0, self.logit)


def compare(one: Runner, two: Runner, images: UInt8[Tensor, "n 3 h w"], *, batch: int = 64) -> Difference:
    """Run both models on the images and compare their logits."""
    a, b = (torch.cat([runner(part) for part in images.split(batch)]) for runner in (one, two))
    return Difference(float((a - b).abs().max()), float(a.abs().max()), int((a.argmax(1) == b.argmax(1)).sum()), len(images))


def random_images(size: tuple[int, int], n: int = 32) -> UInt8[Tensor, "n 3 h w"]:
    """Random images, the same in every call."""
    return torch.randint(256, (n, 3, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def reference(student: nn.Module, facts: Facts) -> Runner:
    """The unmodified student as a runner, to compare with; if the normalisation is unknown, images are only scaled to 0 … 1."""
    known = facts.replace(input="normalised", mean=facts.mean or (0.0,) * 3, std=facts.std or (1.0,) * 3)
    return student_runner(student, known)
