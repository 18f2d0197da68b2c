"""INT8 quantisation of an exported ONNX student, calibrated on training images, and its measured effect."""

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from letkd.data import AnySplit
from letkd.data.loader import normalise
from letkd.deploy.accuracy import evaluate_runner
from letkd.deploy.export import quietly
from letkd.deploy.runners import need, onnx_runner
from letkd.deploy.source import images_at
from letkd.deploy.speed import interleaved
from letkd.deploy.worker import KEY
from letkd.distiller.facts import Facts

CALIBRATION = 512
BATCH = 64
# Products, sums, and operations that keep their range. Norms and divisions of the KD layer stay in float32: they are cheap, and their
# range does not fit into 256 steps.
QUANTISED = ["Conv", "Gemm", "MatMul", "Add", "Relu", "MaxPool"]


@dataclass(frozen=True)
class Quantised:
    """Effect of INT8, before and after: test accuracy in per cent (None without labels), seconds by batch size, file size in bytes."""

    accuracy: tuple[float, float] | None
    seconds: dict[int, tuple[float, float]]
    size: tuple[int, int]


class _Images:
    """Training images for onnxruntime's calibration, one batch at a time. If the batch is fixed, images repeat to fill the last one."""

    def __init__(self, images: UInt8[Tensor, "n 3 h w"], facts: Facts):
        size = BATCH
        if "batch" not in facts.dynamic:
            size = facts.batch
            images = images[torch.arange(-(-len(images) // size) * size) % len(images)]
        self.facts, self.batches = facts, iter(images.split(size))

    def get_next(self) -> dict | None:
        images = next(self.batches, None)
        if images is None:
            return None
        if self.facts.input == "normalised":
            images = normalise(images, self.facts.mean or (), self.facts.std or ())
        return {"images": images.numpy()}


def quantise(content: bytes, facts: Facts, images: UInt8[Tensor, "n 3 h w"]) -> bytes:
    """Quantise an exported ONNX student to INT8: weights per channel, activations by their range on `images`.

    Args:
        content: of the file, as returned by `as_onnx`.
        images: a few hundred training images.
    """
    onnx = need("onnxruntime", "onnx")
    tools = need("onnxruntime.quantization")
    with tempfile.TemporaryDirectory() as folder, quietly():
        plain, small = Path(folder) / "plain.onnx", Path(folder) / "int8.onnx"
        plain.write_bytes(content)
        tools.quantize_static(
            plain,
            small,
            _Images(images, facts),
            quant_format=tools.QuantFormat.QDQ,
            op_types_to_quantize=QUANTISED,
            per_channel=True,
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
        )
        model = onnx.load(small)
    onnx.helper.set_model_props(model, {KEY: facts.as_json()})
    return model.SerializeToString()


def calibration_images(split: AnySplit) -> UInt8[Tensor, "n 3 h w"]:
    """A random sample of the training images, the same in every call."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    return images_at(split, order[:CALIBRATION])


def measure(before: bytes, after: bytes, images: UInt8[Tensor, "n 3 h w"], test: AnySplit | None) -> Quantised:
    """Measure accuracy, speed and size of both files.

    Args:
        images: to measure the speed on.
        test: to measure the accuracy on; None if there are no labels.
    """
    runners = [onnx_runner(content, "the exported student") for content in (before, after)]
    accuracy = None
    if test is not None:
        first, second = (evaluate_runner(runner, test, description="accuracy").top1 for runner in runners)
        accuracy = (first, second)
    seconds = {}
    for batch in (1, 128):
        x = images[:batch]
        taken = interleaved({name: partial(runner, x) for name, runner in zip(("f", "i"), runners, strict=True)})
        seconds[len(x)] = (taken["f"], taken["i"])
    return Quantised(accuracy, seconds, (len(before), len(after)))
