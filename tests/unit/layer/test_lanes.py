"""Products lane by lane are the products."""

import pytest
import torch

from letkd.layer.lanes import MOST, Sum, mm


@pytest.fixture(params=[1, 2, 3, MOST + 1])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [6, 7, 1, 0])
def test_a_product(threads, rows):
    p, q = torch.randn(rows, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64).T
    wide = torch.zeros(rows, 9, dtype=torch.float64)
    given = mm(p, q, wide[:, :4])
    torch.testing.assert_close(given, p @ q)
    torch.testing.assert_close(wide, torch.cat([p @ q, torch.zeros(rows, 5, dtype=torch.float64)], dim=1))


def test_a_product_in_another_precision(threads):
    p, q = torch.randn(6, 5).bfloat16(), torch.randn(5, 4).bfloat16()
    torch.testing.assert_close(mm(p, q, torch.empty(6, 4)), (p @ q).float())


def test_sums_over_chunks_of_any_size(threads):
    chunks = [(torch.randn(n, 3, dtype=torch.float64), torch.randn(n, 4, dtype=torch.float64)) for n in (6, 6, 5, 1)]
    product, rows = Sum(torch.ones(3, 4, dtype=torch.float64)), Sum(torch.ones(4, dtype=torch.float64))
    for p, q in chunks:
        product.add_product(p, q)
        rows.add_rows(q)
    torch.testing.assert_close(product.total(), sum(p.T @ q for p, q in chunks))
    torch.testing.assert_close(rows.total(), sum(q.sum(dim=0) for _, q in chunks))


def test_a_sum_of_products_in_another_precision(threads):
    p, q = torch.randn(6, 3).bfloat16(), torch.randn(6, 4).bfloat16()
    product = Sum(torch.empty(3, 4))
    product.add_product(p, q)
    torch.testing.assert_close(product.total(), (p.T @ q).float())
