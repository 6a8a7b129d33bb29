"""Where a rank is among all ranks of a run, and which of them share its work.

    rank = ((p * R + replica) * C + c) * T + t        Megatron's order: tensor ranks fastest

R replicas see different samples. C context ranks that share each sequence are a run of the data
axis, as weights and gradients go over both alike. p is the place in a pipeline.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zeropp.wire import RankGroup


class RankGrid(ABC):
    """This rank on the grid of all ranks of a run, which has started or is planned.

    rank: its number. context_size: consecutive ranks of the data axis that share each sequence.
    """

    rank: int
    context_size: int

    @property
    @abstractmethod
    def grid(self) -> Tensor:
        """All ranks, [P, D, T]: by their places on the pipeline, the data and the tensor axis."""

    @abstractmethod
    def rank_group(self, purpose: str, members: Sequence[int]) -> RankGroup:
        """Return ranks, this one among them, as a group for one of `AXES`."""

    @cached_property
    def places(self) -> tuple[int, int, int]:
        """This rank's indices on the axes of the grid."""
        return tuple((self.grid == self.rank).nonzero()[0].tolist())

    @property
    def num_ranks(self) -> int:
        return self.grid.numel()

    @property
    def tensor_size(self) -> int:
        """How many ranks share each matrix."""
        return self.grid.shape[2]

    @property
    def pipeline_size(self) -> int:
        """How many ranks share the layers."""
        return self.grid.shape[0]

    @property
    def data_parallel_size(self) -> int:
        """How many ranks, or groups of ranks that share their work, see different samples."""
        return self.grid.shape[1] // self.context_size

    @property
    def tensor_rank(self) -> int:
        """The index of this rank on the tensor axis: which part of each matrix it has."""
        return self.places[2]

    @property
    def pipeline_rank(self) -> int:
        """The index of this rank in its pipeline."""
        return self.places[0]

    @property
    def data_parallel_rank(self) -> int:
        """The data-parallel index of this rank, the same on ranks that share their work."""
        return self.places[1] // self.context_size

    @property
    def context_rank(self) -> int:
        """Which part of its sequences this rank has."""
        return self.places[1] % self.context_size

    @cached_property
    def pipeline(self) -> tuple[int, ...]:
        """The ranks that share the layers with this one, by their places."""
        _, data, tensor = self.places
        return tuple(self.grid[:, data, tensor].tolist())

    @property
    def tensor_group(self) -> RankGroup:
        """The ranks that share each matrix with this one."""
        pipe, data, _ = self.places
        return self.rank_group("tensor", self.grid[pipe, data].tolist())

    @property
    def context_group(self) -> RankGroup:
        """The ranks that share each sequence with this one."""
        pipe, _, tensor = self.places
        first = self.data_parallel_rank * self.context_size
        members = self.grid[pipe, first : first + self.context_size, tensor]
        return self.rank_group("context", members.tolist())

    @property
    def ends_of_pipeline(self) -> RankGroup:
        """The first and the last rank of the pipeline; this rank is one of them."""
        return self.rank_group("pipeline", (self.pipeline[0], self.pipeline[-1]))

    def stage_mesh(self, names: tuple[str, str], size: int) -> DeviceMesh | None:
        """Return the mesh of this rank's stage whose last axis has `size` consecutive ranks; None
        where ranks are only planned. All ranks of a run call it."""
        return None
