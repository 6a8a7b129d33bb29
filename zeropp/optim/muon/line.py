"""The ranks that hold the rows of matrices together, and those that orthogonalize some together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zeropp.errors import InputError
from zeropp.optim.muon.blocks import (
    Matrix,
    Part,
    Round,
    num_rows,
    plan_rounds,
    rows_within,
    shard_rows,
)
from zeropp.optim.muon.names import BLOCKWISE, DUPLICATED, NODE, RANK, WHOLE
from zeropp.optim.muon.newton_schulz import Peers
from zeropp.optim.step_or_skip import local_part
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.grid import find_nodes_of
from zeropp.wire.route import Hop, Nodes

MODEL_AXES = frozenset({"tensor", "tp", "expert", "ep"})  # of meshes, besides those of data


@dataclass(frozen=True, kw_only=True)
class Line:
    """The ranks of a data axis, by their global ranks; this one is at `position`."""

    ranks: tuple[int, ...] = (0,)
    position: int = 0
    nodes: Nodes = Nodes(num_ranks=1, ranks_per_node=1)

    def hop(self, blocks: str) -> Hop:
        """Return the ranks whose rows are orthogonalized together, this one among them."""
        size = {NODE: self.nodes.ranks_per_node, RANK: 1, WHOLE: len(self.ranks)}[blocks]
        first = self.position - self.position % size
        return Hop(members=tuple(range(first, first + size)), nodes=self.nodes)

    def rounds(self, matrices: Sequence[Matrix], blocks: str) -> tuple[Round, ...]:
        """Return which blocks of these matrices go to which member of the hop, in turn."""
        return _rounds(tuple(matrices), len(self.ranks), self.hop(blocks).members)


@lru_cache(64)  # without gradients of some matrices the plan is another
def _rounds(
    matrices: tuple[Matrix, ...], num_shards: int, members: tuple[int, ...]
) -> tuple[Round, ...]:
    return plan_rounds(matrices, num_shards, range(members[0], members[-1] + 1))


def line_of(parameter: Tensor, config: ZeroConfig) -> Line:
    """Return the line that shards a parameter by its rows; raises InputError for other dims."""
    (axis, dim), *_ = [*_axes(parameter, of_model=False), (None, 0)]
    if dim > parameter.ndim - 2:
        raise InputError(
            f"Muon: a matrix of shape {list(parameter.shape)} is sharded in dimension {dim}: "
            "shard rows, as fully_shard does by default, or give it to AdamW (use_muon=False)"
        )
    if axis is None:
        return Line()
    group = parameter.device_mesh.get_group(axis)
    ranks = tuple(dist.get_process_group_ranks(group))
    return Line(ranks=ranks, position=group.rank(), nodes=find_nodes_of(group, config))


def peers_of(parameter: Tensor, mode: str) -> Peers | None:
    """Return the ranks of another axis that hold parts of a matrix; None where each is apart.

    mode: Megatron's `blockwise` (None), `duplicated` or `distributed`.
    """
    others = [*_axes(parameter, of_model=True)]
    if mode == BLOCKWISE or not others:
        return None
    ((axis, dim),) = others
    group = parameter.device_mesh.get_group(axis)
    return Peers(group=group, dim=dim, is_gathered=mode == DUPLICATED)


def matrix_of(parameter: Tensor, *, is_transposed: bool = False) -> Matrix:
    """Return a parameter of two dims, of one part, as the ranks of its line hold it.

    Other axes may split it once more; its scale is that of the whole. One of three dims is a stack
    of matrices, scaled as if transposed with `is_transposed`. A rank has whole matrices of it, or
    equally many rows of each.
    """
    shape = [*parameter.shape]
    for axis, dim in _axes(parameter, of_model=True):
        shape[dim] //= parameter.device_mesh.size(axis)
    if parameter.ndim == 2:
        return Matrix.of(tuple(shape), tuple(parameter.shape))
    sizes = (
        (parameter.device_mesh.size(axis), dim) for axis, dim in _axes(parameter, of_model=False)
    )
    num_ranks, dim = next(sizes, (1, 0))
    number, *sides = shape
    pieces = num_ranks if dim == 1 else 1  # of each matrix; rows are in the order of ranks
    rows, padded = sides[0] // pieces, -(-number * pieces // num_ranks) * num_ranks
    scaled_as = tuple(reversed(sides) if is_transposed else sides)
    firsts = (range(i * rows, number * pieces * rows, number * rows) for i in range(number))
    runs = (tuple((first, first + rows) for first in each) for each in firsts)
    parts = tuple(Part(runs=each, shape=scaled_as) for each in runs)
    return Matrix(shape=(padded * rows, sides[1]), parts=parts, is_apart=True)


def require_rows(parameter: Tensor, matrix: Matrix, line: Line) -> None:
    """Raise InputError if this rank's shard is not the one that plans take it to be."""
    shard = shard_rows(matrix.shape[0], len(line.ranks), line.position)
    rows = sum(num_rows(rows_within(part.runs, shard)) for part in matrix.parts)
    shape = local_part(parameter).shape
    expected, local = [rows, matrix.shape[1]], [prod(shape[:-1]), shape[-1]]
    if local != expected and rows:
        raise InputError(
            f"Muon: this rank has {local} of a matrix of shape {list(parameter.shape)}, expected "
            f"{expected}: its rows are to be in chunks of one size, as fully_shard makes them, and "
            f"axes that split it beside those of data to be named {', '.join(sorted(MODEL_AXES))}"
        )


def _axes(parameter: Tensor, *, of_model: bool) -> Iterator[tuple[int, int]]:
    """Yield each axis of the mesh that splits a parameter, and the dimension that it splits.

    Those `of_model` are known by their names; the others shard what is left of a parameter.
    """
    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    for axis, (name, placement) in enumerate(zip(names, parameter.placements, strict=True)):
        is_split = not placement.is_replicate() and mesh.size(axis) > 1
        if is_split and (name in MODEL_AXES) == of_model:
            yield axis, placement.dim
