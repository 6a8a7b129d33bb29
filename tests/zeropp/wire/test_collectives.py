"""The gradient mean of one unit, through FSDP2, against the expected sum."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import ranks
from zeropp.fsdp_adapter import MixedPrecisionPolicy, own_specs, shard_unit
from zeropp.sharding.plan import DataAxis, UnitPlan
from zeropp.sharding.root import Wiring
from zeropp.wire.gradients import GradientUse
from zeropp.wire.rank_group import Nodes
from zeropp.wire.route import Route
from zeropp.wire.traffic import Traffic

WORLD, CHUNK = 4, 5


def sent_by(rank: int) -> torch.Tensor:
    """(WORLD * CHUNK,) fp32 with exponents far apart."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(WORLD * CHUNK, generator=generator)
    return values * 10.0 ** torch.randint(-6, 6, values.shape, generator=generator)


def reduced_sum(
    ranks_per_node: int, values: torch.Tensor, *, wire: torch.dtype, bits: tuple[int, int]
) -> torch.Tensor:
    """What `GradientMean` makes of a unit of one (WORLD, CHUNK) matrix, times WORLD."""
    mesh = init_device_mesh("cpu", (WORLD,))
    unit = nn.Linear(CHUNK, WORLD, bias=False)
    shard_unit(
        [unit], [*unit.parameters()], mesh, MixedPrecisionPolicy(), reshard_after_forward=True
    )
    nodes = Nodes(num_ranks=WORLD, ranks_per_node=ranks_per_node)
    route = Route(nodes=nodes, inner=ranks_per_node, bits=bits)
    use = GradientUse([mesh.get_group()], torch.device("cpu"))
    axis = DataAxis(
        weights=Route(nodes=nodes, inner=WORLD),
        gradients=route,
        num_losses=WORLD,
        ranks=tuple(range(WORLD)),
        position=mesh.get_local_rank(),
    )
    plan = UnitPlan(specs=own_specs(unit), axis=axis, dtype=torch.float32, wire_dtype=wire)
    Wiring(Traffic(), use).connect(unit, plan, stage=3)
    unit.set_requires_gradient_sync(True)
    (unit(torch.eye(CHUNK)) * values.view(WORLD, CHUNK).T).sum().backward()
    return unit.weight.grad.to_local().flatten() * WORLD


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("ranks_per_node", [1, 4])
@ranks(WORLD)
def test_one_hop_sums_exactly_but_for_one_rounding_of_each_term(ranks_per_node, wire):
    rank, dtype = dist.get_rank(), getattr(torch, wire)
    output = reduced_sum(ranks_per_node, sent_by(rank), wire=dtype, bits=(16, 16))
    terms = torch.stack([sent_by(r).view(WORLD, CHUNK)[rank].to(dtype) for r in range(WORLD)])
    expected = terms[0].float()
    for term in terms[1:]:
        expected = expected + term.float()
    assert torch.equal(output, expected)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@ranks(WORLD)
def test_two_hops_sum_within_a_node_and_then_the_nodes_sums(wire):
    rank, dtype = dist.get_rank(), getattr(torch, wire)
    output = reduced_sum(2, sent_by(rank), wire=dtype, bits=(16, 16))
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
    output = reduced_sum(ranks_per_node, values, wire=torch.bfloat16, bits=bits)
    assert torch.isfinite(output).all() == (dist.get_rank() != 2)
