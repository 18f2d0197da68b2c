"""From a run to a file: fold, export, check, write."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from letkd.deploy.export import (
    FORMATS,
    Difference,
    Shipped,
    Traced,
    as_onnx,
    compare,
    must_take_rgb,
    random_images,
    reference,
    right_at_other_sizes,
    tell_fixed_size,
    trace,
)
from letkd.deploy.quantise import Quantised, calibration_images, measure, quantise
from letkd.deploy.runners import Runner, student_runner
from letkd.deploy.source import Source, images_at
from letkd.deploy.speed import interleaved
from letkd.distiller.facts import Facts, Input
from letkd.distiller.student import read_header, save_student
from letkd.errors import CheckpointError, ExportError
from letkd.files import must_be_utf8, sweep, write_whole
from letkd.layer.folded import fold_student
from letkd.progress import say

SUFFIXES = {"safetensors": ".safetensors", **{name: form.suffix for name, form in FORMATS.items()}}
REAL_IMAGES = 256
BATCHES, ROUNDS = (1, 32), 5


@dataclass(frozen=True)
class Shipment:
    """A written file, and how it compares with the student.

    Args:
        seconds: run time of the exported model by batch size; of the INT8 model if there is one.
    """

    path: Path
    facts: Facts
    folded: int
    differences: dict[str, Difference]
    seconds: dict[int, float]
    quantised: Quantised | None = None


def ship(
    source: Source,
    to: str,
    out: Path | None = None,
    *,
    fold: bool = True,
    takes: Input | None = None,
    int8: bool = False,
    opset: int | None = None,
    batch: int | None = None,
    any_size: bool | None = None,
) -> Shipment:
    """Write a student to one file, after checking that the exported model reproduces the student.

    Args:
        to: a key of `SUFFIXES`.
        out: the file; default: next to the student's file.
        fold: fold KD layers and, if the format has a graph, BNs into convolutions.
        takes: input of the exported graph; default: `uint8` if mean and std are known.
        int8: quantise the ONNX file, calibrated on the source's training images; the check is done before quantisation.
        opset: of the ONNX file; torch's default if None.
        batch, any_size: of the graph, as for `trace`.
    """
    facts = source.facts.replace(input=takes or ("uint8" if source.facts.mean and source.facts.std else "normalised"))
    path = destination(source.path, to, out, int8=int8, opset=opset, batch=batch, any_size=any_size)
    if int8 and source.data is None:
        raise ExportError(
            "INT8 needs training images for calibration, but they are not available; name them with `data=` and `root=`"
        )
    student = fold_student(source.student) if fold else source.student
    if to == "safetensors":
        if takes == "uint8":
            raise ExportError("a student file contains weights but no graph, so it cannot normalise images; omit `input=`")
        facts = facts.replace(input="normalised")
        if facts.size is not None:
            must_take_rgb(Shipped(student, facts), facts, facts.size)
        runner, content, folded = student_runner(student, facts), None, 0
    else:
        traced = trace(student, facts, fold=fold, batch=batch, any_size=any_size)
        content, runner = _graph_file(traced, to, path, opset)
        if to == "onnx" and not right_at_other_sizes(runner, student, traced.facts):
            traced = _at_one_size(student, traced, asked=any_size)
            content, runner = _graph_file(traced, to, path, opset)
        facts, folded = traced.facts, traced.folded
    eager = reference(source.student, facts)
    runner.facts = facts.replace(mean=eager.facts.mean, std=eager.facts.std)
    images = _images(source, facts)
    differences = {name: compare(eager, runner, images) for name, images in images.items()}
    too_far = [f"{d.largest:.2g} on {name} images" for name, d in differences.items() if not d.close]
    if too_far:
        raise ExportError(
            f"the exported student's logits differ from the student's by {', '.join(too_far)}; nothing was written"
        )
    quantised = None
    if int8 and "real" not in images:
        raise ExportError("INT8 is calibrated and measured on the data's images, which have another size; omit `size=`")
    data = source.data
    if int8 and content is not None and data is not None:
        calibration = calibration_images(data.train)
        small = quantise(content, facts, calibration)
        quantised = measure(content, small, calibration, data.test if data.has_labels and len(data.test) else None)
        content = small
        runner = FORMATS[to].run(content, path)
        runner.facts = facts
    seconds = _seconds(runner, images["random"])
    sweep(path.parent, name=path.name)
    _write(source, student, content, facts, path)
    return Shipment(path, facts, folded, differences, seconds, quantised)


def _graph_file(traced: Traced, to: str, path: Path, opset: int | None) -> tuple[bytes, Runner]:
    """The content of the file of a graph, and its runner."""
    content = as_onnx(traced, opset) if to == "onnx" else FORMATS[to].write(traced)
    return content, FORMATS[to].run(content, path)


def _at_one_size(student: torch.nn.Module, traced: Traced, *, asked: bool | None) -> Traced:
    """The graph once more, for one image size, because its ONNX file is wrong at others; an error if any size was asked for."""
    if asked:
        raise ExportError(
            "any image size was asked for, but the ONNX file is right only at one; omit `size=dynamic`, or use `to=torch-export`"
        )
    facts = traced.facts
    tell_fixed_size(facts)
    batch = None if "batch" in facts.dynamic else facts.batch
    return trace(student, facts, fold=traced.folded > 0, batch=batch, any_size=False)


def _text(size: tuple[int, int]) -> str:
    return "x".join(map(str, size))


def _seconds(runner: Runner, images: torch.Tensor) -> dict[int, float]:
    """Run times for one image and for a batch, or for the file's fixed batch size."""
    batches = BATCHES if "batch" in runner.facts.dynamic else (runner.facts.batch,)
    runs = {str(n): partial(runner, images[:1].expand(n, -1, -1, -1)) for n in batches}
    return {int(n): taken for n, taken in interleaved(runs, rounds=ROUNDS).items()}


def destination(
    source: Path,
    to: str,
    out: Path | None = None,
    *,
    int8: bool = False,
    opset: int | None = None,
    batch: int | None = None,
    any_size: bool | None = None,
) -> Path:
    """Path of the exported file; it must have the format's suffix and must not be the student's own file.

    Options that the format does not support (INT8, opset, fixed sizes) raise an error.
    """
    if to not in SUFFIXES:
        raise ExportError(f"unknown format {to!r}; the formats are {', '.join(SUFFIXES)}")
    if int8 and to != "onnx":
        raise ExportError(f"INT8 is for ONNX files, not for {to}; use `to=onnx`")
    if opset is not None and to != "onnx":
        raise ExportError(f"`opset={opset}` is for ONNX files, not for {to}; use `to=onnx`")
    if to == "safetensors" and (batch, any_size) != (None, None):
        raise ExportError(
            "a student file contains weights but no graph, so its sizes cannot be fixed; omit `batch=` and `size=`"
        )
    suffix = SUFFIXES[to]
    mark = "-int8" if int8 else "-export" if to == "safetensors" else ""
    path = must_be_utf8(out or source.with_name(f"{source.stem}{mark}{suffix}"))
    if path.suffix != suffix:
        raise ExportError(f"`out={path}`: the file name must end in {suffix} for {to}")
    if path.resolve() == source.resolve():
        raise ExportError(f"`out={path}` is the student's own file; choose another name")
    return path


def _images(source: Source, facts: Facts) -> dict[str, torch.Tensor]:
    if facts.size is None:
        raise ExportError("the size of the images is unknown; give their height and width with `size=`")
    found = {"random": random_images(facts.size)}
    if source.data is not None:
        split = source.data.val if len(source.data.val) else source.data.train
        if "height" not in facts.dynamic and split.image_size != facts.size:
            say(
                f"compared only on random images: the file takes {_text(facts.size)}, but the data's images are {_text(split.image_size)}"
            )
        else:
            found["real"] = images_at(split, torch.arange(min(REAL_IMAGES, len(split))))
    return found


def _write(source: Source, student: torch.nn.Module, content: bytes | None, facts: Facts, path: Path) -> None:
    if content is None:
        header = read_header(source.path)
        known = {key: getattr(facts, key) for key in ("classes", "mean", "std", "size", "resize") if getattr(facts, key)}
        save_student(student, path, **{**header, **known})
        return
    try:
        write_whole(path, content)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}") from error
