"""Checkpoints of what differs between ranks and is not sharded: statistics, optimizer state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of, run
from tests.zeropp.small_model import SmallModel
from zeropp import Engine, InputError
from zeropp.optim.step_or_skip import local_part


class LocalMomentum(torch.optim.SGD):
    """Momentum in plain tensors of this rank's shards, with a count, a rate and more."""

    def __init__(self, parameters: Any, *, differing: bool = True) -> None:
        super().__init__(parameters, lr=0.1)
        self.differing = differing

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            local, gradient = local_part(parameter), local_part(parameter.grad)
            state = self.state[parameter]
            if not state:
                state |= {"momentum": torch.zeros_like(local), "count": 0, "rate": 1.0 / 3.0}
                state |= {"whole": torch.zeros(parameter.shape), "largest": torch.zeros(1)}
            state["momentum"].mul_(0.5).add_(gradient)
            state["count"] += 1
            state["whole"] += 1
            if self.differing and gradient.numel():
                state["largest"].copy_(gradient.abs().max())
            scale = state["rate"] + state["largest"].item() / state["count"]
            local.sub_(state["momentum"], alpha=0.1 * scale)


class Normed(SmallModel):
    """The small model with statistics of each rank's batches, and an odd small parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(5)
        self.model = nn.ParameterDict({"scale": nn.Parameter(torch.ones(1))})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model["scale"] * self.batch_norm(super().forward(tokens))


def engine_of(optimizer: Callable = LocalMomentum, stage: int = 3) -> Engine:
    torch.manual_seed(5)
    config = config_of(stage=stage) | {"optimizer": {}}
    return zeropp.initialize(model=Normed(), optimizer=optimizer, config=config)[0]


def equal_ones(parameters: Any) -> LocalMomentum:
    return LocalMomentum(parameters, differing=False)


@pytest.mark.parametrize("stage", [0, 3])
@ranks(2)
def test_each_rank_gets_its_own_back(stage, tmp_path):
    engine = engine_of(stage=stage)
    run(engine, 2)
    engine.save_checkpoint(tmp_path)
    again = engine_of(stage=stage)
    again.load_checkpoint(tmp_path)
    means = [None, None]
    dist.all_gather_object(means, again.module.batch_norm.running_mean)
    assert not torch.equal(*means)
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(again.module.get_buffer(name), buffer)
    for mine, loaded in zip(engine.parameters(), again.parameters(), strict=True):
        expected, state = engine.optimizer.state[mine], again.optimizer.state[loaded]
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            assert type(state[key]) is type(value)
            assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value))
    assert run(again, 2, first=2) == run(engine, 2, first=2)


@ranks(2)
def save_on_two(folder: Path) -> None:
    for name, optimizer in (("equal", equal_ones), ("differing", LocalMomentum)):
        engine = engine_of(optimizer)
        run(engine, 2)
        engine.save_checkpoint(folder, tag=name)
        first_mean = engine.module.batch_norm.running_mean
        if dist.get_rank() == 0:
            momenta = [engine.optimizer.state[each]["momentum"] for each in engine.parameters()]
            torch.save((first_mean, momenta), folder / f"{name}.pt")


@ranks(1)
def load_on_one(folder: Path) -> None:
    engine = engine_of(equal_ones)
    engine.load_checkpoint(folder, tag="equal")
    first_mean, momenta = torch.load(folder / "equal.pt")
    assert torch.equal(engine.module.batch_norm.running_mean, first_mean)
    for parameter, part in zip(engine.parameters(), momenta, strict=True):
        state = engine.optimizer.state[parameter]
        assert state["momentum"].shape == parameter.shape and state["count"] == 2
        assert torch.equal(state["momentum"][: len(part)], part)
    run(engine, 1)
    with pytest.raises(InputError, match="of the 2 ranks that saved .* and there are 1 ranks"):
        engine.load_checkpoint(folder, tag="differing")
    engine.load_checkpoint(folder, tag="differing", load_optimizer_states=False)


def test_shards_load_at_another_number_of_ranks_and_what_else_differs_does_not(tmp_path):
    save_on_two(folder=tmp_path)
    load_on_one(folder=tmp_path)


class WithText(LocalMomentum):
    def step(self, closure: None = None) -> None:
        super().step()
        for state in self.state.values():
            state["text"] = "new"


@ranks(2)
def test_state_that_is_neither_tensor_nor_number_is_refused(tmp_path):
    engine = engine_of(WithText)
    run(engine, 1)
    with pytest.raises(InputError, match="WithText's text is a str: of an optimizer's state"):
        engine.save_checkpoint(tmp_path)
