"""The experts of a layer: MLPs whose matrices are stored one below the other.

Shapes: N rows, H hidden, E experts, e those of a rank, F width inside an expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.capabilities.experts.axis import axis_of
from megatron_zpp.model.delta import TakesDelta
from megatron_zpp.model.mlp import activate, gated
from megatron_zpp.model.part import WHOLE, Part
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim import local_part

ALIGNMENT = 16  # bytes: grouped products need rows of a multiple


class Experts(nn.Module):
    """MLPs, each of which computes its own rows.

    Matrices are two-dimensional and biases one-dimensional, expert after expert, so that names,
    shapes and first values do not depend on how many ranks share the experts out.
    """

    def __init__(self, config: ModelConfig, part: Part = WHOLE) -> None:
        super().__init__()
        self.own_axis = axis_of(part)  # of the ranks that split and shard the parameters
        num, hidden, width = config.num_experts, config.hidden_size, config.expert_ffn_size
        self.config, bias = config, config.has_mlp_bias

        has_gate = config.is_gated
        self.gate = Matrices(num, width, hidden, part, bias=bias) if has_gate else None
        self.input = Matrices(num, width, hidden, part, bias=bias)
        self.output = Matrices(num, hidden, width, part, bias=bias)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows [N, H], sorted by expert, to [N, H]; counts int64 [e] are those of each expert.

        Without any rows matrices and biases get gradients of zeros.
        """
        if self.gate is None:
            hidden = activate(self.input.product(rows, counts), self.config)
        else:
            gate = self.gate.product(rows, counts)
            hidden = gated(gate, self.input.product(rows, counts), self.config)
        return self.output.product(hidden, counts)


class Matrices(TakesDelta):
    """The matrices [out, in] of all experts, in one [E out, in], and their biases, in [E out].

    It has no forward pass, so that what shards a model gathers the matrices of all three layers of
    an expert at once, with `Experts`.
    """

    by_default = False

    def __init__(
        self, num: int, rows: int, columns: int, part: Part, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.part, self.num, self.rows = part, num, rows  # rows of an expert's matrix
        self.weight = nn.Parameter(torch.empty(num * rows, columns))
        self.bias = nn.Parameter(torch.empty(num * rows)) if bias else None
        self.split_dims: dict[str, int] = {}
        if (axis := axis_of(part)) is not None:
            self.split_dims["weight"], self.weight = 0, axis.part(self.weight)
            if bias:
                self.split_dims["bias"], self.bias = 0, axis.part(self.bias)

    def factors(self, rank: int) -> tuple["CalledMatrices", "CalledMatrices"]:
        """Return A [E rank, in] and B [E out, rank] of all experts."""
        columns = self.weight.shape[1]
        return (
            CalledMatrices(self.num, rank, columns, self.part),
            CalledMatrices(self.num, self.rows, rank, self.part),
        )

    def product(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return rows [N, in] times the matrix of their expert, [N, out].

        Its bias and its delta are added.
        """
        y = products(rows, self.of_experts(len(counts)), counts)
        if self.bias is not None:
            biases = local_part(self.bias).unflatten(0, (len(counts), -1))
            y = y + rows_of_biases(biases, counts, y)
        return y if self.delta is None else y + self.delta.term(self, rows, counts)

    def of_experts(self, num: int) -> Tensor:
        """Return the matrices [e, out, in] of this rank's `num` experts."""
        return local_part(self.weight).unflatten(0, (num, -1))


class CalledMatrices(Matrices):
    """A factor of the matrices of all experts.

    It is called, so that what shards a model gathers trained factors apart from frozen matrices.
    """

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows [N, in], by expert, to [N, out]."""
        return self.product(rows, counts)


def products(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return rows [N, in] times the matrix of their expert, [N, out].

    weights [e, out, in], counts int64 [e] of rows. One grouped product where PyTorch has it for
    these sizes and this dtype, else one product for each expert; they agree bit for bit on a CPU.
    """
    if _can_group(weights):
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    parts = rows.split(counts.tolist())
    return torch.cat(
        [F.linear(part, weight) for part, weight in zip(parts, weights.unbind(0), strict=True)]
    )


def rows_of_biases(biases: Tensor, counts: Tensor, y: Tensor) -> Tensor:
    """Return the bias [e, out] of each row's expert, as the rows [N, out] of `y` are.

    It is a product with rows that are 1 in one column, whose backward pass sums the gradients of an
    expert's rows in the same order in each run, and on a GPU without atomics.
    """
    columns = ALIGNMENT // y.element_size()
    ones = F.pad(y.new_ones(len(y), 1), (0, columns - 1))
    return products(ones, F.pad(biases[..., None], (0, columns - 1)), counts)


def _can_group(weights: Tensor) -> bool:
    if not hasattr(F, "grouped_mm") or weights.dtype == torch.float64:
        return False
    return all(size * weights.element_size() % ALIGNMENT == 0 for size in weights.shape[1:])
