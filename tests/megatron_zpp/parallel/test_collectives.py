"""Rows gathered and terms summed over ranks, forward and backward, against the same on one rank.

Layers that ranks split are compared with whole ones in test_axes.py.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.model.tensor_parallel import own_random_numbers
from megatron_zpp.parallel.collectives import (
    gather_columns,
    gather_rows,
    heads_of_own_rows,
    keep,
    moved,
    own_rows,
    rows_of_own_heads,
    sum_rows,
    sum_whole,
)
from tests.ranks import ranks
from zeropp.wire.rank_group import AXES, Nodes, RankGroup
from zeropp.wire.traffic import Traffic

SIZE = 4
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def peers() -> RankGroup:
    """All ranks, two to a node."""
    members, nodes = tuple(range(SIZE)), Nodes(num_ranks=SIZE, ranks_per_node=2)
    return RankGroup(
        members=members, position=dist.get_rank(), nodes=nodes, purpose="tensor",
        ledger=Traffic(AXES), group=dist.group.WORLD,
    )  # fmt: skip


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(*shape: int, dtype: torch.dtype) -> Tensor:
    """Of all ranks, summed in fp32 and in their order, rounded once."""
    terms = torch.stack([of_rank(rank, *shape, dtype=dtype) for rank in range(SIZE)])
    return terms.float().sum(0).to(dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 8, 3), (7,), (1, 1, 5), (0, 3)])
@ranks(SIZE)
def test_a_sum_of_any_shape_is_the_same_on_all_ranks(shape, dtype):
    mine = of_rank(dist.get_rank(), *shape, dtype=dtype)
    assert torch.equal(sum_whole(mine, peers()), total(*shape, dtype=dtype))


@DTYPES
@ranks(SIZE)
def test_rows_are_those_of_the_ranks_in_order(dtype):
    rank, group = dist.get_rank(), peers()
    whole = torch.cat([of_rank(each, 2, 3, 5, dtype=dtype) for each in range(SIZE)], dim=1)
    gathered = gather_rows(of_rank(rank, 2, 3, 5, dtype=dtype), group)
    assert torch.equal(gathered, whole)
    assert torch.equal(own_rows(gathered, group), of_rank(rank, 2, 3, 5, dtype=dtype))
    summed = sum_rows(of_rank(rank, 2, 12, 5, dtype=dtype), group)
    assert torch.equal(summed, total(2, 12, 5, dtype=dtype)[:, 3 * rank : 3 * rank + 3])
    columns = torch.cat([of_rank(each, 2, 3, dtype=dtype) for each in range(SIZE)], dim=1)
    assert torch.equal(gather_columns(of_rank(rank, 2, 3, dtype=dtype), group), columns)


@DTYPES
@ranks(SIZE)
def test_rows_of_some_heads_are_exchanged_for_heads_of_some_rows(dtype):
    rank, group = dist.get_rank(), peers()
    whole = of_rank(5, 2, 12, 8, 3, dtype=dtype)
    rows, heads = whole.chunk(SIZE, dim=1), whole.chunk(SIZE, dim=2)
    assert torch.equal(rows_of_own_heads(rows[rank], group), heads[rank])
    assert torch.equal(heads_of_own_rows(heads[rank], group), rows[rank])


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(gather_rows, sum_rows), (sum_rows, gather_rows), (keep, sum_whole), (sum_whole, keep)],
)
@ranks(SIZE)
def test_the_gradient_is_moved_back(forward: Callable, backward: Callable):
    """A rank's loss is the product of its result and its own weights."""
    rank, group = dist.get_rank(), peers()
    x = of_rank(rank, 2, 4, 3).requires_grad_()
    result = moved(x, group, forward, backward)
    weights = of_rank(10 + rank, *result.shape)
    (result * weights).sum().backward()
    assert torch.equal(result, forward(x.detach(), group))
    assert torch.equal(x.grad, backward(weights, group))


@ranks(SIZE)
def test_tensor_ranks_drop_other_elements_of_what_they_split():
    torch.manual_seed(3)
    with own_random_numbers(peers(), False, 0.1, torch.device("cpu")):
        own = torch.rand(4).tolist()
    everywhere = [None] * SIZE
    dist.all_gather_object(everywhere, (own, torch.rand(4).tolist()))
    numbers, shared = zip(*everywhere, strict=True)
    assert len({*map(tuple, numbers)}) == SIZE and shared == (shared[0],) * SIZE != numbers
