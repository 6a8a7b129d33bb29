"""Optimizers and schedules that the JSON names, and those that are given beside them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import (
    adamw,
    config_of,
    engine_of,
    gathered_parameters,
    logged,
    run,
    run_without_engine,
)
from tests.zeropp.small_model import small_model
from zeropp import InputError
from zeropp.deepspeed.ops.adam import FusedAdam
from zeropp.deepspeed.runtime.lr_schedules import OneCycle, WarmupLR
from zeropp.optim.adam_op import kernel_for

SAME = 1e-5  # as in test_engine
NAMED = {
    "SGD": dict(lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": dict(lr=0.05, eps=1e-8, initial_accumulator_value=0.1),
}


class Scaled(nn.Module):
    """The small model with a 0-d parameter, which is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.scale = small_model(), nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens) * self.scale


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("stage", [0, 1, 3])
@ranks(2)
def test_an_optimizer_of_torch_by_its_name(stage, kind):
    params = NAMED[kind]
    losses, _, _ = run_without_engine(
        optimizer_of=lambda model: getattr(torch.optim, kind)(model.parameters(), **params),
        model=Scaled(),
    )
    optimizer = {"type": kind.lower(), "params": params}
    engine = engine_of(Scaled(), stage=stage, optimizer=optimizer)
    assert type(engine.optimizer) is getattr(torch.optim, kind)
    assert run(engine) == pytest.approx(losses, rel=SAME)
    assert engine.optimizer_name() == kind.lower()


@pytest.mark.skipif(kernel_for(torch.device("cpu")) is None, reason="PyTorch's Adam is taken")
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("stage", [0, 3])
@ranks(1)
def test_adam_of_the_json_is_the_class_that_programs_ask_for(stage, kind, tmp_path):
    params = {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    engine = engine_of(stage=stage, optimizer={"type": kind, "params": params})
    assert isinstance(engine.optimizer, FusedAdam)
    (group,) = engine.optimizer.param_groups
    assert {name: group[name] for name in params} == params | {"betas": (0.8, 0.95)}
    assert group["decoupled_weight_decay"]
    torchs = engine_of(
        stage=stage, optimizer={"type": kind, "params": params | {"torch_adam": True}}
    )
    assert type(torchs.optimizer) is torch.optim.AdamW
    # The same operations on each element, rounded in another order: within test_engine's bound.
    assert run(engine, steps=3) == pytest.approx(run(torchs, steps=3), rel=SAME)


@pytest.mark.skipif(hasattr(torch.optim, "Lion"), reason="this PyTorch has Lion")
@ranks(1)
def test_an_optimizer_that_torch_does_not_have():
    with pytest.raises(InputError, match=r'"Lion": PyTorch 2.* has no torch.optim.Lion; give'):
        engine_of(optimizer={"type": "Lion", "params": {"lr": 1e-3}})


@ranks(2)
def test_a_given_optimizer_or_schedule_counts_beside_the_json():
    expected = run(engine_of(), steps=2)
    model = small_model()
    chosen = [*model.parameters()]
    with logged() as lines:
        engine, optimizer, *_ = zeropp.initialize(
            model=model,
            optimizer=adamw(chosen[:-1]),
            model_parameters=chosen,
            lr_scheduler=lambda optimizer: WarmupLR(optimizer, warmup_min_lr=1e-2),
            config=config_of(
                optimizer={"type": "SGD", "params": {"lr": "auto"}},
                scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
            ),
        )
    text = "\n".join(lines)
    assert isinstance(optimizer, torch.optim.AdamW) and isinstance(engine.lr_scheduler, WarmupLR)
    for part in (
        'optimizer.type = "SGD" in the JSON has no effect',
        'scheduler.type = "WarmupDecayLR" in the JSON has no effect',
        f"the {len(chosen) - 1} parameters of the optimizer",
    ):
        assert dist.get_rank() or part in text
    assert run(engine, steps=2)[0] == expected[0]
    last = [*gathered_parameters(engine.module).values()][-1]
    assert torch.equal(last, [*small_model().parameters()][-1].detach())
    model = small_model()
    with pytest.raises(InputError, match="model_parameters are not those of the optimizer"):
        zeropp.initialize(
            model=model,
            optimizer=adamw(model.parameters()),
            model_parameters=[*model.parameters()][:2],
            config=config_of(),
        )


@pytest.mark.parametrize("place", ["none", "cpu"])
@ranks(1)
def test_a_schedule_belongs_to_the_optimizer(place):
    zero = {"stage": 2, "offload_optimizer": {"device": place}}
    model = small_model()
    other = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(InputError, match="lr_scheduler=, a StepLR, was made for another optimizer"):
        zeropp.initialize(
            model=model, lr_scheduler=schedule, config=config_of(zero_optimization=zero)
        )
    model = small_model()
    own = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
    engine, *_ = zeropp.initialize(
        model=model, optimizer=own, lr_scheduler=schedule, config=config_of(zero_optimization=zero)
    )
    run(engine, steps=1)
    assert engine.get_lr() == [0.005]


@ranks(2)
def test_a_schedule_of_the_json_moves_rates_and_betas_and_goes_on(tmp_path):
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2}
    params |= {"decay_step_size": 1, "decay_lr_rate": 0.5}
    schedule = {"type": "OneCycle", "params": params}
    optimizer = {"type": "Adam", "params": {"lr": 1e-3}}
    engine = engine_of(scheduler=schedule, optimizer=optimizer)
    assert isinstance(engine.lr_scheduler, OneCycle)
    seen = []
    for step in range(6):
        seen.append((engine.get_lr()[0], engine.get_mom()[0][0]))
        run(engine, steps=1, first=step)
    rates, beta1 = zip(*seen, strict=True)
    assert rates == pytest.approx([0.01, 0.055, 0.1, 0.055, 0.01, 0.01 / 1.5])
    assert beta1 == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9])
    engine.save_checkpoint(tmp_path)
    other = engine_of(scheduler=schedule, optimizer=optimizer)
    other.load_checkpoint(tmp_path)
    assert other.get_lr() == engine.get_lr() and other.get_mom() == engine.get_mom()
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5]
    with pytest.raises(InputError, match="set_lr got 2 rates for 1 parameter groups"):
        engine.set_lr([0.1, 0.2])
