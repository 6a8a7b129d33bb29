"""DeepSpeed's schedules: their rates step by step, their flags, values for each parameter group."""

import argparse
import inspect
import math

import pytest
import torch
from torch import nn

from zeropp import InputError
from zeropp.deepspeed.lr_schedule import (
    KINDS,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)
from zeropp.deepspeed.runtime import lr_schedules
from zeropp.deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, get_config_from_args
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


def sgd(rate: float | torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate)


def scheduler_of(named: dict, optimizer: torch.optim.Optimizer):
    params = SchedulerParams(**{"warmup_num_steps": 4, **named["params"]})
    return build_scheduler(optimizer, Scheduler(type=named["type"], params=params))


@pytest.mark.parametrize("name", TABLE)
def test_learning_rates_match_a_table(name):
    named, expected = TABLE[name]
    optimizer = sgd(2e-4)
    scheduler, rates = scheduler_of(named, optimizer), []
    for _ in expected:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_a_loaded_schedule_continues():
    named, expected = TABLE["decay"]
    optimizer = sgd(2e-4)
    first = scheduler_of(named, optimizer)
    for _ in range(6):
        optimizer.step()
        first.step()
    other = sgd(2e-4)
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
        optimizer = sgd(lr)
        schedule, seen = kind(optimizer, **arguments), []
        for _ in range(4):
            (group,) = optimizer.param_groups
            assert not isinstance(lr, torch.Tensor) or group["lr"] is lr
            seen.append(float(group["lr"]))
            schedule.step()
        return seen

    assert rates(torch.full(shape, 0.1, dtype=torch.float64)) == rates(0.1)


@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
@pytest.mark.parametrize("steps", [None, -5, 2.5])
def test_a_warm_up_takes_a_number_of_steps(kind, steps):
    optimizer = sgd(0.5)
    total = {} if kind is WarmupLR else {"total_num_steps": 100}
    with pytest.raises(InputError, match=f"warmup_num_steps = {steps}"):
        kind(optimizer, warmup_num_steps=steps, **total)


def adam(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.Adam(groups, betas=(0.9, 0.99))


def parsed(words: str) -> argparse.Namespace:
    return lr_schedules.add_tuning_arguments(argparse.ArgumentParser()).parse_args(words.split())


def test_flags_describe_the_section_of_the_json():
    config, error = get_config_from_args(
        parsed("--lr_schedule WarmupCosineLR --warmup_min_ratio 0.1 --cos_min_ratio 0.05")
    )
    assert error is None and config["params"] == {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}
    schedule = WarmupCosineLR(adam(0.001), total_num_steps=2000, **config["params"])
    assert (schedule.warmup_min_ratio, schedule.cos_min_ratio) == (0.1, 0.05)
    rate, error = lr_schedules.get_lr_from_config(config)
    assert rate is None and "WarmupCosineLR" in error
    for kind, rate in (
        ("LRRangeTest", 0.001), ("OneCycle", 0.1), ("WarmupLR", 0.001), ("WarmupDecayLR", 0.001),
    ):  # fmt: skip
        config, error = get_config_from_args(parsed(f"--lr_schedule {kind}"))
        assert error is None and lr_schedules.get_lr_from_config(config) == (rate, "")
    for words in ("", "--lr_schedule Cyclic"):
        config, error = get_config_from_args(parsed(words))
        assert config is None and "expected one of LRRangeTest" in error


@pytest.mark.parametrize("is_given", [False, True])
def test_switches_are_off_unless_they_are_given(is_given):
    args = parsed("--lr_range_test_staircase --cycle_momentum" if is_given else "")
    params = {}
    lr_schedules.override_lr_range_test_params(args, params)
    assert params["lr_range_test_staircase"] is is_given
    words = "--lr_schedule OneCycle --cycle_min_lr 1e-4 --cycle_max_lr 1e-3 "
    words += "--cycle_first_step_size 4 --cycle_first_stair_count 2 --cycle_min_mom 0.8 "
    args = parsed(words + "--cycle_momentum" * is_given)
    lr_schedules.override_1cycle_params(args, params := {})
    assert params == get_config_from_args(args)[0]["params"]
    optimizer = adam(0.001)
    schedule = OneCycle(optimizer, **params)
    assert schedule.second_step_size == 4 and schedule.stairs == (2, 2)
    betas = {optimizer.param_groups[0]["betas"][0] for _ in range(4) if schedule.step() is None}
    assert (betas == {0.9}) is not is_given


def test_groups_have_rates_of_their_own():
    cosine = WarmupCosineLR(adam(0.1, 0.2), 100, warmup_num_steps=10, warmup_type="linear")
    cosine.step(5)
    assert [group["lr"] for group in cosine.optimizer.param_groups] == [0.05, 0.1]
    warmup = WarmupLR(adam(0.1, 0.2), warmup_num_steps=10)
    warmup.step(10)
    assert warmup.get_lr() == warmup.max_lrs == [0.1, 0.2]
    optimizer = adam(0.1, 0.2)
    sizes = {"cycle_first_step_size": 5, "cycle_second_step_size": 5}
    cycle = OneCycle(
        optimizer, [0.001, 0.002], [0.01, 0.02], cycle_min_mom=[0.8, 0.85],
        cycle_max_mom=[0.9, 0.95], **sizes,
    )  # fmt: skip
    seen = []
    for batch in (4, 9):
        cycle.step(batch)
        seen.append([(group["lr"], group["betas"][0]) for group in optimizer.param_groups])
    assert seen[0] == [pytest.approx((0.01, 0.8)), pytest.approx((0.02, 0.85))]
    assert seen[1] == [pytest.approx((0.001, 0.9)), pytest.approx((0.002, 0.95))]
    for name in ("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"):
        values = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, name: [0.1, 0.2, 0.3]}
        with pytest.raises(InputError, match=f"{name} has 3 values for 2 parameter groups"):
            OneCycle(adam(0.1, 0.2), **values)


def test_a_cosine_says_which_share_of_the_rate_comes_next_and_may_end_with_its_warm_up():
    schedule = WarmupCosineLR(sgd(0.5), 10, warmup_num_steps=4, warmup_type="linear")
    ratios = [schedule.get_lr_ratio() for _ in range(3) if schedule.step() is None]
    assert ratios == [0.0, 0.25, 0.5] and schedule.optimizer.param_groups[0]["lr"] == 0.25
    cosine = WarmupCosineLR(adam(0.01), 10, warmup_num_steps=10, cos_min_ratio=0.1)
    for batch in range(10, 15):
        cosine.step(batch)
        assert cosine.get_lr_ratio() == pytest.approx(0.1)


def rates_of(first: int, second: int, stairs: tuple[int, int | None]) -> list[float]:
    """The rates after each batch of one cycle of so many batches up and down."""
    cycle = OneCycle(
        adam(0.001), 0.001, 0.01, cycle_first_step_size=first, cycle_second_step_size=second,
        cycle_first_stair_count=stairs[0], cycle_second_stair_count=stairs[1],
    )  # fmt: skip
    return [cycle.get_lr()[0] for _ in range(first + second) if cycle.step() is None]


def test_stairs_of_one_cycle():
    smooth = rates_of(8, 8, (0, None))
    stairs = rates_of(8, 8, (2, None))
    assert len(set(smooth[:8])) == 8 and len(set(stairs[:8])) == 3 and stairs[0] == stairs[1]
    assert rates_of(8, 8, (8, None)) == pytest.approx(smooth)
    smooth = rates_of(10, 21, (0, 0))
    assert rates_of(10, 21, (10, 21)) == pytest.approx(smooth) and smooth[9] == pytest.approx(0.01)
    first, second = rates_of(10, 21, (2, 0)), rates_of(10, 21, (0, 3))
    assert first[:10] != smooth[:10] and first[10:] == smooth[10:]
    assert second[:10] == smooth[:10] and second[10:] != smooth[10:]


def test_sizes_of_a_cycle_that_cannot_be():
    with pytest.raises(InputError, match="lr_range_test_step_size = -5"):
        LRRangeTest(adam(0.1), lr_range_test_step_size=-5)
    sizes = ("cycle_first_step_size", "cycle_second_step_size")
    for pair in ((0, 0), (0, None), (-1, None), (0, 100), (100, -1)):
        with pytest.raises(InputError, match="expected at least 1 and 0"):
            OneCycle(adam(0.1), 0.001, 0.1, **dict(zip(sizes, pair, strict=True)))
    cycle = OneCycle(adam(0.1), 0.001, 0.1, **dict(zip(sizes, (100, 0), strict=True)))
    cycle.step()
    assert cycle.get_lr()[0] > 0.001
