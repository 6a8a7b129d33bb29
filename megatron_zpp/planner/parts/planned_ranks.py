"""Ranks that are only planned: who shares what with whom on which nodes, without process groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.parallel.mesh import RankGrid, mesh_sizes
from megatron_zpp.recipe.capability import capabilities_of
from megatron_zpp.settings.config import Config, ParallelConfig
from zeropp.sharding import nodes_of_grid
from zeropp.wire import AXES, Nodes, RankGroup, Traffic


@dataclass(frozen=True, kw_only=True)
class PlannedRanks(RankGrid):
    """A rank of a run of `config` on `nodes`, which are those of all ranks."""

    config: Config
    nodes: Nodes
    rank: int = 0
    activations: Traffic = field(default_factory=partial(Traffic, AXES))

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def context_size(self) -> int:
        return self.parallel.context_parallel_size

    def at(self, place: int) -> "PlannedRanks":
        """Return the first rank at a place of the pipeline."""
        return replace(self, rank=place * (self.num_ranks // self.pipeline_size))

    @cached_property
    def grid(self) -> Tensor:
        """All ranks, [P, D, T]."""
        sizes = mesh_sizes(self.nodes.num_ranks, self.parallel)
        return torch.arange(self.nodes.num_ranks, device="cpu").view(tuple(sizes.values()))

    @cached_property
    def data_nodes(self) -> Nodes:
        """The nodes of each line of ranks along the data axis; raises as `nodes_of` does."""
        return self.nodes_of(self.tensor_size)

    def nodes_of(self, size: int) -> Nodes:
        """Return the nodes of each line of ranks with the same part of what `size` ranks split.

        Raises InputError if the lines are spread over the nodes in different ways.
        """
        lines = self.grid.reshape(self.pipeline_size, -1, size).movedim(1, -1)
        lines = lines.flatten(0, 1).tolist()
        return nodes_of_grid(range(self.num_ranks), lines, self.nodes.ranks_per_node)

    @cached_property
    def axes(self) -> dict[str, Any]:
        """The axes of capabilities, as a `Part` has them."""
        kinds = capabilities_of(self.config, self)
        return {each.splits: each.axis() for each in kinds if each.splits}

    @cached_property
    def inner_size(self) -> int:
        """How many ranks split modules that have an axis of their own; 1 if none do."""
        return max((axis.size for axis in self.axes.values() if axis is not None), default=1)

    def rank_group(self, purpose: str, members: Sequence[int]) -> RankGroup:
        """Return ranks, this one among them, as a group for one of `AXES`."""
        return RankGroup(
            members=tuple(members),
            position=self.rank,
            nodes=self.nodes,
            purpose=purpose,
            ledger=self.activations,
        )
