"""Ranks that are only planned: who shares what with whom on which nodes, without process groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from megatron_zpp.parallel.axes import ContextAxis, TensorAxis
from megatron_zpp.parallel.mesh import mesh_sizes
from megatron_zpp.parallel.peers import AXES, Peers
from megatron_zpp.settings.config import ParallelConfig
from zeropp.sharding.grid import nodes_of_grid
from zeropp.wire.route import Hop, Nodes
from zeropp.wire.traffic import Traffic


class PlannedPeers(Peers):
    """Ranks to which nothing is sent: what a move allocates is allocated, and its bytes counted."""

    def gather(self, part: Tensor, whole: Tensor) -> None:
        """Count what would be gathered."""
        self.count_gather(part.nbytes)

    def exchange(self, parts: Tensor, received: Tensor) -> None:
        """Count what would be exchanged."""
        self.count_exchange(parts.nbytes // self.size)

    def maximize(self, x: Tensor) -> None:
        """Count what would be sent."""
        self.count_reduce(x.nbytes)

    def own_seed(self) -> int:
        """Return this rank's place: no values are computed that could depend on it."""
        return self.place


@dataclass(frozen=True, kw_only=True)
class PlannedRanks:
    """A rank of a run on `nodes`, which are those of all ranks: `rank`, and who shares its work.

    It answers as `megatron_zpp.parallel.mesh.Ranks` does of a run that has started.
    """

    parallel: ParallelConfig
    nodes: Nodes
    rank: int = 0
    activations: Traffic = field(default_factory=partial(Traffic, AXES))

    @property
    def num_ranks(self) -> int:
        return self.nodes.num_ranks

    @property
    def tensor_size(self) -> int:
        return self.parallel.tensor_model_parallel_size

    @property
    def context_size(self) -> int:
        return self.parallel.context_parallel_size

    @property
    def pipeline_size(self) -> int:
        return self.parallel.pipeline_model_parallel_size

    @property
    def num_replicas(self) -> int:
        """How many groups of ranks see different samples."""
        return self.parallel.num_replicas(self.num_ranks)

    @property
    def pipeline_place(self) -> int:
        return self._place[0]

    @cached_property
    def pipeline(self) -> tuple[int, ...]:
        """The ranks that share the layers with this one, by their places."""
        _, data, tensor = self._place
        return tuple(self._grid[:, data, tensor].tolist())

    @cached_property
    def data_nodes(self) -> Nodes:
        """The nodes of each line of ranks along the data axis.

        Raises InputError if the lines are spread over the nodes in different ways.
        """
        lines = self._grid.movedim(1, -1).flatten(0, 1).tolist()
        return nodes_of_grid(range(self.num_ranks), lines, self.nodes.ranks_per_node)

    @cached_property
    def tensor_peers(self) -> Peers:
        """The ranks that share each matrix with this one."""
        pipe, data, _ = self._place
        return self.peers("tensor", self._grid[pipe, data].tolist())

    @cached_property
    def context_peers(self) -> Peers:
        """The ranks that share each sequence with this one."""
        pipe, data, tensor = self._place
        first = data - data % self.context_size
        members = self._grid[pipe, first : first + self.context_size, tensor]
        return self.peers("context", members.tolist())

    def tensor_axis(self) -> TensorAxis | None:
        """Return the axis over which layers are split, if they are; it has no mesh."""
        if self.tensor_size == 1:
            return None
        return TensorAxis(
            peers=self.tensor_peers, sequence_parallel=self.parallel.sequence_parallel
        )

    def context_axis(self) -> ContextAxis | None:
        """Return the axis over which sequences are split, if they are."""
        if self.context_size == 1:
            return None
        gathers_keys = self.parallel.cp_comm_type == "allgather"
        return ContextAxis(peers=self.context_peers, gathers_keys=gathers_keys)

    @property
    def ends_of_pipeline(self) -> Peers:
        """The first and the last rank of the pipeline."""
        return self.peers("pipeline", (self.pipeline[0], self.pipeline[-1]))

    def peers(self, purpose: str, members: Sequence[int]) -> Peers:
        """Return ranks, this one among them, as peers for one of `AXES`."""
        hop = Hop(members=tuple(members), nodes=self.nodes)
        return PlannedPeers(
            purpose=purpose, rank=self.rank, group=None, hop=hop, traffic=self.activations
        )

    @cached_property
    def _grid(self) -> Tensor:
        """The ranks, [P, D, T]: of pipeline, data and tensor axis."""
        sizes = mesh_sizes(self.num_ranks, self.parallel)
        return torch.arange(self.num_ranks).view(tuple(sizes.values()))

    @cached_property
    def _place(self) -> tuple[int, int, int]:
        """This rank's places on the axes of `_grid`."""
        return tuple((self._grid == self.rank).nonzero()[0].tolist())
