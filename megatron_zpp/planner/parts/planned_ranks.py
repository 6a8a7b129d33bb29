"""Ranks that are only planned: who shares what with whom on which nodes, without process groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from megatron_zpp.parallel.mesh import mesh_sizes
from megatron_zpp.parallel.peers import AXES, Peers
from megatron_zpp.parallel.rank_grid import RankGrid
from megatron_zpp.settings.config import ParallelConfig
from zeropp.sharding.grid import nodes_of_grid
from zeropp.wire.route import Hop, Nodes
from zeropp.wire.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class PlannedRanks(RankGrid):
    """A rank of a run on `nodes`, which are those of all ranks."""

    parallel: ParallelConfig
    nodes: Nodes
    rank: int = 0
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

    def peers(self, purpose: str, members: Sequence[int]) -> Peers:
        """Return ranks, this one among them, as peers for one of `AXES`."""
        hop = Hop(members=tuple(members), nodes=self.nodes)
        return Peers(purpose=purpose, rank=self.rank, group=None, hop=hop, traffic=self.activations)
