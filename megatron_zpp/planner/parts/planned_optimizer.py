"""What an optimizer adds to a step of a planned run, beside an update by AdamW."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.part import Part
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.settings.config import Config
from zeropp.fsdp_adapter import ShardSpec

Sides = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One round of a group: what is sent, in either direction, and what its members compute.

    near_bytes: that the member that sends most sends in its node. far_bytes: that all ranks of a
    node send to others. work: for each member, the operations by the sides of the products.
    """

    near_bytes: float
    far_bytes: float
    work: tuple[Counter[Sides], ...]


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Groups of ranks that work at once in a share of the steps: the turns of each.

    sent: bytes of all ranks of a stage, by hop.
    """

    share: float
    turns: tuple[tuple[Turn, ...], ...]
    sent: Counter[str]

    @property
    def flops(self) -> int:
        """The operations of the busiest rank."""
        return max(
            (
                sum(sum(turn.work[member].values()) for turn in turns)
                for turns in self.turns
                for member in range(len(turns[0].work))
            ),
            default=0,
        )


class PlannedOptimizer:
    """AdamW, which adds nothing; other optimizers override what they add.

    model: all layers, with the rank's parts of their matrices. is_sharded: whether data ranks hold
    rows of these.
    """

    turns: tuple[Turns, ...] = ()  # what follows each other in a step
    # In a step, at this place of a pipeline, by (purpose, hop):
    sent_by_node: Mapping[tuple[str, str], float] = MappingProxyType({})

    def __init__(
        self,
        config: Config,
        model: GPT,
        ranks: PlannedRanks,
        stages: Sequence[Part],
        *,
        is_sharded: bool,
    ) -> None:
        self.config, self.model, self.ranks, self.stages = config, model, ranks, stages
        self.is_sharded = is_sharded

    @staticmethod
    def key(config: Config) -> Hashable:
        """Return what of a configuration the plan depends on, beside the model and the ranks."""
        return None

    @cached_property
    def flops(self) -> float | None:
        """The operations of the busiest rank in a step, the mean of the steps, if there are any."""
        return sum(each.share * each.flops for each in self.turns) if self.turns else None

    def state_numbers(self, spec: ShardSpec, *, is_root: bool) -> int:
        """Return how many numbers of state each weight of a parameter has."""
        return 2
