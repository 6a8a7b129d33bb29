"""Models as in DeepSpeed's tests of its public interface, against a loop in plain PyTorch.

Sums over the ranks are in another order, as in test_engine: 1e-5.
"""

import copy
from collections import namedtuple
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import skip_init

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of, engine_of, gathered_parameters
from zeropp import deepspeed

SAME = 1e-5
DIM = 6
Output = namedtuple("Output", ["hidden", "loss"])
PLAIN = {"type": "SGD", "params": {"lr": 0.1}}


def inputs_of(step: int) -> torch.Tensor:
    return torch.randn(6, DIM, generator=torch.Generator().manual_seed(step))


class Repeated(nn.Module):
    """Runs one layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.id = 3  # a name that a wrapper might take
        self.layer = nn.Linear(DIM, DIM)

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
        self.first, self.second = nn.Linear(DIM, DIM), WithBias(DIM, DIM)

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


def built(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return kind()


def train(model: Callable, steps: int, prepare: Callable, end: Callable, samples: slice) -> list:
    losses = []
    for step in range(steps):
        prepare(step)
        loss = model(inputs_of(step)[samples])
        loss = getattr(loss, "loss", loss)
        end(loss)
        losses.append(loss.item())
    return losses


def compare(kind: Callable, prepare: Callable = lambda model, step: None, **settings) -> None:
    """Four steps of an engine and of plain SGD, with `prepare` called before each step."""
    plain = built(kind)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def plain_step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def engine_step(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    expected = train(plain, 4, lambda step: prepare(plain, step), plain_step, slice(None))
    count, own = dist.get_world_size(), dist.get_rank()
    size = 6 // count
    settings = {"optimizer": PLAIN} | settings
    engine = engine_of(built(kind), gradient_clipping=0.0, train_batch_size=6, **settings)
    mine = slice(own * size, (own + 1) * size)
    losses = torch.tensor(
        train(engine, 4, lambda step: prepare(engine.module, step), engine_step, mine),
        dtype=torch.float64,
    )
    dist.all_reduce(losses)
    assert (losses / count).tolist() == pytest.approx(expected, rel=SAME)
    for name, weight in gathered_parameters(engine.module).items():
        torch.testing.assert_close(weight, plain.get_parameter(name).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [Repeated, Dangling])
@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_a_layer_that_runs_again_and_a_weight_that_is_used_outside(stage, kind):
    compare(kind, stage=stage)


@pytest.mark.parametrize("stage", range(4))
@ranks(3)
def test_fewer_elements_than_ranks(stage):
    compare(Tiny, stage=stage)


@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_other_parameters_are_frozen_in_each_step(stage):
    def freeze(model: nn.Module, step: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 2 == step % 2)

    compare(Dangling, freeze, stage=stage)


@ranks(1)
def test_attributes_of_the_model_stay_its_own():
    assert engine_of(Repeated()).id == 3


@pytest.mark.parametrize("by_json", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
@ranks(1)
def test_a_group_without_parameters(stage, by_json):
    model = Repeated()
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [*model.parameters()]}]
    if by_json:
        given = {"model_parameters": groups}
    else:
        given = {"optimizer": torch.optim.AdamW(groups)}
    engine, *_ = zeropp.initialize(model=model, config=config_of(stage=stage), **given)
    before = gathered_parameters(engine.module)
    engine.backward(engine(inputs_of(0)))
    engine.step()
    after = gathered_parameters(engine.module)
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("stages", [(3, 3), (1, 2), (0, 3)])
@ranks(2)
def test_one_loss_of_two_engines(stages):
    """Whichever engine begins the backward pass, both divide by their micro-batches once."""
    models = [built(Repeated), built(Dangling)]
    plain = copy.deepcopy(models)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in plain]
    engines = [
        engine_of(
            model,
            stage=stage,
            optimizer=PLAIN,
            gradient_clipping=0.0,
            train_batch_size=12,
            micro_batches=2,
        )
        for model, stage in zip(models, stages, strict=True)
    ]
    for step in range(3):
        for number in range(2):
            x = inputs_of(2 * step + number)
            (0.5 * plain[0](x) + 0.25 * plain[1](x).loss).backward()
            x = x.chunk(2)[dist.get_rank()]
            loss = engines[0](x) + 0.5 * engines[1](x).loss
            backward = (torch.Tensor.backward, engines[0].backward, engines[1].backward)[step]
            backward(loss)
            for each in engines:
                each.step()
        for each in optimizers:
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for engine, model in zip(engines, plain, strict=True):
        for name, weight in gathered_parameters(engine.module).items():
            expected = model.get_parameter(name).detach()
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_parent = nn.Parameter(torch.ones(5))
        self.of_parent.data = (self.of_parent.data + 1).data


class Child(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(5))
        self.own.data = (self.own.data + 1).data
        self.of_parent.data = (self.of_parent.data + 1).data


@ranks(2)
def test_weights_that_a_constructor_changes_under_init():
    with deepspeed.zero.Init():
        model = Child()
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        assert model.own.tolist() == [2.0] * 5 and model.of_parent.tolist() == [3.0] * 5


@ranks(2)
def test_layers_without_first_values_under_init():
    with deepspeed.zero.Init():
        model = nn.Sequential(skip_init(nn.Linear, DIM, DIM), nn.Linear(DIM, DIM))
    engine = engine_of(model)
    with deepspeed.zero.GatheredParameters([*model[0].parameters()], modifier_rank=0):
        if dist.get_rank() == 0:
            for parameter in model[0].parameters():
                nn.init.constant_(parameter, 0.1)  # memory may hold any numbers
    engine.backward(engine(inputs_of(0)).mean())
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.parametrize("stage", [0, 3])
@ranks(1)
def test_weights_on_the_host_without_an_optimizer(stage):
    zero = {"stage": stage, "offload_param": {"device": "cpu"}}
    engine = engine_of(built(Repeated), zero_optimization=zero, optimizer={})
    assert torch.equal(engine(inputs_of(0)), built(Repeated)(inputs_of(0)))
