"""The messages of each FSDP unit's collectives, as the forecast lists them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from megatron_zpp.planner.timing.links import Load, collective, exchange, ring
from zeropp.sharding import forecast
from zeropp.sharding.plan import Plan, UnitPlan
from zeropp.wire.rank_group import REDUCE
from zeropp.wire.route import Route

Sent = Mapping[tuple[str, str], float]  # (purpose, hop) -> bytes of a node's ranks
Messages = tuple[Load, ...]  # of a collective's hops, one after the other
FORWARD, BACKWARD, GRADIENTS = "weights_forward", "weights_backward", "gradients"
SEVERAL = 2  # micro-batches: what is sent so often is sent in each


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


def unit_messages(plan: Plan, subunits: Sequence[UnitPlan]) -> UnitMessages:
    """Return the messages of a unit that consists of `subunits` of the plan."""
    weights, gradients = subunits[0].axis.weights, subunits[0].axis.gradients
    once, each = _sent(plan, subunits)
    first = once + each
    return UnitMessages(
        first_gather=_gather(weights, first, FORWARD),
        later_gather=_gather(weights, each, FORWARD),
        backward_gather=_gather(weights, each, BACKWARD),
        reduction=_reduction(plan.stage, gradients, first),
        early_reduction=_reduction(plan.stage, gradients, each),
    )


def _sent(plan: Plan, subunits: Sequence[UnitPlan]) -> tuple[Counter, Counter]:
    """Return what a node sends in one micro-batch of a step, and in each; the mean over nodes."""
    once: Counter[tuple[str, str]] = Counter()
    each: Counter[tuple[str, str]] = Counter()
    nodes, inner = subunits[0].axis.nodes, subunits[0].axis.weights.inner
    per_node = nodes.ranks_per_node
    period = per_node if inner % per_node == 0 else lcm(per_node, inner)
    for unit in subunits:
        for position in range(period):
            for message in forecast.unit_messages(plan, unit, position, SEVERAL, typical=True):
                total = each if message.times == SEVERAL else once
                for hop, num_bytes in message.sent.items():
                    total[message.purpose, hop] += num_bytes and num_bytes / message.times
    for total in (once, each):
        for key in total:
            total[key] *= per_node * nodes.parts / period
    return once, each


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
        hops = [collective(REDUCE, route.nodes.num_ranks, route.nodes.count, near, far)]
    else:
        hops = [exchange(near, 0.0), exchange(0.0, far)]
    return tuple(hop for hop in hops if not hop.is_empty)


def _by_hop(route: Route, sent: Sent, purpose: str) -> tuple[float, float]:
    """Return the bytes that a rank sends in its node, and that a node sends to others."""
    ranks = route.nodes.ranks_per_node * route.nodes.parts
    return sent[purpose, "in_node"] / ranks, sent[purpose, "across_nodes"]
