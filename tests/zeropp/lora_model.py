"""The small model with LoRA beside its linear layers, and loops that train it."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zeropp
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp.wire.quantized_shard import QuantizedShard

RANK, LR = 2, 1e-2


class LoraLinear(nn.Module):
    """A frozen linear layer and a product of two thin trained ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def add_adapters(model: SmallModel) -> SmallModel:
    """Freeze everything, and put seeded adapters beside all linear layers."""
    model.requires_grad_(False)
    torch.manual_seed(9)
    for block in model.blocks:
        block.up, block.down = LoraLinear(block.up), LoraLinear(block.down)
    return model


def lora_model() -> SmallModel:
    return add_adapters(small_model())


def with_quantized_weights(model: nn.Module, num_ranks: int, bits: int = 8) -> nn.Module:
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


def expected_losses(
    model: nn.Module,
    steps: int,
    micro_batches: int,
    ranks: int,
    loss_of: Callable = loss_of,
    tokens_of: Callable = tokens_of,
) -> list[float]:
    """Mean losses of plain training with AdamW on whole batches."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=LR), []
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


def engine_losses(
    engine: zeropp.Engine, steps: int, loss_of: Callable = loss_of, tokens_of: Callable = tokens_of
) -> list[float]:
    """The mean over ranks of each step's losses."""
    micro_batches, losses = engine.gradient_accumulation_steps(), []
    for step in range(steps):
        mine = tokens_of(step).chunk(dist.get_world_size())[dist.get_rank()]
        total = torch.zeros(())
        for tokens in mine.chunk(micro_batches):
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / micro_batches
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter
