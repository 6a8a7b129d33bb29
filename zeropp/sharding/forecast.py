"""The bytes a step will send, computed from a plan before anything is sent.

The ledger (`zeropp.wire.traffic`) counts what was sent, and tests compare the two. Gathers per step
of n micro-batches: at stage 3 each block once in forward and once in backward of every micro-batch,
the root once for both; at stages 1 and 2 every unit once. Where hpZ keeps a copy, only the first
gather of a step has an outer hop. The `CHECK_BYTES` per unit of a step that also compares copies,
by default every 1000th, are not counted. Gradients are averaged once per micro-batch, at stages 0
and 1 once per step. With `reduces_once` they are at stages 2 and 3 too. With `keeps_roots` the root
is gathered once per step at stage 3, too.

What coded messages take depends on the numbers. They are counted as if they were not coded, which
is the most that they take; or, with `typical`, as runs have sent them (docs/numerics.md).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import lcm
from types import MappingProxyType

import torch

from zeropp.sharding.plan import DataAxis, Plan, UnitPlan
from zeropp.wire.collectives import gradient_layouts, weight_layout
from zeropp.wire.route import Hop
from zeropp.wire.traffic import HOPS, PURPOSES

REDUCED_WHOLE = torch.float32  # the dtype in which stage 0 all-reduces
CHANGED_SHARE = 0.14  # of whole codes: what changes in them in a typical step, coded
CODED_SHARE = MappingProxyType({8: 0.9, 4: 0.78, 3: 0.8})  # of packed gradients, likewise, by bits

ByHop = Mapping[str, int]  # hop -> bytes that a rank sends


def rank_bytes(
    plan: Plan, num_micro_batches: int = 1, position: int | None = None, *, typical: bool = False
) -> dict[tuple[str, str], int]:
    """Return the bytes that this rank, or that at `position`, sends per step, by (purpose, hop)."""
    sent: Counter[tuple[str, str]] = Counter()
    for unit, count in Counter(plan.units).items():
        place = unit.axis.position if position is None else position
        _add(sent, plan, unit, place, num_micro_batches, count, typical=typical)
    return {(purpose, hop): sent[purpose, hop] for purpose in PURPOSES for hop in HOPS}


def node_bytes(
    plan: Plan, num_micro_batches: int = 1, *, typical: bool = False
) -> dict[tuple[str, str], float]:
    """Return the bytes that a node's ranks send per step, by (purpose, hop): the mean over nodes.

    Nodes differ only if hops begin in the middle of a node; the pattern repeats after some ranks.
    """
    total: Counter[tuple[str, str]] = Counter()
    by_axis: dict[DataAxis, Counter[UnitPlan]] = {}
    for unit in plan.units:
        by_axis.setdefault(unit.axis, Counter())[unit] += 1
    for axis, units in by_axis.items():
        per_node, inner = axis.nodes.ranks_per_node, axis.weights.inner
        period = per_node if inner % per_node == 0 else lcm(per_node, inner)
        sent: Counter[tuple[str, str]] = Counter()
        for position in range(period):
            for unit, count in units.items():
                _add(sent, plan, unit, position, num_micro_batches, count, typical=typical)
        for key, num_bytes in sent.items():
            total[key] += num_bytes * per_node * axis.nodes.parts / period
    return {(purpose, hop): total[purpose, hop] for purpose in PURPOSES for hop in HOPS}


def first_bytes(plan: Plan) -> float:
    """Return the bytes that a node sends to others once in a run: frozen weights that all keep."""
    total = 0.0
    for unit in plan.units:
        route, nodes = unit.axis.weights, unit.axis.nodes
        if route.keeps and route.outer > 1 and not _trained(unit):
            outer, _ = _gather(unit, 0, typical=False, is_first=True)
            total += outer.get("across_nodes", 0) * nodes.ranks_per_node * nodes.parts
    return total


def _add(
    sent: Counter,
    plan: Plan,
    unit: UnitPlan,
    position: int,
    num_micro_batches: int,
    count: int,
    *,
    typical: bool,
) -> None:
    """Add what `count` units alike send in a step."""
    for purpose, times, by_hop in _collectives(plan, unit, position, num_micro_batches, typical):
        for hop, num_bytes in by_hop.items():
            sent[purpose, hop] += count * times * num_bytes


def _collectives(
    plan: Plan, unit: UnitPlan, position: int, num_micro_batches: int, typical: bool
) -> Iterator[tuple[str, int, ByHop]]:
    """Yield (purpose, how often, bytes) of a unit's collectives in a step."""
    if plan.stage == 0:
        yield "gradients", 1, _all_reduce(unit, position)
        return
    is_kept = plan.stage < 3 or unit.is_root and plan.keeps_roots
    forward = 1 if is_kept else num_micro_batches
    backward = num_micro_batches if unit.regathers else 0
    outer, inner = _gather(unit, position, typical=typical)
    first_only = unit.axis.weights.keeps
    yield "weights_forward", 1 if first_only else forward, outer
    yield "weights_backward", 0 if first_only else backward, outer
    yield "weights_forward", forward, inner
    yield "weights_backward", backward, inner
    means = _ring(unit, position) if plan.is_plain else _mean(unit, position, typical=typical)
    for by_hop in means:
        yield "gradients", 1 if plan.reduces_once else num_micro_batches, by_hop


