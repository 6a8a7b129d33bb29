"""The bytes a step will send, computed from a plan before anything is sent.

The ledger (`zeropp.wire.traffic`) counts what was sent, and tests compare the two. Gathers per step
of n micro-batches: at stage 3 each block once in forward and once in backward of every micro-batch,
the root once for both; at stages 1 and 2 every unit once. Where hpZ keeps a copy, only the first
gather of a step has an outer hop. The 8 bytes per unit of a step that also compares copies,
by default every 1000th, are not counted. Gradients are averaged once per micro-batch, at stages 0
and 1 once per step. With `reduces_once` they are at stages 2 and 3 too. With `keeps_roots` the root
is gathered once per step at stage 3, too.

What coded messages take depends on the numbers. They are counted as if they were not coded, which
is the most that they take; or, with `typical`, as runs have sent them (docs/numerics.md).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from types import MappingProxyType

import torch

from zeropp.sharding.plan import DataAxis, Plan, UnitPlan
from zeropp.wire.collectives import gradient_layouts, weight_layout
from zeropp.wire.rank_group import EXCHANGE, GATHER, REDUCE, Message, RankGroup, everyone, sum_of
from zeropp.wire.route import UNQUANTIZED, Route
from zeropp.wire.traffic import HOPS, PURPOSES, Sent

REDUCED_WHOLE = torch.float32  # the dtype in which stage 0 all-reduces
CHANGED_SHARE = 0.14  # of whole codes: what changes in them in a typical step, coded
CODED_SHARE = MappingProxyType({8: 0.9, 4: 0.78, 3: 0.8})  # of packed gradients, likewise, by bits


def rank_bytes(
    plan: Plan, num_micro_batches: int = 1, position: int | None = None, *, typical: bool = False
) -> dict[tuple[str, str], int]:
    """Return the bytes that this rank, or that at `position`, sends per step, by (purpose, hop)."""
    sent = sum_of(
        message
        for unit, count in Counter(plan.units).items()
        for message in unit_messages(
            plan,
            unit,
            unit.axis.group.position if position is None else position,
            num_micro_batches,
            count,
            typical=typical,
        )
    )
    return {(purpose, hop): sent[purpose, hop] for purpose in PURPOSES for hop in HOPS}


def node_bytes(
    plan: Plan, num_micro_batches: int = 1, *, typical: bool = False
) -> dict[tuple[str, str], float]:
    """Return the bytes of weights and gradients that a node sends per step, by (purpose, hop).

    The mean over nodes, which differ (periodically) only if hops begin in the middle of a node.
    """
    total: Counter[tuple[str, str]] = Counter()
    by_axis: dict[DataAxis, Counter[UnitPlan]] = {}
    for unit in plan.units:
        by_axis.setdefault(unit.axis, Counter())[unit] += 1
    for axis, units in by_axis.items():
        per_node, inner = axis.nodes.ranks_per_node, axis.weights.inner
        period = per_node if inner % per_node == 0 else lcm(per_node, inner)
        sent = sum_of(
            message
            for position in range(period)
            for unit, count in units.items()
            for message in unit_messages(
                plan, unit, position, num_micro_batches, count, typical=typical
            )
        )
        for key, num_bytes in sent.items():
            total[key] += num_bytes * per_node * axis.nodes.parts / period
    return {(purpose, hop): total[purpose, hop] for purpose in PURPOSES for hop in HOPS}


def first_bytes(plan: Plan) -> float:
    """Return the bytes that a node sends to others once in a run: frozen weights that all keep."""
    total = 0.0
    for unit in plan.units:
        route, nodes = unit.axis.weights, unit.axis.nodes
        if route.keeps and route.outer > 1 and not _trained(unit):
            row = _row_bytes(unit)
            gather = route.outer_hop(0).message(GATHER, row)
            total += gather.sent.get("across_nodes", 0) * nodes.ranks_per_node * nodes.parts
    return total


def unit_messages(
    plan: Plan,
    unit: UnitPlan,
    position: int,
    num_micro_batches: int,
    count: int = 1,
    *,
    typical: bool = False,
) -> Iterator[Message]:
    """Yield what `count` units alike send in a step, as the rank at `position` takes part in it."""
    if plan.stage == 0:
        group = everyone(unit.axis.nodes, position)
        whole = sum(spec.elements for spec in _trained(unit)) * REDUCED_WHOLE.itemsize
        yield Message(group=group, kind=REDUCE, num_bytes=whole, purpose="gradients", times=count)
        return
    is_kept = plan.stage < 3 or unit.is_root and plan.keeps_roots
    forward = count * (1 if is_kept else num_micro_batches)
    backward = count * num_micro_batches if unit.regathers else 0
    outer, inner = _gather(unit, position, typical=typical)
    if outer is not None and unit.axis.weights.keeps:
        yield replace(outer, times=count)
    elif outer is not None:
        yield replace(outer, times=forward)
        yield replace(outer, purpose="weights_backward", times=backward, is_forward=False)
    if inner is not None:
        yield replace(inner, times=forward)
        yield replace(inner, purpose="weights_backward", times=backward, is_forward=False)
    times = count * (1 if plan.reduces_once else num_micro_batches)
    means = _ring(unit, position) if plan.is_plain else _mean(unit, position, typical=typical)
    for group, kind, num_bytes in means:
        yield Message(
            group=group,
            kind=kind,
            num_bytes=num_bytes,
            purpose="gradients",
            times=times,
            is_forward=False,
        )


def _gather(
    unit: UnitPlan, position: int, *, typical: bool
) -> tuple[Message | None, Message | None]:
    """Return the outer and the inner hop of a gather in forward; None for a hop of one rank."""
    route, row, outer, inner = unit.axis.weights, _row_bytes(unit), None, None
    crosses_once = route.keeps and not _trained(unit)  # in the whole run
    if route.outer > 1 and not crosses_once:
        share = CHANGED_SHARE if typical and route.is_coded else 1
        group = route.outer_hop(position)
        outer = Message(
            group=group, kind=GATHER, num_bytes=round(share * row), purpose="weights_forward"
        )
    if route.inner > 1:
        group = route.inner_hop(position)
        inner = Message(
            group=group, kind=GATHER, num_bytes=row * route.outer, purpose="weights_forward"
        )
    return outer, inner


def _row_bytes(unit: UnitPlan) -> int:
    """Return the bytes of a rank's packed shard of a unit."""
    route, specs = unit.axis.weights, unit.specs
    if unit.mixed_bytes is not None:
        return unit.mixed_bytes
    if route.is_flat or any(spec.packed_bytes for spec in specs):
        width = unit.dtype.itemsize
        return sum(spec.packed_bytes or width * spec.elements for spec in specs)
    return weight_layout(specs, route, unit.dtype).packed_bytes


