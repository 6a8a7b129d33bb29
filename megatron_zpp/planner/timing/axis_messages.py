"""What ranks that share a model's work send each other, with the bytes of the forecast.

Moves of tensor and context parallelism are waited for where they are made: what a layer computes
next needs them. Stages of a pipeline send beside what they compute.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from megatron_zpp.model.part import Part
from megatron_zpp.planner.node_traffic import axis_forecast
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.planner.parts.planned_run import PlannedRun
from megatron_zpp.planner.timing.hardware import Rates
from megatron_zpp.planner.timing.links import Load, collective
from zeropp.wire.rank_group import Message

IN_LAYER, AT_ENDS, PIPELINE = "layer", "ends", "pipeline"  # where: the last is a purpose, too


def stage_messages(run: PlannedRun, stage: Part) -> dict[tuple[str, bool], list[Load]]:
    """Return the messages of a micro-batch in a stage of a rank, by (where, is_forward).

    Those `IN_LAYER` are of each layer, `AT_ENDS` before and after the layers; in a `PIPELINE`
    activations go to the stage after this one, and their gradients to the one before.
    """
    kinds = product((IN_LAYER, AT_ENDS, PIPELINE), (True, False))
    found: dict[tuple[str, bool], list[Load]] = {kind: [] for kind in kinds}
    for each in axis_forecast(run).messages(stage):
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


def seconds_of(messages: Iterable[Load], rates: Rates) -> float:
    """Return how long messages take, one after the other."""
    return sum(each.seconds(rates) for each in messages)