def _gather(
    unit: UnitPlan, position: int, *, typical: bool, is_first: bool = False
) -> tuple[ByHop, ByHop]:
    """Return what the outer and the inner hop of a gather send, in a step or first in a run."""
    route, specs = unit.axis.weights, unit.specs
    layout = weight_layout(specs, route, unit.dtype)
    row = layout.packed_bytes
    if route.is_flat or any(spec.packed_bytes for spec in specs):
        width = unit.dtype.itemsize
        row = sum(spec.packed_bytes or width * spec.elements for spec in specs)
    row = row if unit.mixed_bytes is None else unit.mixed_bytes
    outer: ByHop = {}
    inner: ByHop = {}
    is_kept = route.keeps and not _trained(unit)  # it crosses once in the whole run
    if route.outer > 1 and (is_first or not is_kept):
        share = CHANGED_SHARE if typical and route.is_coded else 1
        outer = route.outer_hop(position).gather_bytes(position, round(share * row))
    if route.inner > 1:
        inner = route.inner_hop(position).gather_bytes(position, row * route.outer)
    return outer, inner


def _mean(unit: UnitPlan, position: int, *, typical: bool) -> Iterator[ByHop]:
    """Yield what the hops of a mean of gradients send."""
    route = unit.axis.gradients
    inner, outer = gradient_layouts(_trained(unit), route, unit.wire_dtype)
    if route.inner > 1:
        part = inner.packed_bytes * route.outer
        yield route.inner_hop(position).exchange_bytes(position, part)
    if route.outer > 1:
        share = CODED_SHARE[route.bits[1]] if typical and route.is_coded else 1
        part = round(share * outer.packed_bytes)
        yield route.outer_hop(position).exchange_bytes(position, part)


def _ring(unit: UnitPlan, position: int) -> Iterator[ByHop]:
    """Yield a ring reduce-scatter, which sends as many slices as an all-gather sends shards."""
    row = sum(spec.elements for spec in _trained(unit)) * unit.wire_dtype.itemsize
    yield unit.axis.weights.inner_hop(position).gather_bytes(position, row)


def _all_reduce(unit: UnitPlan, position: int) -> ByHop:
    """Return a ring all-reduce: it passes each rank's share of the buffer around twice."""
    nodes = unit.axis.nodes
    whole = sum(spec.elements for spec in _trained(unit)) * REDUCED_WHOLE.itemsize
    everyone = Hop(members=tuple(range(nodes.num_ranks)), nodes=nodes)
    return everyone.gather_bytes(position, round(2 * whole / nodes.num_ranks))


def _trained(unit: UnitPlan) -> tuple:
    return tuple(spec for spec in unit.specs if spec.trainable)
