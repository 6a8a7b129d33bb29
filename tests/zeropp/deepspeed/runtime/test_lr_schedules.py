"""Flags of DeepSpeed for schedules, and schedules with values for each parameter group."""

import argparse

import pytest
import torch
from torch import nn

from zeropp import InputError
from zeropp.deepspeed.runtime import lr_schedules
from zeropp.deepspeed.runtime.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupLR,
    get_config_from_args,
)


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


def test_a_cosine_that_ends_with_its_warm_up():
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
