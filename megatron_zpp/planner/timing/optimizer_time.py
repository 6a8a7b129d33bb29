"""How long an optimizer takes in a step beside element-wise updates: its products and messages.

While one round is computed, what belongs to the next arrives and results of the one before go back.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zpp.planner.timing.computing import mean_width
from megatron_zpp.planner.timing.hardware import Rates
from megatron_zpp.planner.timing.links import Load

Sides = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class OptimizerRound:
    """What a group sends, in either direction, and what its members compute.

    work: for each member, the operations by the sides of the products.
    """

    load: Load
    work: tuple[Counter[Sides], ...]

    def computing(self, rates: Rates) -> float:
        """Return the seconds of the busiest member's products."""
        return max(
            sum(
                operations / rates.products_at(mean_width(*sides))
                for sides, operations in member.items()
            )
            for member in self.work
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerRounds:
    """The rounds of each of the groups of ranks that work at once, in a share of the steps.

    sent: bytes of all ranks of a stage, by hop.
    """

    share: float
    groups: tuple[tuple[OptimizerRound, ...], ...]
    sent: Counter[str]

    @property
    def flops(self) -> int:
        """The operations of the busiest rank."""
        return max(
            (
                sum(sum(each.work[member].values()) for each in rounds)
                for rounds in self.groups
                for member in range(len(rounds[0].work))
            ),
            default=0,
        )

    def seconds(self, rates: Rates) -> float:
        """Return the mean seconds of a step, in which the slowest group is waited for."""
        slowest = max((seconds_of_rounds(each, rates) for each in self.groups), default=0.0)
        return self.share * slowest


def seconds_of_rounds(rounds: Sequence[OptimizerRound], rates: Rates) -> float:
    """Return the seconds of a group's rounds; its links carry one message after the other."""
    sending = [each.load.hop(rates).seconds for each in rounds]
    arrives = link_free = sending[0]
    computed = 0.0
    for index, each in enumerate(rounds):
        begin = max(computed, arrives)
        if index + 1 < len(rounds):
            arrives = link_free = max(link_free, begin) + sending[index + 1]
        computed = begin + each.computing(rates)
        link_free = max(link_free, computed) + sending[index]
    return link_free
