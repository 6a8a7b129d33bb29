"""The small stack with LoRA beside its linear layers, and what training it should give."""

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.zeropp.stack import Stack, fresh_stack, loss_of, tokens_of
from zeropp.frozen import QuantizedShard

RANK = 2


class Adapted(nn.Module):
    """A frozen linear layer and a product of two thin trained ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(model: Stack) -> Stack:
    """Freeze everything, and put seeded adapters beside all linear layers."""
    model.requires_grad_(False)
    torch.manual_seed(9)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def adapted_stack() -> Stack:
    return adapt(fresh_stack())


def rounded(model: nn.Module, num_ranks: int, bits: int = 8) -> nn.Module:
    """The model with its frozen matrices as `num_ranks` ranks would store them, as numbers."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.ndim >= 2:
            rows = -(-len(parameter) // num_ranks)
            elements = rows * parameter[0].numel()
            for first in range(0, len(parameter), rows):
                part = parameter.data[first : first + rows]
                part.copy_(QuantizedShard.of(part.contiguous(), elements, bits).numbers())
    return model


def expected_losses(model: Stack, steps: int, micro_batches: int, ranks: int) -> list[float]:
    """Mean losses of plain training with AdamW on whole batches."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for step in range(steps):
        parts = tokens_of(step).chunk(ranks * micro_batches)
        total = 0.0
        for tokens in parts:
            loss = loss_of(model, tokens) / len(parts)
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter
