"""A small model with blocks, an odd vocabulary and a tied head, and a loop that trains it."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

VOCAB_SIZE, HIDDEN_SIZE, FFN_SIZE = 37, 12, 19


class Block(nn.Module):
    def __init__(self, ffn_size: int = FFN_SIZE) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN_SIZE)
        self.up = nn.Linear(HIDDEN_SIZE, ffn_size)
        self.down = nn.Linear(ffn_size, HIDDEN_SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SmallModel(nn.Module):
    """Runs its blocks one after another, or in the `order` that it is given."""

    order: tuple[int, ...] | None = None

    def __init__(self, num_blocks: int = 2, ffn_size: int = FFN_SIZE) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.blocks = nn.ModuleList([Block(ffn_size) for _ in range(num_blocks)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in range(len(self.blocks)) if self.order is None else self.order:
            x = self.blocks[index](x)
        return F.linear(x, self.embedding.weight)  # tied head


def small_model(num_blocks: int = 2, ffn_size: int = FFN_SIZE) -> SmallModel:
    torch.manual_seed(5)
    return SmallModel(num_blocks, ffn_size)


def in_parts(mesh: DeviceMesh, ffn_size: int = FFN_SIZE) -> SmallModel:
    """The model with the matrices of its blocks split over the axis "tensor", other weights not."""
    model = small_model(2, ffn_size)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
    return model


def whole(weight: torch.Tensor) -> torch.Tensor:
    """A weight, gathered if it is a shard."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def tokens_of(step: int, samples: int = 8) -> torch.Tensor:
    """(samples, 6) tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB_SIZE, (samples, 6), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
