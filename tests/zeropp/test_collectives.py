"""The gradient mean: what arrives equals the fp32 sum of what was sent, in rank order."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from zeropp.collectives import AllToAllReduceScatter

WORLD, CHUNK = 4, 5


def sent_by(rank: int) -> torch.Tensor:
    """(WORLD * CHUNK,) fp32 with exponents far apart."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(WORLD * CHUNK, generator=generator)
    return values * 10.0 ** torch.randint(-6, 6, values.shape, generator=generator)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@ranks(WORLD)
def test_sum_is_exact_but_for_one_rounding_of_each_term(wire):
    rank, dtype = dist.get_rank(), getattr(torch, wire)
    output = torch.empty(CHUNK)
    AllToAllReduceScatter(dtype)(output, sent_by(rank), dist.group.WORLD, dist.ReduceOp.SUM)
    terms = torch.stack([sent_by(r).view(WORLD, CHUNK)[rank].to(dtype) for r in range(WORLD)])
    expected = terms[0].float()
    for term in terms[1:]:
        expected = expected + term.float()
    assert torch.equal(output, expected)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@ranks(2)
def test_overflow_on_one_rank_is_seen_by_the_owner(bad):
    rank = dist.get_rank()
    values = torch.ones(2 * CHUNK)
    if rank == 1:
        values[0] = bad
    output = torch.empty(CHUNK)
    comm = AllToAllReduceScatter(torch.bfloat16)
    comm(output, values, dist.group.WORLD, dist.ReduceOp.SUM)
    assert torch.isfinite(output).all() == (rank == 1)
