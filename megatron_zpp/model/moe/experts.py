"""The experts of a layer: MLPs whose matrices are stored one below the other.

Shapes: N rows, H hidden, E experts, e those of a rank, F width inside an expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.mlp import activate
from megatron_zpp.model.part import WHOLE, Part
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim.step_or_skip import local_part

ALIGNMENT = 16  # bytes: grouped products need rows of a multiple


class Experts(nn.Module):
    """MLPs without biases, each of which computes its own rows.

    Matrices are two-dimensional, expert after expert, so that names, shapes and first values do not
    depend on how many ranks share the experts out.
    """

    def __init__(self, config: ModelConfig, part: Part = WHOLE) -> None:
        super().__init__()
        num, hidden, width = config.num_experts, config.hidden_size, config.expert_ffn_size
        self.config = config
        self.gate = Matrices(num, width, hidden, part) if config.is_gated else None
        self.input = Matrices(num, width, hidden, part)
        self.output = Matrices(num, hidden, width, part)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows [N, H], sorted by expert, to [N, H]; counts int64 [e] are those of each expert.

        Without any rows the matrices get gradients of zeros.
        """
        first = self.input if self.gate is None else self.gate
        hidden = activate(products(rows, first.of_experts(len(counts)), counts), self.config)
        if self.gate is not None:
            hidden = hidden * products(rows, self.input.of_experts(len(counts)), counts)
        return products(hidden, self.output.of_experts(len(counts)), counts)


class Matrices(nn.Module):
    """The matrices [out, in] of all experts, in one [E out, in].

    It has no forward pass, so that what shards a model gathers the matrices of all three layers of
    an expert at once, with `Experts`.
    """

    def __init__(self, num: int, rows: int, columns: int, part: Part) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num * rows, columns))
        self.split_dims: dict[str, int] = {}
        if part.experts is not None:
            self.split_dims["weight"], self.weight = 0, part.experts.part(self.weight)

    def of_experts(self, num: int) -> Tensor:
        """Return the matrices [e, out, in] of this rank's `num` experts."""
        return local_part(self.weight).unflatten(0, (num, -1))


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


def _can_group(weights: Tensor) -> bool:
    if not hasattr(F, "grouped_mm") or weights.dtype == torch.float64:
        return False
    return all(size * weights.element_size() % ALIGNMENT == 0 for size in weights.shape[1:])
