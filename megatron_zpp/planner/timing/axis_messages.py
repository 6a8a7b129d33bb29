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
from megatron_zpp.planner.timing.links import Message, exchange, ring
from megatron_zpp.planner.timing.messages import ALL_REDUCE_RINGS
from megatron_zpp.recipe.activation_forecast import Move
from zeropp.wire.tokens.peers import AXES, EXCHANGE, REDUCE
from zeropp.wire.traffic import Traffic

PIPELINE = "pipeline"


@dataclass(frozen=True)
class Repeated:
    """A message that is sent so many times, one after the other."""

    message: Message
    times: float

    def seconds(self, rates: Rates) -> float:
        """Return how long the links are occupied."""
        return self.times * self.message.hop(rates).seconds


@dataclass(frozen=True, kw_only=True)
class StageMessages:
    """What a micro-batch sends in a stage: in each of its layers, before and after them, and on.

    onward: activations to the stage after this one. back: their gradients to the one before.
    """

    layer_forward: tuple[Repeated, ...]
    layer_backward: tuple[Repeated, ...]
    ends_forward: tuple[Repeated, ...]
    ends_backward: tuple[Repeated, ...]
    onward: tuple[Repeated, ...]
    back: tuple[Repeated, ...]


def stage_messages(run: PlannedRun, stage: Part) -> StageMessages:
    """Return the messages of a micro-batch in a stage of a rank."""
    moves = [move for move in axis_forecast(run).moves(stage) if move.times]

    def chosen(
        *, is_pipeline: bool, is_forward: bool, in_layers: bool = False
    ) -> tuple[Repeated, ...]:
        return repeated(
            (
                move
                for move in moves
                if (move.axis == PIPELINE, move.is_forward, move.in_layers)
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


def repeated(moves: Iterable[Move], ranks: PlannedRanks, parts: int = 1) -> tuple[Repeated, ...]:
    """Return the messages of moves, each of which is spread over equal parts."""
    return tuple(Repeated(message_of(move, ranks), move.times / parts) for move in moves)


def message_of(move: Move, ranks: PlannedRanks) -> Message:
    """Return the message of one of the collectives that a move stands for."""
    single, members = replace(move, times=1), move.hop.members
    ledger = Traffic(AXES)
    near = 0
    for rank in members:
        before = ledger.sent[move.axis, "in_node"]
        single.count(rank, ledger)
        near = max(near, ledger.sent[move.axis, "in_node"] - before)
    # All ranks of a node that compute the same stage send at once, each in its own group.
    senders = min(ranks.nodes.ranks_per_node, ranks.num_ranks // ranks.pipeline_size)
    far = ledger.sent[move.axis, "across_nodes"] / len(members) * senders
    if move.kind == EXCHANGE:
        return exchange(near, far)
    num_nodes = len({rank // ranks.nodes.ranks_per_node for rank in members})
    rings = ALL_REDUCE_RINGS if move.kind == REDUCE else 1
    return ring(rings * len(members), rings * num_nodes, near, far)


def seconds_of(messages: Iterable[Repeated], rates: Rates) -> float:
    """Return how long messages take, one after the other."""
    return sum(each.seconds(rates) for each in messages)
