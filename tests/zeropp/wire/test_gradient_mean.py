"""The averaged gradients against an fp32 all-reduce of the same gradients: gain and direction."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import (
    ALL_THREE,
    PrescribedModel,
    backward,
    data_mesh,
    gradient_of,
    own_shard,
    shard_prescribed,
    zero_config,
)
from zeropp.fsdp_adapter import ShardSpec
from zeropp.quant.packing import ROTATED_4
from zeropp.wire.collectives import gradient_layouts, weight_layout
from zeropp.wire.rank_group import Nodes
from zeropp.wire.route import Route

NOISE = 0.118  # relative L2 error of INT8 then INT4 on Gaussian gradients, at most
SHAPES = [
    [(1026, 512), (512,), (7, 5)],
    [(12577, 64), (1,), (13,)],
    [(3, 5, 3, 3), (1, 1), (2, 3), (129,), (1, 257), (300, 1)],
]
ODD = [[(102, 51), (51,), (7, 5)], [(3, 5, 3, 3), (1, 1), (2, 3), (129,), (1, 257)]]
FLAT = [shape for unit in SHAPES for shape in unit]


def averaged(shapes: Sequence, rank_gradients: Sequence[torch.Tensor], config) -> list:
    """This rank's shards of the averaged gradients, from its own gradients."""
    sharding = shard_prescribed(shapes, config)
    backward(sharding, rank_gradients)
    return [weight.grad for weight in sharding.model.parameters()]


def moments(shapes: Sequence, dtype: torch.dtype, config) -> torch.Tensor:
    """(weights, 3) fp64: <a, b>, <b, b> and <a, a> of averages a and their reference b."""
    flat = [shape for unit in shapes for shape in unit]
    mine = [gradient_of(dist.get_rank(), i, shape).to(dtype) for i, shape in enumerate(flat)]
    means = averaged(shapes, mine, config)
    table = torch.zeros(len(flat), 3, dtype=torch.float64)
    for index, (gradient, own) in enumerate(zip(means, mine, strict=True)):
        reference = own.float()
        dist.all_reduce(reference)
        a = gradient.to_local().double()
        b = own_shard(reference / dist.get_world_size()).double()
        table[index] = torch.stack([(a * b).sum(), (b * b).sum(), (a * a).sum()])
    dist.all_reduce(table)
    return table


def check(table: torch.Tensor, sizes: Sequence[int], *, as_they_are: bool = True) -> None:
    """Gain and direction over the whole model, and the gain of each tensor.

    Over the model twice: every tensor brought to the same scale, and `as_they_are`, where the sum
    is that of the few tensors with the largest gradients, which must be large enough to tell.
    """
    scaled = table / table[:, 1:2]
    weight = torch.tensor(sizes, dtype=torch.float64)
    whole = [(scaled * weight[:, None]).sum(0)] + [table.sum(0)] * as_they_are
    for rows in whole:
        product, square, own_square = rows.tolist()
        assert product / square == pytest.approx(1, abs=0.005)
        assert product / math.sqrt(square * own_square) >= 0.99
    for (gain, _, _), size in zip(scaled.tolist(), sizes, strict=True):
        assert gain == pytest.approx(1, abs=0.005 + 3 * NOISE / math.sqrt(size)), size


def check_on_odd_shapes(ranks_per_node: int) -> None:
    config = zero_config(
        ALL_THREE | {"zero_hpz_partition_size": ranks_per_node},
        ranks_per_node,
        bf16={"enabled": True},
    )
    check(moments(SHAPES, torch.bfloat16, config), [math.prod(shape) for shape in FLAT])


@ranks(4, timeout=120)
def test_mean_on_2_nodes_of_2():
    """Peers' defects 1 to 3: gain devices-per-node, bf16 read as half, misaligned (1026, 512)."""
    check_on_odd_shapes(2)


@ranks(6, timeout=120)
def test_mean_on_2_nodes_of_3():
    check_on_odd_shapes(3)


@ranks(8, timeout=120)
def test_mean_on_4_nodes_of_2():
    check_on_odd_shapes(2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}])
