"""Ranks that are only planned: who shares what with whom on which nodes, without process groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from megatron_zpp.capabilities.experts.axis import NAME, ExpertAxis, expert_axis
from megatron_zpp.parallel.mesh import mesh_sizes
from megatron_zpp.parallel.rank_grid import RankGrid
from megatron_zpp.settings.config import ParallelConfig
from zeropp.sharding import nodes_of_grid
from zeropp.wire import AXES, Nodes, RankGroup, Traffic


@dataclass(frozen=True, kw_only=True)
class PlannedRanks(RankGrid):
    """A rank of a run on `nodes`, which are those of all ranks.

    expert_ranks: consecutive ranks that split the experts of each layer.
    """

    parallel: ParallelConfig
    nodes: Nodes
    rank: int = 0
    expert_ranks: int = 1
    activations: Traffic = field(default_factory=partial(Traffic, AXES))

    @property
    def context_size(self) -> int:
        return self.parallel.context_parallel_size

    @cached_property
    def grid(self) -> Tensor:
        """All ranks, [P, D, T]."""
        sizes = mesh_sizes(self.nodes.num_ranks, self.parallel)
        return torch.arange(self.nodes.num_ranks, device="cpu").view(tuple(sizes.values()))

    @cached_property
    def data_nodes(self) -> Nodes:
        """The nodes of each line of ranks along the data axis.

        Raises InputError if the lines are spread over the nodes in different ways.
        """
        lines = self.grid.movedim(1, -1).flatten(0, 1).tolist()
        return nodes_of_grid(range(self.num_ranks), lines, self.nodes.ranks_per_node)

    @cached_property
    def expert_nodes(self) -> Nodes:
        """The nodes of each line of ranks that have the same experts.

        Raises InputError if the lines are spread over the nodes in different ways.
        """
        if self.expert_ranks == 1:  # experts are cut as other weights are
            return self.data_nodes
        lines = self.grid.reshape(self.pipeline_size, -1, self.expert_ranks).movedim(1, -1)
        lines = lines.flatten(0, 1).tolist()
        return nodes_of_grid(range(self.num_ranks), lines, self.nodes.ranks_per_node)

    @cached_property
    def split_experts(self) -> ExpertAxis | None:
        """The axis over which experts are split, if they are."""
        return expert_axis(self, self.expert_ranks, self.parallel.moe_dispatch_bits)

    @property
    def axes(self) -> dict[str, ExpertAxis | None]:
        """The axes of capabilities, as a `Part` has them."""
        return {NAME: self.split_experts}

    def rank_group(self, purpose: str, members: Sequence[int]) -> RankGroup:
        """Return ranks, this one among them, as a group for one of `AXES`."""
        return RankGroup(
            members=tuple(members),
            position=self.rank,
            nodes=self.nodes,
            purpose=purpose,
            ledger=self.activations,
        )
