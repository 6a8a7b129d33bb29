"""Which rows of a GPT's matrices Muon orthogonalizes by themselves.

Queries, keys and values are parts of one matrix, and so are the experts of a layer. Rows are
counted from the first that this rank's data axis holds, as other axes may split a matrix too.
"""

from collections.abc import Iterator

from torch import nn
from torch.nn import Parameter

from megatron_zpp.capabilities.experts.experts import Matrices
from megatron_zpp.capabilities.muon.settings import MuonConfig
from megatron_zpp.model.attention.attention import Attention
from megatron_zpp.settings.config import ModelConfig
from zeropp.capabilities.muon import (
    BLOCKWISE,
    Matrix,
    MatrixPart,
    Run,
    matrix_of,
    num_rows,
    rows_within,
)


def matrix_parts(
    model: nn.Module, config: ModelConfig, muon: MuonConfig, *, place: int | None = None
) -> dict[Parameter, Matrix]:
    """Return the matrices of a sharded GPT that have several parts.

    `place` is another place on the tensor axis than that of the model's rank.
    """
    splits_qkv, is_whole = not muon.muon_no_split_qkv, muon.muon_tp_mode != BLOCKWISE
    matrices: dict[Parameter, Matrix] = {}
    for module in model.modules():
        if isinstance(module, Attention) and splits_qkv:
            matrices[module.qkv.weight] = _of_qkv(module, config, place, is_whole=is_whole)
        elif isinstance(module, Matrices):
            matrices[module.weight] = _of_experts(module)
    return matrices


def _of_qkv(module: Attention, config: ModelConfig, place: int | None, *, is_whole: bool) -> Matrix:
    """Queries, keys and values, whose rows are ordered by groups, [K, Q + 2, D].

    is_whole: they are orthogonalized over all ranks of the tensor axis together.
    """
    weight, axis = module.qkv.weight, module.axis
    groups, queries = config.kv_heads, config.num_attention_heads // config.kv_heads
    shape = matrix_of(weight).shape
    num_ranks, own_place = (1, 0) if axis is None else (axis.size, axis.index)
    is_uneven = groups % num_ranks != 0  # a rank has queries, keys, or values of a group
    bounds = (0, queries, queries + 1, queries + 2)  # heads of a group
    parts = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        runs = tuple(_heads(module.head_dim, groups, queries + 2, range(start, stop)))
        of_ranks = tuple(
            rows_within(runs, (rank * shape[0], (rank + 1) * shape[0])) for rank in range(num_ranks)
        )
        part = MatrixPart(
            runs=of_ranks[own_place if place is None else place],
            shape=(num_rows(runs), shape[1]),
            peer_runs=of_ranks if is_whole and is_uneven else (),
        )
        parts.append(part)
    return Matrix(shape=shape, parts=tuple(parts))


def _heads(head_dim: int, groups: int, heads: int, own: range) -> Iterator[Run]:
    """Yield the rows of the heads `own` of each group."""
    for group in range(groups):
        first = group * heads
        yield (first + own.start) * head_dim, (first + own.stop) * head_dim


def _of_experts(module: Matrices) -> Matrix:
    """The matrices of experts, one below the other; no other rank has rows of these."""
    shape, rows = matrix_of(module.weight).shape, module.rows
    starts = range(0, shape[0], rows)
    parts = (MatrixPart(runs=((start, start + rows),), shape=(rows, shape[1])) for start in starts)
    return Matrix(shape=shape, parts=tuple(parts), is_apart=True)