@ranks(4)
def test_mean_in_every_dtype_and_stage(settings, stage):
    zero = {"stage": stage, "zero_quantized_gradients": True, "zero_quantized_weights": True}
    config = zero_config(zero, 2, **settings)
    sizes = [math.prod(shape) for unit in ODD for shape in unit]
    # ten times as large a tensor of each kind: the whole model's gain is known to 3 * 0.118 / 75
    large = [[(700, 51), *ODD[0]], *ODD[1:]]
    table = moments(large, getattr(torch, config.compute_format), config)
    check(table, [700 * 51, *sizes], as_they_are=False)


PAIRS = ([8, 8], [4, 4], [4, 8], [16, 4], [8, 16], [16, 16], [8, 3], [16, 3], [4, 3])
ONE_HOP = ((1, [8, 4]), (4, [8, 4]), (1, [8, 3]))  # in a node, or across nodes


@pytest.mark.parametrize(("ranks_per_node", "bits"), [*((2, pair) for pair in PAIRS), *ONE_HOP])
@pytest.mark.parametrize("stage", [1, 3])
@ranks(4)
def test_every_pair_of_widths_keeps_the_gain(stage, ranks_per_node, bits):
    """DeepSpeed 0.19.8: qgZ on one node is silently ignored; here it is INT8, or INT4."""
    zero = {"stage": stage, "zero_quantized_gradients": True}
    config = zero_config(zero, ranks_per_node, zeropp={"gradient_bits": bits})
    bits = {1: bits[1:], 2: bits, 4: bits[:1]}[ranks_per_node]
    row = 64 if {3, 4} & set(bits) else 51  # rows of 51 would get 8 bits for both
    table = moments([[(700, row), (64,)]], torch.float32, config)
    product, square, own_square = table[0].tolist()
    error = math.sqrt(max(0.0, own_square - 2 * product + square) / square)
    # Blocks of Gaussian data: 0.0068 (256 of INT8), 0.117 (128 of INT4), 0.21 (64 of INT3), at
    # most once per hop.
    # The inner hop's errors of R ranks add up as their gradients do, so they count once.
    worst = math.hypot(*({16: 1e-6, 8: 0.0075, 4: 0.12, 3: 0.22}[bit] for bit in bits))
    assert 0.5 * worst < error < 1.1 * worst or {*bits} == {16} and error < 1e-6
    assert product / square == pytest.approx(1, abs=0.005)
    exact = table[1]  # one dim: travels as it is
    assert exact[0] == pytest.approx(exact[1].item(), rel=1e-6)


WIDE = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}


@pytest.mark.parametrize(("count", "settings"), [(1, {}), (2, {}), (4, {}), (2, WIDE)])
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(4)
def test_without_quantization_gradients_are_plain_fsdp2_s(stage, count, settings):
    """To 1e-6 of each tensor's largest, however small its gradients are."""
    config = zero_config({"stage": stage}, count, **settings)
    flat = [shape for unit in ODD for shape in unit]
    dtype = getattr(torch, config.compute_format)
    mine = [gradient_of(dist.get_rank(), i, shape).to(dtype) for i, shape in enumerate(flat)]
    means = averaged(ODD, mine, config)
    torch.manual_seed(0)
    plain = PrescribedModel(ODD)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in (*plain.units, plain):
        fully_shard(unit, mesh=data_mesh(), mp_policy=policy)
    remaining = list(mine)
    for unit in plain.units:
        unit.gradients = [remaining.pop(0) for _ in unit.gradients]
    plain().backward()
    for ours, theirs in zip(means, plain.parameters(), strict=True):
        largest = theirs.grad.full_tensor().abs().max().item()
        assert largest > 0
        torch.testing.assert_close(
            ours.full_tensor(), theirs.grad.full_tensor(), rtol=0, atol=1e-6 * largest
        )


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("zero", [{"stage": 3}, ALL_THREE])
@ranks(4)
def test_rows_without_a_gradient_stay_exactly_zero(zero, bits):
    """A row of 128 is two blocks of INT3, one of 96 takes INT4, and one of 16 INT8."""
    if bits == 3 and zero is not ALL_THREE:
        return  # nothing is quantized: the same as with 4
    config = zero_config(zero, 2, zeropp={"gradient_bits": [8, bits]})
    for size in (16, 96, 128):
        shape = (50, size)
        sparse = torch.zeros(shape)
        sparse[[3, 17, 44]] = torch.randn(3, size, generator=torch.Generator().manual_seed(1))
        (gradient,) = averaged([[shape]], [sparse], config)
        whole = gradient.full_tensor()
        untouched = [row for row in range(50) if row not in (3, 17, 44)]
        assert (whole[untouched] == 0).all() and (whole[[3, 17, 44]] != 0).any(1).all()
        (nothing,) = averaged([[shape]], [torch.zeros(shape)], config)
        assert (nothing.full_tensor() == 0).all()


