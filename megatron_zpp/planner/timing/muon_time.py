"""How long Muon orthogonalizes matrices in a step, beside what is on its way.

While the blocks of one round are computed, those of the next arrive and those of the one before go
back (zeropp/optim/muon/matrix_step.py).
"""

from collections.abc import Sequence

from megatron_zpp.planner.parts.planned_muon import Groups, PlannedMuon, Turn
from megatron_zpp.planner.timing.computing import mean_width
from megatron_zpp.planner.timing.hardware import Rates
from megatron_zpp.planner.timing.links import exchange


def muon_seconds(muon: PlannedMuon, rates: Rates) -> float:
    """Return the seconds of a step's rounds, the mean of the steps; groups wait for the slowest."""
    return sum(each.share * _slowest(each, rates) for each in muon.groups)


def _slowest(groups: Groups, rates: Rates) -> float:
    return max((seconds_of_turns(turns, rates) for turns in groups.turns), default=0.0)


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
