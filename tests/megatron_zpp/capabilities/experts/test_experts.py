"""Grouped products against a loop."""

import pytest
import torch
import torch.nn.functional as F

from megatron_zpp.capabilities.experts import experts
from megatron_zpp.capabilities.experts.experts import products, rows_of_biases

COUNTS = ([2, 0, 5, 1], [0, 8, 0, 0], [0, 0, 0, 0])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")
def test_a_grouped_product_is_a_loop(counts, dtype, monkeypatch) -> None:
    """To the bit on a CPU, where both add the same numbers in the same order."""
    torch.manual_seed(1)
    rows = torch.randn(sum(counts), 16).to(dtype).requires_grad_()
    weights = torch.randn(4, 24, 16).to(dtype).requires_grad_()
    biases = torch.randn(4, 24).to(dtype).requires_grad_()
    assert experts._can_group(weights)
    found = []
    for is_grouped in (True, False):
        monkeypatch.setattr(experts, "_can_group", lambda _, is_grouped=is_grouped: is_grouped)
        result = products(rows, weights, torch.tensor(counts))
        result = result + rows_of_biases(biases, torch.tensor(counts), result)
        gradient = torch.ones_like(result) / 3
        found.append((result, *torch.autograd.grad(result, (rows, weights, biases), gradient)))
    for grouped, looped in zip(*found, strict=True):
        assert torch.equal(grouped, looped)


@pytest.mark.parametrize("width", [24, 5])
@pytest.mark.parametrize("counts", COUNTS)
def test_biases_by_rows(counts: list[int], width: int) -> None:
    """Each row has its expert's, exactly; idle experts have gradients of zeros."""
    biases = torch.randn(4, width, requires_grad=True)
    y = torch.zeros(sum(counts), width)
    rows = rows_of_biases(biases, torch.tensor(counts), y)
    numbers = torch.arange(4).repeat_interleave(torch.tensor(counts))
    assert torch.equal(rows, biases[numbers])
    factors = torch.randint(-3, 4, rows.shape).float()
    (gradient,) = torch.autograd.grad((rows * factors).sum(), biases)
    assert torch.equal(gradient, torch.zeros(4, width).index_add(0, numbers, factors))


@pytest.mark.parametrize(("columns", "dtype"), [(7, torch.float32), (16, torch.float64)])
def test_what_cannot_be_grouped(columns, dtype) -> None:
    weights = torch.randn(2, 5, columns, dtype=dtype)
    rows = torch.randn(3, columns, dtype=dtype)
    found = products(rows, weights, torch.tensor([1, 2]))
    expected = torch.cat((rows[:1] @ weights[0].T, rows[1:] @ weights[1].T))
    torch.testing.assert_close(found, expected)
