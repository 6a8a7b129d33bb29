"""How long an optimizer takes in a step beside element-wise updates: its products and messages.

While one round is computed, what belongs to the next arrives and results of the one before go back.
"""

from collections.abc import Sequence

from megatron_zpp.planner.parts.planned_optimizer import PlannedOptimizer, Turn, Turns
from megatron_zpp.planner.timing.computing import mean_width
from megatron_zpp.planner.timing.hardware import Rates
from megatron_zpp.planner.timing.links import exchange


def optimizer_seconds(optimizer: PlannedOptimizer, rates: Rates) -> float:
    """Return the seconds of a step's rounds, the mean of the steps; groups wait for the slowest."""
    return sum((each.share * _slowest(each, rates) for each in optimizer.turns), 0.0)


def _slowest(turns: Turns, rates: Rates) -> float:
    return max((seconds_of_turns(each, rates) for each in turns.turns), default=0.0)


def seconds_of_turns(turns: Sequence[Turn], rates: Rates) -> float:
    """Return the seconds of a group's rounds; its links carry one message after the other."""
    sending = [exchange(turn.near_bytes, turn.far_bytes).hop(rates).seconds for turn in turns]
    arrives = link_free = sending[0]
    computed = 0.0
    for index, turn in enumerate(turns):
        begin = max(computed, arrives)
        if index + 1 < len(turns):
            arrives = link_free = max(link_free, begin) + sending[index + 1]
        computed = begin + _computing(turn, rates)
        link_free = max(link_free, computed) + sending[index]
    return link_free


def _computing(turn: Turn, rates: Rates) -> float:
    """Return the seconds of the busiest member's products."""
    return max(
        sum(
            operations / rates.products_at(mean_width(*sides))
            for sides, operations in member.items()
        )
        for member in turn.work
    )
