"""Models with what programs do in them, and their data, for engines and one plain process."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from tests.zeropp import small_model as small
from tests.zeropp.deepspeed.expert_parallel import mixtures

WIDTH = 6
Output = namedtuple("Output", ["hidden", "loss"])


class Repeated(nn.Module):
    """Runs one layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.id = 3  # a name that a wrapper might take
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.layer(x)
        return x.square().mean()


class WithBias(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), self.bias


class Dangling(nn.Module):
    """Uses the bias of a layer after that layer has run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), WithBias(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Output:
        hidden, bias = self.second(self.first(x))
        return Output(hidden, (hidden + bias).square().mean())


class Tiny(nn.Module):
    """Two parameters of one element each: fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, :1]).square().mean()


class Line(nn.Module):
    """Two scalars and nothing else, as accelerate's regression model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.a + self.b).float().square().mean()


class Named(nn.Module):
    """The small model with a second name for a weight, a 0-d, an empty parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.gain = small.small_model(), nn.Parameter(torch.ones(()))
        self.rows = nn.Parameter(torch.zeros(0, 4))
        self.head = nn.Module()
        self.head.weight = self.model.embedding.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens) * self.gain + self.rows.sum()


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return kind()


def rows_of(step: int, samples: int) -> torch.Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(step))


def own_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return getattr(output, "loss", output)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build a model, its data `inputs(step, samples)`, and its loss of a part of them."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], torch.Tensor] = rows_of
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = own_loss
    has_experts: bool = False


FAMILIES = {
    "small": Family(build=small.small_model, inputs=small.tokens_of, loss=small.loss_of),
    "named": Family(build=Named, inputs=small.tokens_of, loss=small.loss_of),
    **{
        kind.__name__: Family(build=partial(seeded, kind))
        for kind in (Repeated, Dangling, Tiny, Line)
    },
    **{
        name: Family(
            build=partial(mixtures.mixture, name),
            inputs=lambda step, samples: mixtures.tokens_of(step)[:samples],
            loss=mixtures.loss_of,
            has_experts=True,
        )
        for name in ("mixtral", "qwen3_moe")
    },
}
