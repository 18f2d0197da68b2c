"""Calibration batches have the size that the graph takes, and contain every image."""

import pytest
import torch

from letkd.deploy.quantise import BATCH, _Images
from letkd.distiller.facts import Facts


def batches(n: int, facts: Facts) -> list[torch.Tensor]:
    images = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 3, 2, 2)
    reader = _Images(images, facts)
    return [torch.from_numpy(found["images"]) for found in iter(reader.get_next, None)]


@pytest.mark.parametrize(("n", "size"), [(52, 64), (1, 3), (64, 64), (130, 64)])
def test_a_fixed_batch_is_always_full_and_no_image_is_left_out(n, size):
    found = batches(n, Facts(num_classes=2, input="uint8", dynamic=(), batch=size))
    assert {len(batch) for batch in found} == {size}
    assert torch.cat(found)[:, 0, 0, 0].unique().tolist() == list(range(n))


def test_a_dynamic_batch_repeats_no_image():
    found = batches(BATCH + 5, Facts(num_classes=2, input="uint8"))
    assert [len(batch) for batch in found] == [BATCH, 5]
