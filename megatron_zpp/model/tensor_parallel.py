"""Layers that are split over a tensor axis: each rank computes with its part of their parameters.

| parameters                                 | split by        | whole on every rank  |
|--------------------------------------------|-----------------|----------------------|
| embedding, head                            | vocabulary      | positions, norms     |
| queries, keys and values, with their bias  | heads           |                      |
| norms of all heads of queries and of keys  | heads           |                      |
| input and gate of the MLP, with their bias | output channels |                      |
| output of attention and of MLP             | input channels  | its bias             |
| B of a delta of these but the outputs      | output channels | A of this delta      |
| A of a delta of an output                  | input channels  | B of this delta      |
| latent down-projections                    |                 | all, with its delta  |

Of K heads of keys and values, each with Q / K heads of queries, rank r of a tensor axis of T ranks
holds those from r K / T to (r + 1) K / T - 1, in order; `megatron_zpp/parallel/mesh.py` says
which rank of the job that is. With T = n K ranks, n of them share a head of keys and values: each
computes a part of its channels and of those of its queries, all are gathered, and each attends with
1 / n of the queries. No weight is on two ranks. Without an axis layers compute the plain thing.
What capabilities put in the place of an MLP says itself what of it is split. Activations are plain
tensors. `split_dims` of a layer are the dimensions in which its parameters are split, by their
names; `grad_is_partial` of a module names what in it is whole while each rank has a term of its
gradient.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.delta import TakesDelta
from megatron_zpp.parallel.axes import leave, part_of
from megatron_zpp.parallel.collectives import moved, sum_whole
from zeropp.optim import gradient_parts, local_part
from zeropp.wire import RankGroup


class LocalLinear(nn.Linear):
    """A linear layer that computes with this rank's part of its weight [out, in].

    That is split in dimension `dim`; with dim 0 the bias is split too, with dim 1 it is whole.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        axis: RankGroup | None,
        dim: int,
        grad_is_partial: tuple[str, ...] = (),
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.axis, self.grad_is_partial = axis, grad_is_partial
        self.split_dims: dict[str, int] = {}
        if axis is not None:
            self.split_dims["weight"] = dim
            self.weight = part_of(self.weight, dim, axis.size, axis.mesh)
        if axis is not None and bias and dim == 0:
            self.split_dims["bias"] = dim
            self.bias = part_of(self.bias, dim, axis.size, axis.mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to this rank's channels of the result, or to its term of the sum."""
        return F.linear(x, local_part(self.weight), local_part(self.bias))


class ParallelLinear(TakesDelta, LocalLinear):
    """A linear layer whose weight is split in dimension `dim`, as is one of its factors.

    The other factor is whole on every rank.
    """

    dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        axis: RankGroup | None = None,
        splits_rows: bool = False,
    ) -> None:
        partial = ("bias",) if splits_rows and self.dim == 1 else ()
        super().__init__(in_features, out_features, bias, axis, self.dim, partial)

    def factors(self, rank: int) -> tuple[LocalLinear, LocalLinear]:
        """Return A [rank, in] and B [out, rank], of which that with the split channels is split."""

        def factor(inputs: int, outputs: int, dim: int) -> LocalLinear:
            axis = self.axis if self.dim == dim else None
            partial = ("weight",) if axis is None and self.axis is not None else ()
            return LocalLinear(inputs, outputs, False, axis, dim, partial)

        return factor(self.in_features, rank, 1), factor(rank, self.out_features, 0)


class ColumnParallelLinear(ParallelLinear):
    """A linear layer whose output channels are split.

    The columns are those of Megatron's weight, which is the transpose of PyTorch's.
    """

    dim = 0

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to this rank's channels [..., out/T]."""
        y = super().forward(x)
        return y if self.delta is None else y + self.delta.term(self, x)


