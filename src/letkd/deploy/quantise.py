"""INT8: an exported ONNX student with whole numbers for weights and activations, calibrated on training images, measured."""

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
# Products, sums and what keeps their range. Lengths and quotients of the KD layer stay in float32: they are cheap, and span more than
# 256 steps can.
QUANTISED = ["Conv", "Gemm", "MatMul", "Add", "Relu", "MaxPool"]


@dataclass(frozen=True)
class Quantised:
    """What INT8 changed: accuracy in per cent on the test split, seconds by batch size, and bytes, each before and after."""

    accuracy: tuple[float, float]
    seconds: dict[int, tuple[float, float]]
    size: tuple[int, int]


class _Images:
    """Training images as onnxruntime's calibration asks for them, one batch at a time."""

    def __init__(self, images: UInt8[Tensor, "n 3 h w"], facts: Facts):
        self.facts, self.batches = facts, iter(images.split(BATCH))

    def get_next(self) -> dict | None:
        images = next(self.batches, None)
        if images is None:
            return None
        if self.facts.input == "normalised":
            images = normalise(images, self.facts.mean or (), self.facts.std or ())
        return {"images": images.numpy()}


def quantise(content: bytes, facts: Facts, images: UInt8[Tensor, "n 3 h w"]) -> bytes:
    """An exported ONNX student in INT8: weights by channel, activations by the range they have on `images`.

    Args:
        content: the file, as `as_onnx` gives it.
        images: a few hundred of the training images.
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
    """Some of the training images, the same each time."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    return images_at(split, order[:CALIBRATION])


def measure(before: bytes, after: bytes, test: AnySplit) -> Quantised:
    """Both files on the test split, and beside each other."""
    runners = [onnx_runner(content, "the exported student") for content in (before, after)]
    accuracies = [evaluate_runner(runner, test, description="accuracy").top1 for runner in runners]
    seconds = {}
    for batch in (1, 128):
        images = images_at(test, torch.arange(min(batch, len(test))))
        taken = interleaved({name: partial(runner, images) for name, runner in zip(("f", "i"), runners, strict=True)})
        seconds[len(images)] = (taken["f"], taken["i"])
    return Quantised((accuracies[0], accuracies[1]), seconds, (len(before), len(after)))
