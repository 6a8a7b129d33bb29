"""Schedules against closed forms, an iteration-by-iteration walk, and their own edges."""

import dataclasses
import logging
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.settings.config import (
    BatchConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)
from megatron_zpp.settings.scheduled_values import (
    GlobalBatchSize,
    LearningRate,
    Length,
    Schedules,
    WeightDecay,
)
from zeropp.errors import InputError

STYLES = ("linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
RELATIVE = 1e-12  # a handful of double-precision operations


def rate(style: str = "linear", **changes: object) -> LearningRate:
    """1000 samples from 1.0 to 0.1 after 100 of warm-up, WSD's last part 200."""
    values = dict(max_lr=1.0, min_lr=0.1, init_lr=0.0, warmup=100.0, decay=1000.0, wsd_decay=200.0)
    return LearningRate(style=style, **{**values, **changes})


def batch(final: int, ramp: tuple[int, int, int] | None = None) -> GlobalBatchSize:
    return GlobalBatchSize(
        BatchConfig(micro_batch_size=1, global_batch_size=final, rampup_batch_size=ramp)
    )


def planned(sizes: BatchConfig, training: dict, rate: dict | None = None, **others) -> Schedules:
    schedule, optimizer = ScheduleConfig(**rate or {}), OptimizerConfig(**others)
    return Schedules.of(sizes, 8, TrainingConfig(**training), schedule, optimizer)


@pytest.mark.parametrize(
    ("style", "points"),
    [
        ("linear", {n: 0.1 + 0.9 * (1 - (n - 100) / 900) for n in (100, 101, 325, 550, 999, 1000)}),
        # A third of the way: (cos 60 degrees + 1) / 2 = 3/4; half; two thirds.
        ("cosine", {100: 1.0, 400: 0.775, 550: 0.55, 700: 0.325, 1000: 0.1}),
        ("inverse-square-root", {100: 1.0, 400: 0.5, 900: 1 / 3, 1000: math.sqrt(0.1)}),
    ],
)
def test_decay(style, points):
    for samples, expected in points.items():
        assert rate(style)(samples) == pytest.approx(expected, rel=RELATIVE)
    warm = rate(style, warmup=1000.0)  # as long as the decay
    assert warm(500) == 0.5 and warm(1000) == 1.0 and warm(1001) == 0.1


def test_inverse_square_root_stops_at_the_minimum_and_needs_no_warm_up():
    assert rate("inverse-square-root", min_lr=0.4)(900) == 0.4
    without = rate("inverse-square-root", warmup=0.0)
    assert [without(n) for n in (0, 1, 4)] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("style", "quarter", "half"),
    [
        ("linear", 0.75, 0.5),
        ("cosine", (math.sqrt(0.5) + 1) / 2, 0.5),
        ("exponential", 2 * 2**-0.25 - 1, math.sqrt(2) - 1),
        ("minus_sqrt", 0.5, 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_is_constant_and_then_decays(style, quarter, half):
    wsd = rate("WSD", wsd_style=style)
    assert [wsd(n) for n in (100, 101, 500, 800)] == [1.0] * 4
    assert wsd(850) == pytest.approx(0.1 + 0.9 * quarter, rel=RELATIVE)
    assert wsd(900) == pytest.approx(0.1 + 0.9 * half, rel=RELATIVE)
    assert wsd(1000) == pytest.approx(0.1, rel=RELATIVE)
    assert wsd(1001) == 0.1
    without = rate("WSD", wsd_style=style, wsd_decay=0.0)  # --lr-wsd-decay-samples 0
    assert [without(n) for n in (850, 1000, 1001)] == [1.0, 1.0, 0.1]


@pytest.mark.parametrize("style", (*STYLES, "constant"))
def test_warm_up_is_linear_from_its_start(style):
    warm = rate(style, init_lr=0.2)
    for n in (0, 25, 50, 100):
        expected = Fraction(1, 5) + Fraction(4, 5) * Fraction(n, 100)
        assert warm(n) == pytest.approx(float(expected), rel=RELATIVE)
    assert rate(style)(0) == 0.0
    assert rate(style, warmup=0.0)(0) == 1.0


@settings(max_examples=60, deadline=None)
@given(
    style=st.sampled_from(STYLES),
    wsd_style=st.sampled_from(WSD_STYLES),
    warmup=st.integers(0, 500),
    extra=st.integers(200, 2000),
    first=st.integers(0, 2500),
)
def test_the_rate_rises_in_the_warm_up_and_never_after(style, wsd_style, warmup, extra, first):
    schedule = rate(style, wsd_style=wsd_style, warmup=float(warmup), decay=float(warmup + extra))
    now, then = schedule(first), schedule(first + 1)
    assert 0.0 <= now <= 1.0 + RELATIVE
    if first + 1 <= warmup:
        assert then >= now
    if first > warmup + extra:
        assert now == 0.1
    if first >= max(warmup, 1):
        assert then <= now + RELATIVE
        assert now >= 0.1 - RELATIVE


@pytest.mark.parametrize(
    ("style", "quarter", "half"),
    [("linear", 0.25, 0.5), ("cosine", (1 - math.sqrt(0.5)) / 2, 0.5), ("constant", 1.0, 1.0)],
)
def test_weight_decay_grows(style, quarter, half):
    start = 0.5 if style == "constant" else 0.1
    decay = WeightDecay(start=start, end=0.5, style=style, length=1000.0)
    assert decay(0) == start and decay(1000) == decay(5000) == 0.5
    assert decay(250) == pytest.approx(0.1 + 0.4 * quarter, rel=RELATIVE)
    assert decay(500) == pytest.approx(0.1 + 0.4 * half, rel=RELATIVE)
    sizes = BatchConfig(micro_batch_size=1, global_batch_size=4)
    ends = {"start_weight_decay": start, "end_weight_decay": 0.5, "weight_decay_incr_style": style}
    if style == "constant":
        ends = {"weight_decay": 0.5}
    schedules = planned(sizes, {"train_iters": 250}, **ends)
    assert [schedules.weight_decay(n) for n in (0, 250)] == [decay(0), decay(250)]
    values = [value for part in schedules.state().values() for value in part.values()]
    assert all(type(value) in (float, str) for value in values)  # plain, for a checkpoint


def test_batch_size_ramp():
    constant = batch(8)
    assert constant(0) == constant(10**15) == 8 and constant.samples_after(7) == 56
    assert [constant.iterations_within(n) for n in (0, 7, 8, 56, 63)] == [0, 0, 1, 7, 7]
    # 7 steps of 4 over 700 samples: 100 samples each
    sizes = batch(32, (4, 4, 700))
    assert [sizes(n) for n in (0, 99, 100, 199, 350, 699, 700, 701)] == [
        4, 4, 8, 8, 16, 28, 32, 32,
    ]  # fmt: skip
    assert batch(8, (8, 4, 700))(0) == 8
    assert batch(8, (4, 4, 0))(0) == 8


ramps = st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(0, 7), st.integers(0, 400)).map(
    lambda r: ((r[0], r[1], r[3]), r[0] + r[1] * r[2])
)


@settings(max_examples=100, deadline=None)
@given(ramp=ramps, iterations=st.integers(0, 120), spare=st.integers(0, 50))
def test_the_ramp_agrees_with_a_walk(ramp, iterations, spare):
    """Iteration by iteration, by the reference's formula in exact fractions."""
    (start, increment, samples), final = ramp
    sizes = batch(final, (start, increment, samples))
    steps = (final - start) // increment
    consumed = 0
    for _ in range(iterations):
        size = final
        if consumed < samples and steps:
            size = start + int(consumed / Fraction(samples, steps)) * increment
        assert sizes(consumed) == size
        consumed += size
    assert sizes.samples_after(iterations) == consumed
    fitting = sizes.iterations_within(consumed + spare)
    assert sizes.samples_after(fitting) <= consumed + spare < sizes.samples_after(fitting + 1)


def test_every_batch_size_on_the_way_must_divide():
    batch(16, (8, 4, 40)).check(4)
    with pytest.raises(InputError, match="global batch size 12 in --rampup-batch-size 8 4 40"):
        batch(16, (8, 4, 40)).check(8)
    batch(24, (8, 8, 0)).check(8)  # a ramp without samples is never seen
    with pytest.raises(InputError, match="size 10 is not divisible by micro-batch size 1 x 4"):
        batch(10).check(4)


def test_length_in_each_unit():
    sizes = batch(4)
    assert Length.of(TrainingConfig(train_iters=5), sizes, 8) == Length(iterations=5, samples=20)
    assert Length.of(TrainingConfig(train_samples=21), sizes, 8) == Length(iterations=5, samples=21)
    tokens = TrainingConfig(train_tokens=8 * 22 + 7)
    assert Length.of(tokens, sizes, 8) == Length(iterations=5, samples=22)
    with pytest.raises(InputError, match="--train-tokens is worth 3 samples .* the 4 of one"):
        Length.of(TrainingConfig(train_tokens=31), sizes, 8)


def test_tokens_beside_another_length_end_the_run_if_they_are_reached_first():
    sizes = batch(4)  # 32 tokens a step
    for others in ({"train_iters": 5}, {"train_samples": 20}):
        for tokens, iterations in ((31 + 32 * 3, 3), (32 * 5, 5), (32 * 9, 5)):
            training = TrainingConfig(train_tokens=tokens, **others)
            training.check()
            assert Length.of(training, sizes, 8).iterations == iterations


def test_lengths_of_the_schedule_become_samples_through_the_ramp():
    sizes = BatchConfig(micro_batch_size=1, global_batch_size=8, rampup_batch_size=(4, 4, 20))
    # 5 iterations of 4, then of 8
    schedules = planned(sizes, {"train_iters": 10}, {"lr_warmup_iters": 3, "lr_decay_iters": 7})
    assert schedules.length == Length(iterations=10, samples=60)
    assert (schedules.learning_rate.warmup, schedules.learning_rate.decay) == (12, 36)
    tokens = planned(sizes, {"train_iters": 10}, {"lr_warmup_tokens": 100, "lr_decay_tokens": 300})
    assert (tokens.learning_rate.warmup, tokens.learning_rate.decay) == (12.5, 37.5)
    both = {"lr_warmup_samples": 3, "lr_decay_samples": 9, "lr_decay_tokens": 300}
    counted = planned(sizes, {"train_iters": 10}, both).learning_rate
    assert (counted.warmup, counted.decay) == (3, 37.5)  # as in Megatron-DeepSpeed
    share = planned(sizes, {"train_samples": 50}, {"lr_warmup_fraction": 0.25})
    assert (share.learning_rate.warmup, share.learning_rate.decay) == (12.5, 50)
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 9, "lr_warmup_samples": 2}
    rates = planned(sizes, {"train_samples": 50}, wsd).learning_rate
    assert (rates.warmup, rates.decay, rates.wsd_decay) == (2, 50, 9)


def test_resuming_compares_schedules(caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    sizes = BatchConfig(micro_batch_size=1, global_batch_size=4)
    old, new = (planned(sizes, {"train_iters": count}) for count in (10, 20))
    plain = ScheduleConfig()
    assert new.resumed(new.state(), plain) == new
    with pytest.raises(InputError, match="decay: 80.0 now, 40.0 in the checkpoint") as caught:
        new.resumed(old.state(), plain)
    assert "--override-opt_param-scheduler" in str(caught.value)
    assert "--use-checkpoint-opt_param-scheduler" in str(caught.value)
    assert not caplog.records
    override = dataclasses.replace(plain, override_opt_param_scheduler=True)
    assert new.resumed(old.state(), override) == new
    assert "learning_rate decay: 80.0 now, 40.0 in the checkpoint" in caplog.text
    saved = dataclasses.replace(plain, use_checkpoint_opt_param_scheduler=True)
    resumed = new.resumed(old.state(), saved)
    assert resumed.learning_rate == old.learning_rate
    assert resumed.length == new.length
    assert "opt_param-scheduler: the second is used" in caplog.messages[-1]


def scheduled(*words: str, seq_length: int = 10) -> GlobalBatchSize:
    sizes = BatchConfig(micro_batch_size=1, step_batch_size_schedule=words)
    return GlobalBatchSize(sizes, seq_length)


@pytest.mark.parametrize("words", [("0:2", "0.1K:4", "250:8"), ("0:2 0.1k:4 250:8",)])
def test_a_schedule_has_the_size_of_the_last_number_of_tokens_that_is_reached(words):
    """Steps of 2 samples end at 10, of 4 at 26: the first multiples from 10 and 25 samples on."""
    size = scheduled(*words)
    consumed, sizes = 0, []
    while len(sizes) < 11:
        sizes.append(size(consumed))
        consumed += sizes[-1]
    assert sizes == [2] * 5 + [4] * 4 + [8, 8]
    assert [size.samples_after(n) for n in (0, 3, 5, 6, 9, 11)] == [0, 6, 10, 14, 26, 42]
    assert [size.iterations_within(n) for n in (9, 10, 13, 26, 41, 42)] == [4, 5, 5, 9, 10, 11]


def test_a_schedule_may_skip_a_size_and_become_smaller():
    size = scheduled("0:8", "10:2", "20:4", seq_length=1)
    assert [size(consumed) for consumed in (0, 8, 16, 18, 20)] == [8, 8, 2, 2, 4]
    assert size.samples_after(4) == 8 + 8 + 2 + 2 and size.samples_after(5) == 24
    assert scheduled("0:8", "2:2", "3:4", seq_length=1).samples_after(2) == 12