class WholeLinear(ColumnParallelLinear):
    """A linear layer that each rank has whole, and computes for the rows that it has."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)


class RowParallelLinear(ParallelLinear):
    """A linear layer whose input channels are split.

    Its bias is whole, and added to the sum of what the ranks compute.
    """

    dim = 1

    def forward(self, x: Tensor, splits_rows: bool = False) -> Tensor:
        """Map x [B, S, in/T] to [B, S, out], or to this rank's rows of it."""
        if self.axis is None:
            y = super().forward(x)
            return y if self.delta is None else y + self.delta.term(self, x)
        y = F.linear(x, local_part(self.weight))
        if self.delta is not None:
            dropout = self.delta.dropout if self.training else 0.0
            with own_random_numbers(self.axis, splits_rows, dropout, x.device):
                y = y + self.delta.term(self, x)
        y = leave(y, self.axis, splits_rows)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose vocabulary is split: tokens of other ranks are zeros before the sum."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, axis: RankGroup | None = None
    ) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.axis = axis
        self.split_dims: dict[str, int] = {}
        if axis is not None:
            self.split_dims["weight"] = 0
            self.weight = part_of(self.weight, 0, axis.size, axis.mesh)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids int64 [B, S] to [B, S, H]."""
        if self.axis is None:
            return super().forward(tokens)
        weight = local_part(self.weight)
        index = tokens - self.axis.index * len(weight)
        is_other = (index < 0) | (index >= len(weight))
        x = F.embedding(index.masked_fill(is_other, 0), weight)
        return leave(x.masked_fill(is_other[..., None], 0), self.axis)


class ParallelRMSNorm(nn.RMSNorm):
    """A normalization over channels that are split: the squares of all ranks are summed."""

    def __init__(self, size: int, eps: float, axis: RankGroup) -> None:
        super().__init__(size, eps)
        self.axis = axis
        self.split_dims, self.weight = {"weight": 0}, part_of(self.weight, 0, axis.size, axis.mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's channels x [..., size/T]."""
        values = x.float()
        squares = values.square().sum(-1, keepdim=True)
        total = moved(squares, self.axis, sum_whole, sum_whole)
        normalized = values * torch.rsqrt(total / (x.shape[-1] * self.axis.size) + self.eps)
        return (normalized * local_part(self.weight).float()).to(x.dtype)


def own_random_numbers(
    axis: RankGroup | None, splits_rows: bool, dropout: float, device: torch.device
) -> AbstractContextManager[None]:
    """Return a context for dropout of channels or heads that are split over the axis, if any.

    Where rows are split too, ranks have random numbers of their own throughout.
    """
    if axis is None or splits_rows or dropout == 0:
        return nullcontext()
    return _own_random_numbers(axis, device)


@contextmanager
def _own_random_numbers(axis: RankGroup, device: torch.device) -> Iterator[None]:
    """Use this rank's own random numbers inside, and afterwards again the same on all ranks."""
    seed = axis.own_seed()
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def sum_partial_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: RankGroup, device: torch.device
) -> None:
    """Sum in place the gradients of whole parameters, as each rank has a term of each."""
    parts = gradient_parts(optimizer, partial_parameters(model))
    if not parts:
        return
    total = sum_whole(torch.cat([part.flatten() for part in parts]).to(device), group)
    for part, sums in zip(parts, total.split([part.numel() for part in parts]), strict=True):
        part.copy_(sums.view(part.shape))


def partial_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the trained whole parameters whose gradient is a sum over ranks, each with its term.

    Those are what computes with its own rows, heads or channels, and the factor of a weight whose
    other is split. The module that makes them names them, or the modules that have them, as
    `grad_is_partial`.
    """
    partial: set[nn.Parameter] = set()
    for module in model.modules():
        for name in getattr(module, "grad_is_partial", ()):
            made = getattr(module, name)
            if made is not None:
                partial.update((made,) if isinstance(made, nn.Parameter) else made.parameters())
    return (each for each in model.parameters() if each in partial and each.requires_grad)
