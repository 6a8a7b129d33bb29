"""Slow steps are reported once, after the first iterations, and warm-up does not count."""

import random

from megatron_zpp.monitor.step_watch import StepWatch


def reports(watch, steps):
    return [median for median in map(watch.median_above, steps) if median is not None]


def test_slow_steps_are_reported_once():
    assert reports(StepWatch(1.0), [2.0] * 100) == [2.0]


def test_a_slow_warm_up_and_a_few_slow_steps_are_not_reported():
    draw = random.Random(0)
    steps = [9.0] * StepWatch.WARM_UP + [1.2] * 7 + [0.9] * 8
    rest = steps[StepWatch.WARM_UP :]
    draw.shuffle(rest)
    assert reports(StepWatch(1.0), steps[: StepWatch.WARM_UP] + rest) == []
    assert reports(StepWatch(1.0), [9.0] * (StepWatch.LAST - 1)) == []
