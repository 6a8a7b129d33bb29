"""The warm-up schedules give the rates of DeepSpeed, step by step."""

import math

import pytest
import torch

from zeropp.optim.lr_schedule import build_scheduler
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
