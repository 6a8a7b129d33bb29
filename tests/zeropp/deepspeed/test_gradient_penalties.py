"""Gradients of outputs inside a step: penalties, saliency, `torch.func`; random calls of them.

Parameters are frozen and trained again between any two micro-batches, a scalar one among them.

The reference is one plain process that takes the micro-batches of all ranks. It adds fp32 terms in
another order: at most a hundred of them, each rounded to 2^-24 of values of about 1, so 1e-5.
"""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, gathered_parameters

WIDTH, LR, NEAR = 6, 0.1, 1e-5
SGD = {"type": "SGD", "params": {"lr": LR}}


class Critic(nn.Module):
    """Returns scores (N,) and features (N, WIDTH) of `x` (N, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.1))
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x).tanh()
        for block in self.blocks:
            x = x + block(x)
        return self.gain * self.head(x).squeeze(-1), x


def critic() -> Critic:
    torch.manual_seed(3)
    return Critic()


def penalty_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def saliency_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x)[0].sum(), x)[0]


def func_grad_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda each: model(each)[0].sum())(x)


def hessian_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.hessian(lambda each: model(each)[0].sum())(x[:1])


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    scores, features = model(x)
    return scores.square().mean() + features[:, 0].mean()


LOSSES = {
    "loss": lambda model, x: [loss_of(model, x)],
    "penalty": lambda model, x: [penalty_of(model, x)],
    "both": lambda model, x: [loss_of(model, x) + penalty_of(model, x)],
    "one after the other": lambda model, x: [loss_of(model, x), penalty_of(model, x)],
    "penalty first": lambda model, x: [penalty_of(model, x), loss_of(model, x)],
    "same graph": lambda model, x: [model(x)[0].square().mean(), model(x)[1].mean()],
}


@ranks(1)
def test_random_calls_on_one_rank():
    random_calls(stage=0)


@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_random_calls_equal_one_plain_process(stage):
    random_calls(stage)


def random_calls(stage: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in range(3):
        draw = random.Random(10 * stage + seed)
        count = draw.randint(1, 3)
        plain = critic()
        engine = engine_of(
            critic(),
            stage=stage,
            optimizer=SGD,
            gradient_clipping=0.0,
            train_batch_size=2 * count * world,
            gradient_accumulation_steps=count,
        )
        for step in range(3):
            for number in range(count):
                kind, directly = draw.choice([*LOSSES]), draw.random() < 0.5
                where = f"{stage=}, seed {seed}, step {step}, {kind}, {directly=}"
                asks = draw.random() < 0.5
                generator = torch.Generator().manual_seed(100 * step + number)
                xs = torch.randn(world, 2, WIDTH, generator=generator)
                if asks:
                    for of in (saliency_of, func_grad_of, hessian_of):
                        near(of(engine, xs[rank]), of(plain, xs[rank]), f"{where}, {of.__name__}")
                losses = LOSSES[kind](engine, xs[rank])
                others = [loss for x in xs for loss in LOSSES[kind](plain, x)]
                names = draw.sample([name for name, _ in plain.named_parameters()], 2)
                trains = {name: draw.random() < 0.7 for name in names}
                is_late = draw.random() < 0.5  # or before the backward pass
                where += f", {trains}, {is_late=}"
                if not is_late:
                    freeze((engine.module, plain), trains)
                for loss in losses:
                    loss.backward() if directly else engine.backward(loss)
                for loss in others:
                    (loss / (count * world)).backward()
                freeze((engine.module, plain), trains)
                engine.step()
            with torch.no_grad():
                for parameter in plain.parameters():
                    if parameter.grad is not None:
                        parameter -= LR * parameter.grad
            plain.zero_grad()
            for name, weight in gathered_parameters(engine.module).items():
                near(weight, plain.get_parameter(name), f"{where}, {name}")


def freeze(models: tuple[nn.Module, ...], trains: dict[str, bool]) -> None:
    for model in models:
        for name, is_trained in trains.items():
            model.get_parameter(name).requires_grad_(is_trained)


def near(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    difference = (actual - expected).abs().max().item()
    assert difference <= NEAR, f"{where}: {difference}"
