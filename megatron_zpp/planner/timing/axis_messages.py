"""What ranks that share a model's work send each other, with the bytes of the forecast.

Moves of tensor and context parallelism are waited for where they are made: what a layer computes
next needs them. Stages of a pipeline send beside what they compute.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_zpp.model.part import Part
from megatron_zpp.planner.node_traffic import axis_forecast
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.planner.parts.planned_run import PlannedRun
from megatron_zpp.planner.timing.hardware import Rates
from megatron_zpp.planner.timing.links import ALL_REDUCE_RINGS, Load, exchange, ring
from zeropp.wire.rank_group import EXCHANGE, REDUCE, Message

PIPELINE = "pipeline"


@dataclass(frozen=True, kw_only=True)
class StageMessages:
    """What a micro-batch sends in a stage: in each of its layers, before and after them, and on.

    onward: activations to the stage after this one. back: their gradients to the one before.
    """

    layer_forward: tuple[Load, ...]
    layer_backward: tuple[Load, ...]
    ends_forward: tuple[Load, ...]
    ends_backward: tuple[Load, ...]
    onward: tuple[Load, ...]
    back: tuple[Load, ...]


def stage_messages(run: PlannedRun, stage: Part) -> StageMessages:
    """Return the messages of a micro-batch in a stage of a rank."""
    messages = [each for each in axis_forecast(run).messages(stage) if each.times]

    def chosen(*, is_pipeline: bool, is_forward: bool, in_layers: bool = False) -> tuple[Load, ...]:
        return repeated(
            (
                each
                for each in messages
                if (each.purpose == PIPELINE, each.is_forward, each.in_layers)
                == (is_pipeline, is_forward, in_layers)
            ),
            run.ranks,
            len(stage.layers) if in_layers else 1,
        )

    return StageMessages(
        layer_forward=chosen(is_pipeline=False, is_forward=True, in_layers=True),
        layer_backward=chosen(is_pipeline=False, is_forward=False, in_layers=True),
        ends_forward=chosen(is_pipeline=False, is_forward=True),
        ends_backward=chosen(is_pipeline=False, is_forward=False),
        onward=chosen(is_pipeline=True, is_forward=True),
        back=chosen(is_pipeline=True, is_forward=False),
    )


def repeated(messages: Iterable[Message], ranks: PlannedRanks, parts: int = 1) -> tuple[Load, ...]:
    """Return how messages occupy links, each of which is spread over equal parts."""
    return tuple(replace(load_of(each, ranks), times=each.times / parts) for each in messages)


def load_of(message: Message, ranks: PlannedRanks) -> Load:
    """Return how one of the collectives that a message stands for occupies the links."""
    single, members = replace(message, times=1), message.group.members
    sent = [single.of(member).sent for member in members]
    near = max(each.get("in_node", 0) for each in sent)
    # All ranks of a node that compute the same stage send at once, each in its own group.
    senders = min(ranks.nodes.ranks_per_node, ranks.num_ranks // ranks.pipeline_size)
    far = sum(each.get("across_nodes", 0) for each in sent) / len(members) * senders
    if message.kind == EXCHANGE:
        return exchange(near, far)
    num_nodes = len({rank // ranks.nodes.ranks_per_node for rank in members})
    rings = ALL_REDUCE_RINGS if message.kind == REDUCE else 1
    return ring(rings * len(members), rings * num_nodes, near, far)


def seconds_of(messages: Iterable[Load], rates: Rates) -> float:
    """Return how long messages take, one after the other."""
    return sum(each.seconds(rates) for each in messages)
