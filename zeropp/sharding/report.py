"""Describes a plan in words: the collectives as they run, and the bytes that a node sends."""

from types import MappingProxyType

import torch

from zeropp.sharding.forecast import REDUCED_WHOLE, node_bytes
from zeropp.sharding.plan import Plan
from zeropp.wire.rank_group import RankGroup
from zeropp.wire.route import UNQUANTIZED, Route
from zeropp.wire.traffic import Sent

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
    if any(unit.axis.weights.is_coded or unit.axis.gradients.is_coded for unit in plan.units):
        table += "\nacross nodes as in typical runs: messages are coded"
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
