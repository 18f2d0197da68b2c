"""Batches of another kind than images and class indices: converted where that is safe, else one sentence before any loss."""

import pytest
import torch
from torch import nn

from letkd.batch import Batch, channels_of, example_for, input_size_of
from letkd.distiller import Distiller
from letkd.errors import DataError, TapError
from letkd.methods import letkd1
from letkd.runs.evaluation import evaluate
from tests.support.pair import SIZE, a_distiller, a_stream, a_student

X, Y = a_stream()[0].x, a_stream()[0].y
ONE_HOT = torch.eye(3)[Y]
LABELS = {
    "one-hot": (
        ONE_HOT,
        r"float32 \[8, 3\], and class indices int64 \[b\] are needed: convert one-hot labels with y\.argmax\(1\)",
    ),
    "one-hot, whole": (ONE_HOT.long(), r"int64 \[8, 3\].*y\.argmax\(1\); soft and multi-label targets are not supported"),
    "multi-label": (torch.tensor([[1.0, 1.0, 0.0]] * 8), "soft and multi-label targets are not supported"),
    "float": (Y.float(), r"float32 \[8\].*use y\.long\(\) if they are class indices"),
    "bool": (Y == 0, r"bool \[8\].*use y\.long\(\)"),
    "column": (Y[:, None], r"int64 \[8, 1\].*use y\.squeeze\(1\)$"),
    "float column": (Y[:, None].float(), r"use y\.squeeze\(1\)\.long\(\)$"),
    "map": (torch.zeros(8, *SIZE).long(), r"int64 \[8, 16, 16\].*: one per image"),
    "scalar": (torch.tensor(1), r"int64 \[\].*: one per image"),
    "too few": (Y[:5], "8 images and 5 labels; it needs one label per image"),
    "out of range": (Y + 3, "a label is 5, but with 3 classes labels range from 0 to 2"),
    "negative": (Y - 2, "a label is -2"),
}
IMAGES = {
    "bytes": ((X * 20).to(torch.uint8), r"uint8 \[8, 3, 16, 16\].*use \(x\.float\(\) / 255 - mean\) / std"),
    "whole": (X.long(), "int64 .*networks take normalised float images"),
    "grey": (X[:, :1], r"\[8, 1, 16, 16\].*repeat grey images with x\.expand\(-1, 3, -1, -1\)"),
    "channels last": (X.permute(0, 2, 3, 1), r"\[8, 16, 16, 3\].*x\.permute\(0, 3, 1, 2\)"),
    "bytes, channels last": (X.permute(0, 2, 3, 1).byte(), r"x\.permute\(0, 3, 1, 2\)"),
    "five channels": (torch.randn(8, 5, *SIZE), r"\[8, 5, 16, 16\].*\[b 3 H W\]: use networks for these"),
    "one image": (X[0], r"\[3, 16, 16\].*x\[None\]"),
    "flat": (X.flatten(1), r"float32 \[8, 768\]"),
}


@pytest.fixture(scope="module")
def distiller() -> Distiller:
    return a_distiller(letkd1(6)).fit(a_stream())


def a_zoo_like_student() -> nn.Module:
    student = a_student()
    student.input_size = (3, *SIZE)
    return student


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("case", [*LABELS, *IMAGES])
def test_each_is_a_sentence_in_a_step_in_the_fit_and_in_evaluation(distiller, case, checks):
    batch = (X, LABELS[case][0]) if case in LABELS else (IMAGES[case][0], Y)
    sentence = {**LABELS, **IMAGES}[case][1]
    ranged = case in ("out of range", "negative")
    with pytest.raises(DataError, match=sentence):
        evaluate(a_zoo_like_student(), [batch])
    if ranged and not checks:
        return
    distiller.checks = checks
    with pytest.raises(DataError, match=sentence):
        distiller(batch)
    with pytest.raises(DataError, match=sentence):
        Distiller(a_zoo_like_student(), checks=checks)(batch)  # plain CE, without an example
    if case != "out of range":  # how many classes there are, a fit does not know
        with pytest.raises(DataError, match=sentence):
            a_distiller(letkd1(6), checks=checks).fit([Batch(*batch)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64])
def test_class_indices_of_any_whole_type_are_those_of_int64(distiller, dtype):
    distiller.checks = True
    expected = distiller((X, Y)).loss
    assert torch.equal(distiller((X, Y.to(dtype))).loss, expected)
    assert evaluate(a_student(), [(X, Y.to(dtype))]) == evaluate(a_student(), [(X, Y)])
    mixed = [Batch(X, Y.to(kind), y2=Y.flip(0).to(kind), lam=0.7) for kind in (dtype, torch.int64)]
    assert torch.equal(*(distiller(batch).loss for batch in mixed))


def test_indices_are_one_per_image(distiller):
    for index in (torch.arange(3), torch.arange(8.0), torch.zeros(8, 1).long()):
        with pytest.raises(
            DataError, match=r"the indices of a batch are .*; they must be the images' positions in the data set, int64 \[8\]"
        ):
            distiller((X, Y, index))


def test_networks_for_grey_images_take_them():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.LazyLinear(3))
    net(X[:, :1])
    assert Distiller(net, example=X[:1, :1])((X[:, :1], Y)).loss.isfinite()
    with pytest.raises(DataError, match=r"\[b 1 H W\]: use networks for these"):
        Distiller(net, example=X[:1, :1])((X, Y))


@pytest.mark.parametrize("size", [(3, 8, 6), [3, 8, 6], torch.Size((3, 8, 6))])
def test_an_input_size_is_channels_height_and_width(size):
    net, without = a_student(), a_student()
    net.input_size = size
    assert input_size_of(net) == (3, 8, 6)
    assert channels_of(net) == 3
    assert example_for(without, net).shape == (1, 3, 8, 6)


@pytest.mark.parametrize("value", [32, (32, 32), "32x32", "abc", (3, 0, 32), (3.0, 32.0, 32.0), {"height": 32}, (1, 3, 32, 32)])
def test_an_input_size_with_another_meaning_is_none(value):
    net = a_student()
    net.input_size = value
    assert input_size_of(net) is None
    assert channels_of(net) is None
    assert example_for(net, a_zoo_like_student()).shape == (1, 3, *SIZE)
    with pytest.raises(TapError, match="Net do not say their input size"):
        example_for(net)


def test_a_step_waits_for_the_device_once_to_check_labels(distiller, monkeypatch):
    """`tolist` and `int` of a tensor are where a GPU is waited for."""
    waits = []
    for name in ("tolist", "item", "__int__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, real=real, name=name: waits.append(name) or real(self))
    distiller.checks = True
    distiller((X, Y))
    assert waits == ["tolist"]


def test_moving_a_batch_to_a_gpu_does_not_wait_for_it(monkeypatch):
    moved = {}
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **options: moved.setdefault(str(device), options) and tensor)
    batch = Batch(X, Y, index := torch.arange(8))
    batch.to("cpu")
    assert batch.to("cuda:0").index_on_cpu is index
    assert moved == {"cpu": {"non_blocking": False}, "cuda:0": {"non_blocking": True}}