def _mean(unit: UnitPlan, position: int, *, typical: bool) -> Iterator[tuple[RankGroup, str, int]]:
    """Yield (group, kind, bytes) of the hops of a mean of gradients."""
    route = unit.axis.gradients
    inner, outer = gradient_layouts(_trained(unit), route, unit.wire_dtype)
    if route.inner > 1:
        yield route.inner_hop(position), EXCHANGE, inner.packed_bytes * route.outer
    if route.outer > 1:
        share = CODED_SHARE[route.bits[1]] if typical and route.is_coded else 1
        yield route.outer_hop(position), EXCHANGE, round(share * outer.packed_bytes)


def _ring(unit: UnitPlan, position: int) -> Iterator[tuple[RankGroup, str, int]]:
    """Yield a ring reduce-scatter, which sends as many slices as an all-gather sends shards."""
    row = sum(spec.elements for spec in _trained(unit)) * unit.wire_dtype.itemsize
    yield unit.axis.weights.inner_hop(position), GATHER, row


def _trained(unit: UnitPlan) -> tuple:
    return tuple(spec for spec in unit.specs if spec.trainable)


MIB = 2**20
COLUMNS = MappingProxyType({"across_nodes": "across nodes", "in_node": "in node"})
Rows = tuple[tuple[str, str], ...]  # (name, text); a text may have several lines


