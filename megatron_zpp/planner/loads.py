"""What a step sends, as loads of the links, with the bytes of the forecast.

Units are gathered and reduced beside what is computed. Moves of tensor and context parallelism are
waited for where they are made: what a layer computes next needs them. Stages of a pipeline send
beside what they compute.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import lcm

from megatron_zpp.model.part import Part
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.planner.parts.planned_run import PlannedRun
from megatron_zpp.planner.timing.hardware import Rates
from megatron_zpp.planner.timing.links import Load, collective, exchange, ring
from zeropp.sharding import Plan, UnitPlan, forecast
from zeropp.wire import REDUCE, Message, Route

Sent = Mapping[tuple[str, str], float]  # (purpose, hop) -> bytes of a node's ranks
Loads = tuple[Load, ...]  # of a collective's hops, one after the other
FORWARD, BACKWARD, GRADIENTS = "weights_forward", "weights_backward", "gradients"
SEVERAL = 2  # micro-batches: what is sent so often is sent in each
IN_LAYER, AT_ENDS, PIPELINE = "layer", "ends", "pipeline"  # where: the last is a purpose, too


def unit_loads(plan: Plan, subunits: Sequence[UnitPlan]) -> dict[str, Loads]:
    """Return what a unit that consists of `subunits` of the plan sends, as `UnitWork` names it.

    What does not take place is empty.
    """
    weights, gradients = subunits[0].axis.weights, subunits[0].axis.gradients
    once, each = _sent(plan, subunits)
    first = once + each
    return {
        "first_gather": _gather(weights, first, FORWARD),
        "later_gather": _gather(weights, each, FORWARD),
        "backward_gather": _gather(weights, each, BACKWARD),
        "reduction": _reduction(plan.stage, gradients, first),
        "early_reduction": _reduction(plan.stage, gradients, each),
    }


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


def _gather(route: Route, sent: Sent, purpose: str) -> Loads:
    near, far = _by_hop(route, sent, purpose)
    nodes = route.nodes
    if route.outer == 1 or route.inner > nodes.ranks_per_node:
        hops = [ring(nodes.num_ranks, nodes.count, near, far)]
    else:
        hops = [ring(route.outer, route.outer, 0.0, far), ring(route.inner, 1, near, 0.0)]
    return tuple(hop for hop in hops if not hop.is_empty)


def _reduction(stage: int, route: Route, sent: Sent) -> Loads:
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


def stage_loads(run: PlannedRun, stage: Part) -> dict[tuple[str, bool], list[Load]]:
    """Return what a micro-batch sends in a stage of a rank, by (where, is_forward).

    Those `IN_LAYER` are of each layer, `AT_ENDS` before and after the layers; in a `PIPELINE`
    activations go to the stage after this one, and their gradients to the one before.
    """
    found: dict[tuple[str, bool], list[Load]] = {
        (where, is_forward): []
        for where in (IN_LAYER, AT_ENDS, PIPELINE)
        for is_forward in (True, False)
    }
    for each in run.forecast.messages(stage):
        if each.times:
            where = IN_LAYER if each.in_layers else AT_ENDS
            where = PIPELINE if each.purpose == PIPELINE else where
            parts = len(stage.layers) if where == IN_LAYER else 1
            found[where, each.is_forward].append(load_of(each, run.ranks, parts))
    return found


def load_of(message: Message, ranks: PlannedRanks, parts: int = 1) -> Load:
    """Return how the collectives of a message, spread over equal parts, occupy the links."""
    single, members = replace(message, times=1), message.group.members
    sent = [single.of(member).sent for member in members]
    near = max(each.get("in_node", 0) for each in sent)
    # All ranks of a node that compute the same stage send at once, each in its own group.
    senders = min(ranks.nodes.ranks_per_node, ranks.num_ranks // ranks.pipeline_size)
    far = sum(each.get("across_nodes", 0) for each in sent) / len(members) * senders
    num_nodes = len({rank // ranks.nodes.ranks_per_node for rank in members})
    load = collective(message.kind, len(members), num_nodes, near, far)
    return replace(load, times=message.times / parts)


def seconds_of(loads: Iterable[Load], rates: Rates) -> float:
    """Return how long the links take for loads one after the other."""
    return sum(each.seconds(rates) for each in loads)
