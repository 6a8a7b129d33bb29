"""The messages of each FSDP unit's collectives, with the bytes of the forecast.

What a collective sends is the difference between forecasts of one and of two micro-batches: the
first gather of a step is that of one micro-batch, a later one what the second adds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_zpp.planner.timing.links import Load, exchange, ring
from zeropp.sharding.forecast import node_bytes
from zeropp.sharding.plan import Plan, UnitPlan
from zeropp.wire.route import Route

Sent = Mapping[tuple[str, str], float]  # (purpose, hop) -> bytes of a node
Messages = tuple[Load, ...]  # of a collective's hops, one after the other
FORWARD, BACKWARD, GRADIENTS = "weights_forward", "weights_backward", "gradients"
ALL_REDUCE_RINGS = 2  # it is a reduce-scatter and an all-gather


@dataclass(frozen=True, kw_only=True)
class UnitMessages:
    """What a unit sends in a step; empty where a collective does not take place.

    early_reduction: in all micro-batches but the last.
    """

    first_gather: Messages
    later_gather: Messages
    backward_gather: Messages
    reduction: Messages
    early_reduction: Messages


def unit_messages(plan: Plan, subunits: tuple[UnitPlan, ...]) -> UnitMessages:
    """Return the messages of a unit that consists of `subunits` of the plan."""
    of_unit = replace(plan, units=subunits)
    one, two = (node_bytes(of_unit, count, typical=True) for count in (1, 2))
    more = {key: two[key] - one[key] for key in one}
    weights, gradients = subunits[0].axis.weights, subunits[0].axis.gradients
    return UnitMessages(
        first_gather=_gather(weights, one, FORWARD),
        later_gather=_gather(weights, more, FORWARD),
        backward_gather=_gather(weights, one, BACKWARD),
        reduction=_reduction(plan.stage, gradients, one),
        early_reduction=_reduction(plan.stage, gradients, more),
    )


def _gather(route: Route, sent: Sent, purpose: str) -> Messages:
    near, far = _by_hop(route, sent, purpose)
    nodes = route.nodes
    if route.outer == 1 or route.inner > nodes.ranks_per_node:
        hops = [ring(nodes.num_ranks, nodes.count, near, far)]
    else:
        hops = [ring(route.outer, route.outer, 0.0, far), ring(route.inner, 1, near, 0.0)]
    return tuple(hop for hop in hops if not hop.is_empty)


def _reduction(stage: int, route: Route, sent: Sent) -> Messages:
    near, far = _by_hop(route, sent, GRADIENTS)
    if stage == 0:
        nodes = route.nodes
        rings = ring(ALL_REDUCE_RINGS * nodes.num_ranks, ALL_REDUCE_RINGS * nodes.count, near, far)
        hops = [rings]
    else:
        hops = [exchange(near, 0.0), exchange(0.0, far)]
    return tuple(hop for hop in hops if not hop.is_empty)


def _by_hop(route: Route, sent: Sent, purpose: str) -> tuple[float, float]:
    """Return the bytes that a rank sends in its node, and that a node sends to others."""
    ranks = route.nodes.ranks_per_node * route.nodes.parts
    return sent[purpose, "in_node"] / ranks, sent[purpose, "across_nodes"]
