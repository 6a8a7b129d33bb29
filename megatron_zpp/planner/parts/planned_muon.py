"""What Muon sends and computes in a step of a planned run, from the optimizer's own plan.

The ranks of a data axis, and those with the same experts, are lines (zeropp/optim/muon/line.py).
Groups of a line orthogonalize rows together: those of a node, of a rank, or all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.part import Part
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.recipe.matrix_parts import matrix_parts
from megatron_zpp.recipe.optimizer import is_muons, muon_options
from megatron_zpp.settings.config import Config
from zeropp.optim.muon.blocks import Matrix, Round
from zeropp.optim.muon.exchange import PURPOSE, Exchange
from zeropp.optim.muon.line import Line, matrix_of
from zeropp.optim.muon.newton_schulz import flops
from zeropp.wire.communicator import Communicator
from zeropp.wire.route import Hop, Nodes
from zeropp.wire.traffic import HOPS, Traffic

ALONE = Nodes(num_ranks=1, ranks_per_node=1)  # of ranks that hold all rows
Matrices = tuple[Matrix, ...]
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
class Groups:
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


class PlannedMuon:
    """Muon's steps for the matrices of a rank's stages.

    model: all layers, with the rank's parts of their matrices. is_sharded: whether data ranks hold
    rows of these; otherwise each orthogonalizes them whole.
    """

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
        self.options, self.is_sharded = muon_options(config), is_sharded

    @cached_property
    def groups(self) -> tuple[Groups, ...]:
        """What follows each other in a step: the groups of all matrices, and those of experts."""
        ranks, splits = self.ranks, self.ranks.expert_ranks > 1
        others: Counter[Matrices] = Counter(
            self._matrices(place, of_experts=False) for place in range(ranks.tensor_size)
        )
        groups = [*self._groups(others, ranks.data_nodes)]
        if splits:
            experts = Counter({self._matrices(0, of_experts=True): ranks.expert_ranks})
            groups += self._groups(experts, ranks.expert_nodes)
        return tuple(groups)

    @cached_property
    def sent_by_node(self) -> dict[tuple[str, str], float]:
        """The bytes that a node of ranks at this place of a pipeline sends in a step."""
        nodes = self.ranks.nodes
        num_nodes = self.ranks.num_ranks / self.ranks.pipeline_size / nodes.ranks_per_node
        return {
            (PURPOSE, hop): sum(each.share * each.sent[hop] for each in self.groups) / num_nodes
            for hop in HOPS
        }

    @property
    def flops(self) -> float:
        """The operations of the busiest rank in a step, the mean of the steps."""
        return sum(each.share * each.flops for each in self.groups)

    def _matrices(self, place: int, *, of_experts: bool) -> Matrices:
        """Return the matrices of a rank at a place on the tensor axis, in the optimizer's order.

        Those `of_experts` are on a line of their own where ranks split them.
        """
        parts = matrix_parts(self.model, self.config.model, self.config.muon, place=place)
        splits = self.ranks.expert_ranks > 1
        return tuple(
            parts.get(parameter) or matrix_of(parameter)
            for name, parameter in self._parameters()
            if of_experts == (splits and ".mlp.experts." in name)
        )

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the matrices of Muon's group, and their names."""
        for stage in self.stages:
            for layer in stage.layers:
                for name, parameter in self.model.blocks[layer].named_parameters():
                    name = f"blocks.{layer}.{name}"
                    if parameter.requires_grad and is_muons(name, parameter):
                        yield name, parameter

    def _groups(self, lines: Counter[Matrices], nodes: Nodes) -> Iterator[Groups]:
        """Yield the groups of lines: how many there are with each list of matrices."""
        nodes = nodes if self.is_sharded else ALONE
        for blocks, share in self.options.shares().items():
            turns, sent = [], Counter()
            for matrices, count in lines.items():
                for line, hop in _hops(nodes, blocks):
                    rounds = line.rounds(matrices, blocks)
                    by_member = [self._sent(hop, member, rounds) for member in hop.members]
                    for each in by_member:
                        sent.update({key: count * num_bytes for key, num_bytes in each.items()})
                    turns.append(tuple(self._turn(hop, blocks) for blocks in rounds))
            yield Groups(share=share, turns=tuple(filter(None, turns)), sent=sent)

    def _turn(self, hop: Hop, blocks: Round) -> Turn:
        sent = [self._sent(hop, member, (blocks,)) for member in hop.members]
        num_nodes = max(1, hop.size // hop.nodes.ranks_per_node)
        steps = self.config.muon.muon_num_ns_steps
        work: tuple[Counter[Sides], ...] = tuple(Counter() for _ in hop.members)
        for block in blocks:
            sides = block.rows, block.columns
            work[block.owner][sides] += flops(*sides, steps)
        return Turn(
            near_bytes=max(each["in_node"] for each in sent) / 2,
            far_bytes=sum(each["across_nodes"] for each in sent) * hop.nodes.parts / num_nodes / 2,
            work=work,
        )

    def _sent(self, hop: Hop, member: int, rounds: Sequence[Round]) -> Counter[str]:
        """Return the bytes that a member of a group sends in these rounds, there and back."""
        if hop.size == 1:
            return Counter()
        ledger = Traffic((PURPOSE,))
        exchange = Exchange(
            dtype=self.options.dtype or torch.bfloat16,
            device=torch.device("meta"),
            communicator=Communicator(hop=hop, position=member, group=None, traffic=ledger),
            quantizes=self.options.quantizes,
        )
        return exchange.expected(rounds)


def _hops(nodes: Nodes, blocks: str) -> Iterator[tuple[Line, Hop]]:
    """Yield the groups of a line, with the line as their first members see it."""
    position, ranks = 0, tuple(range(nodes.num_ranks))
    while position < nodes.num_ranks:
        line = Line(ranks=ranks, position=position, nodes=nodes)
        hop = line.hop(blocks)
        yield line, hop
        position += hop.size