def describe(plan: Plan, num_micro_batches: int = 1, sent: Sent | None = None) -> Rows:
    """Return table rows: the nodes, the collectives, and the bytes that a node sends in a step.

    `sent` replaces the forecast of a node's bytes, which only covers weights and gradients.
    """
    if plan.num_ranks == 1:
        if not sent or not any(sent.values()):
            return (("collectives", "none: one rank"),)
        return (("collectives", "none: one rank of the data axis"), ("sends", _table(sent)))
    nodes = plan.axis.nodes
    if plan.stage == 0:
        width = f"{8 * REDUCED_WHOLE.itemsize} bit among {plan.num_ranks} ranks"
        rows = [("gradients", f"all-reduce, {width}")]
    else:
        hops = _hops(plan.axis.gradients, plan.units[0].wire_dtype, ("inner", "outer"))
        means = f"all-to-all, {hops}\nsummed in fp32, whatever the wire carries"
        rows = [("weights", _gathers(plan)), ("gradients", means)]
    table = _table(sent or node_bytes(plan, num_micro_batches, typical=True))
    coded = {route.is_coded for axis in plan.axes for route in (axis.weights, axis.gradients)}
    if True in coded:
        table += "\nacross nodes as in typical runs: messages are coded"
    elif None in coded and nodes.machines > 1:
        table += "\nacross nodes at most: messages are coded where that takes less time"
    size = nodes.ranks_per_node * nodes.parts
    return (("nodes", f"{nodes.count} of {size} ranks"), *rows, ("sends", table))


def _gathers(plan: Plan) -> str:
    route = plan.axis.weights
    lines = ["all-gather, " + _hops(route, plan.compute_dtype, ("outer", "inner"))]
    if plan.has_codes:
        lines.append("frozen matrices quantized, as they are stored")
    if route.keeps:
        lines.append("kept in each node until the weights change (hpZ)")
    if route.updates:
        lines.append("then updated with the changes of the INT8 codes")
    return "\n".join(lines)


def _hops(route: Route, wire: torch.dtype, order: tuple[str, str]) -> str:
    """Describe the hops of a route, without those of one rank."""
    widths = {"inner": route.bits[0], "outer": route.bits[1]}
    hops = {"inner": route.inner_hop(0), "outer": route.outer_hop(0)}
    words = []
    for name in order:
        if hops[name].size > 1:
            bits = widths[name]
            width = f"{8 * wire.itemsize} bit" if bits == UNQUANTIZED else f"INT{bits}"
            members = f"{hops[name].size}" if words else f"{hops[name].size} ranks"
            words.append(f"{width} among {members} {_where(hops[name])}")
    return ",\nthen ".join(words)


def _table(sent: Sent) -> str:
    """Format MiB by purpose with a column per hop; purposes that send nothing are left out."""
    purposes = dict.fromkeys(purpose for purpose, _ in sent)
    sums = {purpose: [sent[purpose, hop] for hop in COLUMNS] for purpose in purposes}
    sums["total"] = [sum(column) for column in zip(*sums.values(), strict=True)]
    lines = ["MiB per node and step" + "".join(f"{COLUMNS[hop]:>14}" for hop in COLUMNS)]
    for name, row in sums.items():
        if any(row):
            cells = "".join(f"{num_bytes / MIB:14.2f}" for num_bytes in row)
            lines.append(f"{name.replace('_', ' '):<21}{cells}")
    return "\n".join(lines)


def _where(group: RankGroup) -> str:
    near = sum(group.nodes.same(group.members[0], other) for other in group.members)
    if near == group.size:
        return "of a node"
    return "across nodes" if near == 1 else "in and across nodes"
