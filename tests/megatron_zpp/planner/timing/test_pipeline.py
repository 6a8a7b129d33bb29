"""Pipelines that were timed by hand, and what holds for every one."""

import random

import pytest

from megatron_zpp.parallel.pipeline_schedule import waiting_share
from megatron_zpp.planner.timing.links import HopTime
from megatron_zpp.planner.timing.pipeline import (
    PassSeconds,
    pass_seconds,
    pipeline_seconds,
    simulated_seconds,
)
from megatron_zpp.planner.timing.timeline import NONE, Collective, Streams, UnitWork

ROOT = UnitWork(forward=0.0, backward=0.0)


def passes(forward, backward=None, message=0.0, first=0.0, tail=0.0):
    backward = 2 * forward if backward is None else backward
    return PassSeconds(
        first_forward=forward + first, forward=forward, backward=backward,
        last_backward=backward, tail=tail, onward=message, back=message,
    )  # fmt: skip


@pytest.mark.parametrize(("size", "count", "chunks"), [(2, 1, 1), (4, 6, 1), (4, 40, 1), (4, 8, 2)])
def test_equal_stages_wait_as_long_as_the_formula_says(size, count, chunks):
    """Narayanan et al. 2021, section 2.2."""
    seconds = pipeline_seconds([passes(1.0)] * size * chunks, size, count)
    busy = passes(1.0).busy(count) * chunks
    assert seconds == pytest.approx(busy / (1 - waiting_share(size, count, chunks)))


def test_two_stages_by_hand():
    """Forwards of 1 and 2 s, backwards of 2 and 4 s, messages of 0.5 s, two micro-batches.

    Stage 1: forward at 1.5 to 3.5, backward to 7.5, forward to 9.5, backward to 13.5. Stage 0 waits
    for the last gradient until 14, and for its last reduction until 16.25.
    """
    stages = [passes(1.0, message=0.5, tail=0.25), passes(2.0, message=0.5)]
    assert pipeline_seconds(stages, 2, 2) == pytest.approx(16.25)


@pytest.mark.parametrize("seed", range(6))
def test_micro_batches_that_are_not_simulated_take_as_long_as_others(seed):
    draw = random.Random(seed)
    size, chunks = draw.choice([2, 3, 4]), draw.choice([1, 2])
    stages = [
        passes(draw.uniform(0.5, 2), draw.uniform(1, 4), draw.uniform(0, 0.5), draw.random())
        for _ in range(size * chunks)
    ]
    count = size * draw.randint(6, 12)
    exact = simulated_seconds(stages, size, count)
    assert pipeline_seconds(stages, size, count) == pytest.approx(exact, rel=0.02)
    busy = max(sum(s.busy(count) for s in stages[rank::size]) for rank in range(size))
    assert busy <= exact


def test_the_passes_of_a_stage_are_those_of_its_units():
    """The first gather of a step crosses nodes; the reduction of the last pass is not hidden."""
    far, near = Collective((HopTime(0.0, 5.0),)), Collective((HopTime(0.5, 0.0),))
    block = UnitWork(
        forward=1.0, backward=2.0, first_gather=far, later_gather=near, backward_gather=NONE,
        reduction=Collective((HopTime(0.0, 1.5),)), early_reduction=NONE,
    )  # fmt: skip
    seconds = pass_seconds(Streams([block], ROOT), 0.1, 0.2)
    assert seconds == PassSeconds(
        first_forward=6.0, forward=1.5, backward=2.0, last_backward=2.0, tail=1.5, onward=0.1,
        back=0.2,
    )  # fmt: skip
