"""A parameter as a matrix whose rows the ranks of a data axis hold together."""

from collections.abc import Iterator
from math import prod

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zeropp.capabilities.muon.blocks import Matrix, MatrixPart, num_rows, rows_within, shard_rows
from zeropp.capabilities.muon.newton_schulz import MatrixSplit
from zeropp.capabilities.muon.settings import BLOCKWISE, DUPLICATED
from zeropp.errors import InputError
from zeropp.fsdp_adapter import local_part
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.grid import find_nodes_of
from zeropp.wire.rank_group import Nodes, RankGroup, everyone

MODEL_AXES = frozenset({"tensor", "tp", "expert", "ep"})  # of meshes, besides those of data


ALONE = everyone(Nodes(num_ranks=1, ranks_per_node=1), 0)  # which holds all rows


def axis_of(parameter: Tensor, config: ZeroConfig) -> RankGroup:
    """Return the ranks that shard a parameter by its rows; raises InputError for other dims."""
    (axis, dim), *_ = [*_axes(parameter, of_model=False), (None, 0)]
    if dim > parameter.ndim - 2:
        raise InputError(
            f"Muon: a matrix of shape {list(parameter.shape)} is sharded in dimension {dim}: "
            "shard rows, as fully_shard does by default, or give it to AdamW (use_muon=False)"
        )
    if axis is None:
        return ALONE
    group = parameter.device_mesh.get_group(axis)
    nodes, ranks = find_nodes_of(group, config), dist.get_process_group_ranks(group)
    return everyone(nodes, group.rank(), ranks)


def split_of(parameter: Tensor, mode: str) -> MatrixSplit | None:
    """Return the ranks of another axis that hold parts of a matrix; None where each is apart.

    mode: Megatron's `blockwise` (None), `duplicated` or `distributed`.
    """
    others = [*_axes(parameter, of_model=True)]
    if mode == BLOCKWISE or not others:
        return None
    ((axis, dim),) = others
    group = parameter.device_mesh.get_group(axis)
    return MatrixSplit(group=group, dim=dim, is_gathered=mode == DUPLICATED)


def matrix_of(parameter: Tensor, *, is_transposed: bool = False) -> Matrix:
    """Return a parameter of two dims, of one part, as the ranks of its data axis hold it.

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
    parts = tuple(MatrixPart(runs=each, shape=scaled_as) for each in runs)
    return Matrix(shape=(padded * rows, sides[1]), parts=parts, is_apart=True)


def require_rows(parameter: Tensor, matrix: Matrix, axis: RankGroup) -> None:
    """Raise InputError if this rank's shard is not the one that plans take it to be."""
    shard = shard_rows(matrix.shape[0], axis.size, axis.index)
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
