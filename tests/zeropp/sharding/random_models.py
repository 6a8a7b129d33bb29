"""Random small models, and batches that use different parts of them on different ranks."""

import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 6


class Residual(nn.Module):
    """A block whose two layers may share one weight."""

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if shares:
            self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Experts(nn.Module):
    """A block of which a pass uses one expert, and sometimes none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(3))
        self.back = nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        x = x * self.scale.mean()
        if choice == 3:
            return x
        return x + self.back(self.experts[choice](x).relu())


class Normalized(nn.Module):
    """A block with buffers, of which training changes one, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)  # weights in bf16 would need its buffers so
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("offset", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return (self.gain * self.norm(x) + self.frozen(x) + self.offset).to(x.dtype)


class Nested(nn.Module):
    """A block with a list of its own, which skips a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(shares=False) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(()).reshape(1))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.layers[0](x, choice) * self.gain


class Hooked(Residual):
    """A block whose gradients a hook changes on their way."""

    def __init__(self) -> None:
        super().__init__(shares=False)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        x = super().forward(x, choice)
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return x


KINDS = (
    lambda: Residual(shares=False),
    lambda: Residual(shares=True),
    Experts,
    Normalized,
    Nested,
    Hooked,
)


class RandomModel(nn.Module):
    """Blocks in a random order with repetitions; some are never used; the head may be tied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.optional = nn.Linear(WIDTH, WIDTH)  # used by some ranks only
        self.blocks = nn.ModuleList(draw.choice(KINDS)() for _ in range(draw.randint(1, 4)))
        self.head = nn.Linear(WIDTH, WIDTH)
        if draw.random() < 0.4:
            self.head.weight = self.stem.weight
        self.order = [
            draw.randrange(len(self.blocks)) for _ in range(draw.randint(1, len(self.blocks) + 2))
        ]

    def chosen_units(self) -> list[nn.Module]:
        """Other units than the default ones, some inside others; only if the head is not tied."""
        units: list[nn.Module] = [self.stem]
        for block in self.blocks:
            units += [block.layers[0], block] if isinstance(block, Nested) else [block]
        return [*units, self.head]

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        x = self.stem(x)
        if choice % 2:
            x = x + self.optional(x)
        for index in self.order:
            x = self.blocks[index](x, choice)
        return self.head(x).float()


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank: `inputs` and `targets` (5, WIDTH)."""

    inputs: torch.Tensor
    targets: torch.Tensor
    choice: int

    @classmethod
    def of(cls, seed: int, rank: int) -> "Batch":
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        values = torch.randn(2, 5, WIDTH, generator=generator)
        choice = int(torch.randint(0, 4, (), generator=generator))
        return cls(values[0], values[1], choice)

    def loss(self, model: nn.Module) -> torch.Tensor:
        return F.smooth_l1_loss(model(self.inputs, self.choice), self.targets)
