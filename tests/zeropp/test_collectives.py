"""The gradient mean and the weight gather on one unit's buffers, against what they must hold."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from zeropp.collectives import GradientMean
from zeropp.fsdp_adapter import Piece
from zeropp.link import connect
from zeropp.route import Nodes, Route
from zeropp.traffic import Traffic

WORLD, CHUNK = 4, 5


def sent_by(rank: int) -> torch.Tensor:
    """(WORLD * CHUNK,) fp32 with exponents far apart."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(WORLD * CHUNK, generator=generator)
    return values * 10.0 ** torch.randint(-6, 6, values.shape, generator=generator)


def mean_over(ranks_per_node: int, wire: torch.dtype, bits: tuple[int, int]) -> GradientMean:
    """A gradient mean of one matrix whose shard on a rank has CHUNK elements."""
    world = dist.get_world_size()
    nodes = Nodes(num_ranks=world, ranks_per_node=ranks_per_node)
    route = Route(nodes=nodes, inner=ranks_per_node, bits=bits)
    position, traffic = dist.get_rank(), Traffic()
    links = tuple(
        connect(hop, tuple(range(world)), position, traffic)
        for hop in (route.inner_hop(position), route.outer_hop(position))
    )
    piece = Piece(elements=CHUNK, ndim=2, trainable=True)
    return GradientMean((piece,), lambda: (0,), route, links, wire)


def summed(comm: GradientMean, values: torch.Tensor) -> torch.Tensor:
    output = torch.empty(CHUNK)
    comm(output, values, dist.group.WORLD, dist.ReduceOp.SUM)
    return output


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("ranks_per_node", [1, 4])
@ranks(WORLD)
def test_one_hop_sums_exactly_but_for_one_rounding_of_each_term(ranks_per_node, wire):
    rank, dtype = dist.get_rank(), getattr(torch, wire)
    output = summed(mean_over(ranks_per_node, dtype, (16, 16)), sent_by(rank))
    terms = torch.stack([sent_by(r).view(WORLD, CHUNK)[rank].to(dtype) for r in range(WORLD)])
    expected = terms[0].float()
    for term in terms[1:]:
        expected = expected + term.float()
    assert torch.equal(output, expected)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@ranks(WORLD)
def test_two_hops_sum_within_a_node_and_then_the_nodes_sums(wire):
    rank, dtype = dist.get_rank(), getattr(torch, wire)
    output = summed(mean_over(2, dtype, (16, 16)), sent_by(rank))
    terms = [sent_by(r).view(WORLD, CHUNK)[rank].to(dtype).float() for r in range(WORLD)]
    first, second = ((terms[n] + terms[n + 1]).to(dtype).float() for n in (0, 2))
    assert torch.equal(output, first + second)


@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
@ranks(WORLD)
def test_overflow_on_one_rank_is_seen_by_the_owner(ranks_per_node, bad, bits):
    values = torch.ones(WORLD * CHUNK)
    if dist.get_rank() == 1:
        values[2 * CHUNK] = bad
    output = summed(mean_over(ranks_per_node, torch.bfloat16, bits), values)
    assert torch.isfinite(output).all() == (dist.get_rank() != 2)
