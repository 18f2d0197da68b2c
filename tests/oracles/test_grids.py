"""The teacher's map at the student's grid: by loops in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from letkd.errors import RecipeError, UnsupportedPair
from letkd.functional import GridMatch, match_to, resize_to
from letkd.methods import Site
from letkd.supervision import KMeansSupervision


def by_area(f, size):
    """Pixel (i, j) is the mean of the teacher's pixels from floor(i H / h) to ceil((i + 1) H / h), and the same across."""
    (H, W), (h, w) = f.shape[-2:], size
    out = torch.zeros(*f.shape[:2], h, w, dtype=f.dtype)
    for i in range(h):
        for j in range(w):
            rows = range(i * H // h, math.ceil((i + 1) * H / h))
            columns = range(j * W // w, math.ceil((j + 1) * W / w))
            out[:, :, i, j] = sum(f[:, :, r, c] for r in rows for c in columns) / (len(rows) * len(columns))
    return out


def bilinear(f, size):
    """Pixel i lies at (i + 1/2) H / h - 1/2 of the teacher's rows, and is weighed between its two neighbours; at the edge, the edge."""
    (H, W), (h, w) = f.shape[-2:], size
    out = torch.zeros(*f.shape[:2], h, w, dtype=f.dtype)
    for i in range(h):
        for j in range(w):
            y, x = max((i + 0.5) * H / h - 0.5, 0), max((j + 0.5) * W / w - 0.5, 0)
            top, left = int(y), int(x)
            for r, share_r in ((top, 1 - (y - top)), (min(top + 1, H - 1), y - top)):
                for c, share_c in ((left, 1 - (x - left)), (min(left + 1, W - 1), x - left)):
                    out[:, :, i, j] += share_r * share_c * f[:, :, r, c]
    return out


def a_map(H, W):
    return torch.randn(2, 3, H, W, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_down_by_area_is_the_loop():
    f = a_map(16, 16)
    torch.testing.assert_close(resize_to(f, (7, 7)), by_area(f, (7, 7)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(resize_to(f, (5, 9)), by_area(f, (5, 9)), rtol=1e-12, atol=1e-12)


def test_up_bilinearly_is_the_loop():
    f = a_map(7, 7)
    torch.testing.assert_close(resize_to(f, (8, 8)), bilinear(f, (8, 8)), rtol=1e-12, atol=1e-12)


def test_each_axis_goes_its_own_way():
    f = a_map(9, 4)
    torch.testing.assert_close(resize_to(f, (5, 6)), bilinear(by_area(f, (5, 4)), (5, 6)), rtol=1e-12, atol=1e-12)


def test_whole_ratios_are_pooled_bit_for_bit_whatever_the_match():
    f = a_map(8, 12).float()
    for match in ("pool", "resize"):
        assert torch.equal(match_to(f, (4, 3), "here", match=match), F.avg_pool2d(f, (2, 4)))
        assert match_to(f, (8, 12), "here", match=match) is f
        assert str(GridMatch.of((8, 12), (4, 3), "here", match=match)) == "pooled 2x4"
    torch.testing.assert_close(resize_to(f, (4, 3)), F.avg_pool2d(f, (2, 4)))


def test_other_ratios_are_named_and_with_pool_refused():
    found = GridMatch.of((16, 16), (7, 7), "here", match="resize")
    assert str(found) == "resized to 7x7"
    f = a_map(16, 16)
    assert torch.equal(found(f), resize_to(f, (7, 7)))
    with pytest.raises(UnsupportedPair, match=r"the teacher's map at 'here' is 16x16 and the student's 7x7: .*match='resize'"):
        GridMatch.of((16, 16), (7, 7), "here", match="pool")


def test_a_match_that_does_not_exist():
    with pytest.raises(RecipeError, match="the site 'penultimate' has match='crop'; write 'pool' or 'resize'"):
        Site("penultimate", KMeansSupervision(4), match="crop")
    with pytest.raises(RecipeError, match="match"):
        Site.from_recipe("penultimate", {"match": "crop"})
