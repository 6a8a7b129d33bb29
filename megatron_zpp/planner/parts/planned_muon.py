"""What Muon sends and computes in a step of a planned run, from the optimizer's own plan.

The ranks of a data axis, or of one that modules have of their own, hold the rows of matrices
together.
Groups of them orthogonalize rows together: those of a node, of a rank, or all. While one round is
computed, what belongs to the next arrives and results of the one before go back.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import torch
from torch import nn

from megatron_zpp.capabilities.muon.capability import muon_options, uses_muon
from megatron_zpp.capabilities.muon.matrix_parts import matrix_parts
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.part import Part
from megatron_zpp.planner.parts.meta_model import META, own_axes
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.planner.timing.computing import mean_width
from megatron_zpp.planner.timing.hardware import Rates
from megatron_zpp.planner.timing.links import Load, exchange
from zeropp.capabilities.muon import (
    Exchange,
    Matrix,
    MatrixBlock,
    MuonOptions,
    flops,
    group_of,
    matrix_of,
    rounds_of,
)
from zeropp.fsdp_adapter import ShardSpec
from zeropp.optim import OPTIMIZER
from zeropp.wire import HOPS, Nodes, RankGroup, everyone, sum_of

ALONE = Nodes(num_ranks=1, ranks_per_node=1)  # of ranks that hold all rows
Matrices = tuple[Matrix, ...]
Blocks = Sequence[MatrixBlock]  # of a round
Sides = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class OptimizerRound:
    """What a group sends, and what its members compute.

    load: in either direction. work: for each member, the operations by the sides of the products.
    sent: bytes of all members in both directions, by hop.
    """

    load: Load
    work: tuple[Counter[Sides], ...]
    sent: Counter[str] = field(default_factory=Counter)

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
    """The rounds of groups of ranks that work at once, in a share of the steps.

    groups: how many are alike, and their rounds.
    """

    share: float
    groups: tuple[tuple[int, tuple[OptimizerRound, ...]], ...]

    @property
    def flops(self) -> int:
        """The operations of the busiest rank."""
        members = (zip(*(each.work for each in rounds), strict=True) for _, rounds in self.groups)
        return max((sum(map(Counter.total, each)) for each in chain(*members)), default=0)

    def sent(self, hop: str) -> int:
        """Return the bytes of all ranks of a stage."""
        return sum(count * each.sent[hop] for count, rounds in self.groups for each in rounds)

    def seconds(self, rates: Rates) -> float:
        """Return the mean seconds of a step, in which the slowest group is waited for."""
        slowest = max((seconds_of_rounds(each, rates) for _, each in self.groups), default=0.0)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedMuon:
    """Muon's steps for the matrices of a rank's stages.

    model: all layers, with the rank's parts of their matrices. is_sharded: whether data ranks hold
    rows of these; where they do not, each orthogonalizes them whole.
    """

    model: GPT
    ranks: PlannedRanks
    stages: Sequence[Part]
    is_sharded: bool

    @cached_property
    def options(self) -> MuonOptions:
        """Where matrices are orthogonalized, and in which numbers."""
        return muon_options(self.ranks.config.muon, self.ranks.config.zero)

    def has_momentum(self, spec: ShardSpec, *, is_root: bool) -> bool:
        """Whether a parameter has one number of state for each weight, and not Adam's two."""
        return spec.ndim == 2 and not is_root and self.ranks.config.trains_all

    @cached_property
    def rounds(self) -> tuple[OptimizerRounds, ...]:
        """What follows each other in a step: the groups on the data axis, then those on others."""
        ranks = self.ranks
        others: Counter[Matrices] = Counter(
            self._matrices(place, inner=False) for place in range(ranks.tensor_size)
        )
        rounds = [*self._rounds(others, ranks.data_nodes)]
        if self._inner:
            inner = Counter({self._matrices(0, inner=True): ranks.inner_size})
            rounds += self._rounds(inner, ranks.nodes_of(ranks.inner_size))
        return tuple(rounds)

    @cached_property
    def flops(self) -> float:
        """The operations of the busiest rank in a step, the mean of the steps."""
        return sum(each.share * each.flops for each in self.rounds)

    @cached_property
    def sent_by_node(self) -> dict[tuple[str, str], float]:
        """The bytes that a node of ranks at this place of a pipeline sends in a step."""
        nodes = self.ranks.nodes
        num_nodes = self.ranks.num_ranks / self.ranks.pipeline_size / nodes.ranks_per_node
        return {
            (OPTIMIZER, hop): sum(each.share * each.sent(hop) for each in self.rounds) / num_nodes
            for hop in HOPS
        }

    def seconds(self, rates: Rates) -> float:
        """Return the mean seconds of a step beside the update by Adam."""
        return sum((each.seconds(rates) for each in self.rounds), 0.0)

    @cached_property
    def _inner(self) -> frozenset[nn.Parameter]:
        """The parameters of modules that have an axis of their own."""
        return frozenset(each for module in own_axes(self.model) for each in module.parameters())

    def _matrices(self, place: int, *, inner: bool) -> Matrices:
        """Return the matrices of a rank at a place on the tensor axis, in the optimizer's order."""
        config = self.ranks.config
        parts = matrix_parts(self.model, config.model, config.muon, place=place)
        return tuple(
            parts.get(parameter) or matrix_of(parameter)
            for parameter in self._parameters()
            if inner == (parameter in self._inner)
        )

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Yield the matrices of Muon's group."""
        for stage in self.stages:
            for layer in stage.layers:
                for name, parameter in self.model.blocks[layer].named_parameters():
                    name = f"blocks.{layer}.{name}"
                    if parameter.requires_grad and uses_muon(name, parameter):
                        yield parameter

    def _rounds(self, axes: Counter[Matrices], nodes: Nodes) -> Iterator[OptimizerRounds]:
        """Yield the rounds of axes on these nodes: how many there are with each matrices."""
        nodes = nodes if self.is_sharded else ALONE
        for blocks, share in self.options.shares().items():
            groups = [
                (count, tuple(self._round(group_of(axis, blocks), each) for each in rounds))
                for matrices, count in axes.items()
                for axis in _seen_by_firsts(nodes, blocks)
                if (rounds := rounds_of(axis, matrices, blocks))
            ]
            yield OptimizerRounds(share=share, groups=tuple(groups))

    def _round(self, group: RankGroup, blocks: Blocks) -> OptimizerRound:
        """Return what the member sends that sends most in its node, and all of a node to others."""
        sent = [self._sent(group, member, blocks) for member in group.members]
        num_nodes = max(1, group.size // group.nodes.ranks_per_node)
        total = sum(sent, Counter())
        work: tuple[Counter[Sides], ...] = tuple(Counter() for _ in group.members)
        for block in blocks:
            sides = block.rows, block.columns
            work[block.owner][sides] += flops(*sides, self.ranks.config.muon.muon_num_ns_steps)
        near = max(each["in_node"] for each in sent) / 2
        far = total["across_nodes"] * group.nodes.parts / num_nodes / 2
        return OptimizerRound(load=exchange(near, far), work=work, sent=total)

    def _sent(self, group: RankGroup, member: int, blocks: Blocks) -> Counter[str]:
        """Return the bytes that a member of a group sends in a round, there and back."""
        options = self.options
        exchange = Exchange(
            group=replace(group, position=member, purpose=OPTIMIZER),
            dtype=options.dtype or torch.bfloat16,
            device=META,
            quantizes=options.quantizes,
        )
        sent = sum_of(exchange.messages([blocks]))
        return Counter({hop: sent[OPTIMIZER, hop] for hop in HOPS})


def _seen_by_firsts(nodes: Nodes, blocks: str) -> Iterator[RankGroup]:
    """Yield the data axis as the first member of each of its groups sees it."""
    position = 0
    while position < nodes.num_ranks:
        axis = everyone(nodes, position)
        yield axis
        position += group_of(axis, blocks).size
