"""The warm-up schedules give the rates of DeepSpeed, step by step."""

import inspect
import math

import pytest
import torch

from zeropp import InputError
from zeropp.deepspeed.lr_schedule import (
    KINDS,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)
from zeropp.settings.sections import Scheduler, SchedulerParams

LN2, LN3, LN4 = math.log(2), math.log(3), math.log(4)
HALF = 2e-4 * (1e-4 + (1 - 1e-4) * 0.5)
# Optimizer's rate 2e-4, warm-up of 4 steps, 8 in all; the rates of steps 1, 2, ...
TABLE = {
    "log": (
        dict(type="WarmupLR", params=dict(warmup_max_lr=1.0, warmup_min_lr=0.2)),
        [0.2, 0.2, 0.2 + 0.8 * LN2 / LN4, 0.2 + 0.8 * LN3 / LN4, 1.0, 1.0, 1.0],
    ),
    "linear": (
        dict(type="WarmupLR", params=dict(warmup_type="linear", warmup_max_lr=1.0)),
        [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0],
    ),
    "the optimizer's rate": (
        dict(type="WarmupLR", params=dict(warmup_type="linear")),
        [0.0, 0.0, 5e-5, 1e-4, 1.5e-4, 2e-4, 2e-4],
    ),
    "decay": (
        dict(type="WarmupDecayLR", params=dict(warmup_type="linear", total_num_steps=8)),
        [0, 0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 0, 0],
    ),
    "cosine": (
        dict(type="WarmupCosineLR", params=dict(warmup_type="linear", total_num_steps=8)),
        [0, 0, 5e-5, 1e-4, 1.5e-4]
        + [2e-4 * (1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi / 4)) / 2), HALF]
        + [2e-4 * (1e-4 + (1 - 1e-4) * (1 - math.cos(math.pi / 4)) / 2), 2e-8, 2e-8],
    ),
    "going on": (
        dict(type="WarmupLR", params=dict(warmup_type="linear", last_batch_iteration=1)),
        [5e-5, 1e-4, 1.5e-4, 2e-4],
    ),
}


def optimizer_of() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2e-4)


def scheduler_of(named: dict, optimizer: torch.optim.Optimizer):
    params = SchedulerParams(**{"warmup_num_steps": 4, **named["params"]})
    return build_scheduler(optimizer, Scheduler(type=named["type"], params=params))


@pytest.mark.parametrize("name", TABLE)
def test_learning_rates_match_a_table(name):
    named, expected = TABLE[name]
    optimizer = optimizer_of()
    scheduler, rates = scheduler_of(named, optimizer), []
    for _ in expected:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_a_loaded_schedule_continues():
    named, expected = TABLE["decay"]
    optimizer = optimizer_of()
    first = scheduler_of(named, optimizer)
    for _ in range(6):
        optimizer.step()
        first.step()
    other = optimizer_of()
    second = scheduler_of(named, other)
    second.load_state_dict(first.state_dict())
    assert other.param_groups[0]["lr"] == second.get_last_lr()[0] == pytest.approx(expected[6])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_that_is_a_tensor_stays_that_tensor(kind, shape):
    needed = {"total_num_steps": 20, "cycle_min_lr": 0.01, "cycle_max_lr": 0.1}
    names = inspect.signature(kind).parameters
    arguments = {name: value for name, value in needed.items() if name in names}

    def rates(lr):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        schedule, seen = kind(optimizer, **arguments), []
        for _ in range(4):
            (group,) = optimizer.param_groups
            assert not isinstance(lr, torch.Tensor) or group["lr"] is lr
            seen.append(float(group["lr"]))
            schedule.step()
        return seen

    assert rates(torch.full(shape, 0.1, dtype=torch.float64)) == rates(0.1)


def test_a_cosine_says_which_share_of_the_rate_comes_next():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = WarmupCosineLR(optimizer, 10, warmup_num_steps=4, warmup_type="linear")
    ratios = [schedule.get_lr_ratio() for _ in range(3) if schedule.step() is None]
    assert ratios == [0.0, 0.25, 0.5] and optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
@pytest.mark.parametrize("steps", [None, -5, 2.5])
def test_a_warm_up_takes_a_number_of_steps(kind, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    total = {} if kind is WarmupLR else {"total_num_steps": 100}
    with pytest.raises(InputError, match=f"warmup_num_steps = {steps}"):
        kind(optimizer, warmup_num_steps=steps, **total)