WORLD, CHUNK = 4, 5
WIRES = {wire: {"communication_data_type": wire} for wire in ("fp32", "bf16", "fp16")}
HOPS = [(nodes_of, 3, WIRES[wire]) for nodes_of in (1, 4) for wire in WIRES]
HOPS += [(4, stage, {"bf16": {"enabled": True}}) for stage in (1, 2, 3)]
TWO_HOPS = [(2, 3, WIRES["fp32"]), (2, 3, WIRES["bf16"])]


def sent_by(rank: int) -> torch.Tensor:
    """(WORLD, CHUNK) fp32 with exponents far apart."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(WORLD * CHUNK, generator=generator)
    values *= 10.0 ** torch.randint(-6, 6, values.shape, generator=generator)
    return values.view(WORLD, CHUNK)


@pytest.mark.parametrize(("ranks_per_node", "stage", "settings"), [*HOPS, *TWO_HOPS])
@ranks(WORLD)
def test_a_hop_sums_exactly_but_for_one_rounding_of_each_term(ranks_per_node, stage, settings):
    """Of two hops, the first one's sums are the terms of the second."""
    config = zero_config({"stage": stage}, ranks_per_node, **settings)
    (mean,) = averaged([[(WORLD, CHUNK)]], [sent_by(dist.get_rank())], config)
    dtype = getattr(torch, config.wire_format)
    terms = [sent_by(r)[dist.get_rank()].to(dtype).float() for r in range(WORLD)]
    if ranks_per_node == 2:
        terms = [(terms[n] + terms[n + 1]).to(dtype).float() for n in (0, 2)]
    expected = terms[0]
    for term in terms[1:]:
        expected = expected + term
    assert torch.equal(mean.to_local()[0] * WORLD, expected)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
@ranks(WORLD)
def test_overflow_on_one_rank_is_seen_by_the_owner(ranks_per_node, bad, quantized):
    values = torch.ones(WORLD, CHUNK)
    if dist.get_rank() == 1:
        values[2] = bad
    zero = {"stage": 3, "zero_quantized_gradients": quantized}
    config = zero_config(zero, ranks_per_node, communication_data_type="bf16")
    (mean,) = averaged([[(WORLD, CHUNK)]], [values], config)
    assert torch.isfinite(mean.to_local()).all() == (dist.get_rank() != 2)


@pytest.mark.parametrize(
    ("bits", "of_96"),
    [((8, 3), (8, ROTATED_4)), ((4, 3), (ROTATED_4,) * 2), ((4, 16), (ROTATED_4, 16))],
)
def test_matrices_whose_rows_are_no_whole_groups_take_more_bits(bits, of_96):
    """For 3 bits rows are multiples of 64, for 4 bits, which are rotated too, of 32."""
    rows = (64, 128, 96, 32, 1, 5 * 3 * 3, 64 * 3 * 3)
    specs = [ShardSpec(elements=7 * row, row=row, ndim=2, trainable=True) for row in rows]
    specs.append(ShardSpec(elements=64, row=1, ndim=1, trainable=True))
    route = Route(nodes=Nodes(num_ranks=4, ranks_per_node=2), inner=2, bits=bits)
    layouts = gradient_layouts(specs, route, torch.bfloat16)
    for layout, asked, narrow in zip(layouts, bits, of_96, strict=True):
        whole = ROTATED_4 if asked == 4 else asked
        wide = max(8, asked)
        expected = (whole, whole, narrow, narrow, wide, wide, whole)
        assert layout.bits == (*expected, 16)


def test_weights_of_4_bits_are_not_rotated():
    specs = [ShardSpec(elements=7 * row, row=row, ndim=2, trainable=True) for row in (64, 3)]
    route = Route(nodes=Nodes(num_ranks=4, ranks_per_node=2), inner=2, bits=(4, 4))
    assert weight_layout(specs, route, torch.bfloat16).bits == (4, 4)
