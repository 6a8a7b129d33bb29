"""Steps that were timed by hand, and what holds for every step."""

import random
from functools import partial

import pytest

from benchmarks.plan.cpu_steps import Blocking, Host
from megatron_zpp.planner.timing.links import HopTime
from megatron_zpp.planner.timing.timeline import NONE, Collective, Streams, UnitWork, step_seconds

ROOT = UnitWork(forward=0.0, backward=0.0)


def far(seconds, kernels=0.0):
    return Collective((HopTime(0.0, seconds),), kernels)


def unit(forward, gather=NONE, back=NONE, reduction=NONE):
    return UnitWork(
        forward=forward, backward=2 * forward, first_gather=gather, later_gather=gather,
        backward_gather=back, reduction=reduction, early_reduction=reduction,
    )  # fmt: skip


def test_a_gather_hides_behind_the_block_before():
    blocks = [unit(1.0, far(0.6))] * 3
    # The first gather is waited for, the others arrive while a block computes; backward has none.
    assert Streams(blocks, ROOT).run(1) == pytest.approx(0.6 + 3 * 1.0 + 3 * 2.0)
    assert Blocking(blocks, ROOT).run(1) == pytest.approx(3 * 0.6 + 9.0)


def test_a_collective_takes_its_share_of_the_processor():
    blocks = [unit(1.0, far(0.6))] * 3
    streams = Streams(blocks, ROOT, sending_share=0.25)
    # Beside a gather 0.6 s do the work of 0.45; the first one is waited for, and the last block and
    # backward have none beside them.
    assert streams.run(1) == pytest.approx(0.6 + 2 * (0.6 + 0.55) + 1.0 + 3 * 2.0)
    # Nothing is lost where the processor waits anyway.
    slow = [unit(1.0, far(5.0))] * 3
    assert Streams(slow, ROOT, sending_share=0.25).run(1) == Streams(slow, ROOT).run(1)


def test_messages_of_both_links_take_the_share_once():
    gather = Collective((HopTime(0.5, 0.5), HopTime(0.5, 0.0)))
    blocks = [unit(2.0, gather)] * 2
    streams = Streams(blocks, ROOT, sending_share=0.5)
    # 1 s beside the second gather does half a second's work.
    assert streams.run(1) == pytest.approx(1.0 + 1.0 + 1.5 + 2.0 + 2 * 4.0)


def test_a_slow_link_is_what_a_step_waits_for():
    blocks = [unit(1.0, far(5.0))] * 3
    assert Streams(blocks, ROOT).run(1) == pytest.approx(3 * 5.0 + 1.0 + 6.0)


def test_a_reduction_waits_for_the_one_before():
    blocks = [unit(1.0, reduction=far(5.0))] * 3
    # Backward passes end at 5, 7 and 12: the third waits for the reduction that began at 7.
    # 3 forward; block 2 done at 5, reduced at 10; block 1 done at 7, waits until 10, reduced at
    # 15; block 0 done at 12, waits until 15, reduced at 20.
    assert Streams(blocks, ROOT).run(1) == pytest.approx(20.0)


def test_hops_of_two_links_overlap_between_blocks():
    gather = Collective((HopTime(0.0, 1.0), HopTime(1.0, 0.0)))
    blocks = [unit(1.5, gather)] * 4
    # A gather takes 2 s and begins with the block before it, which computes 1.5 s: 0.5 s is seen.
    assert Streams(blocks, ROOT).run(1) == pytest.approx(2.0 + 1.5 + 3 * 2.0 + 4 * 3.0)


def test_on_a_host_later_hops_run_when_the_gather_is_used():
    gather = Collective((HopTime(0.0, 1.0), HopTime(0.25, 0.0)))
    blocks = [unit(2.0, gather)] * 2
    assert Host(blocks, ROOT).run(1) == pytest.approx(1.0 + 0.25 + 2.0 + 0.25 + 2.0 + 8.0)


def random_units(draw):
    def collective():
        hops = tuple(
            HopTime(draw.choice((0.0, draw.random())), draw.random())
            for _ in range(draw.randrange(3))
        )
        return Collective(hops, draw.random() / 5)

    return [
        UnitWork(
            forward=draw.random(), backward=2 * draw.random(), first_gather=collective(),
            later_gather=collective(), backward_gather=collective(), reduction=collective(),
            early_reduction=collective(),
        )
        for _ in range(draw.randrange(2, 6))
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_a_step_takes_at_least_its_computing_and_at_most_everything_in_turn(seed):
    draw = random.Random(seed)
    *blocks, root = random_units(draw)
    count = draw.randrange(1, 4)
    computing = everything = 0.0
    for index in range(count):
        for each in (*blocks, root):
            gather = each.later_gather if index else each.first_gather
            reduction = each.reduction if index == count - 1 else each.early_reduction
            used = [gather, reduction] + ([] if each is root else [each.backward_gather])
            computing += each.forward + each.backward + sum(c.kernels for c in used)
            everything += sum(hop.seconds for c in used for hop in c.hops)
    everything += computing
    for kind in (Streams, Host, Blocking):
        seconds = kind(blocks, root).run(count)
        assert computing - 1e-9 <= seconds <= everything + 1e-9, kind
    assert Blocking(blocks, root).run(count) == pytest.approx(everything)


def test_many_equal_micro_batches_are_not_simulated_one_by_one():
    blocks = [unit(1.0, far(0.6), far(1.5), far(2.5, 0.1))] * 4
    root = unit(0.3, far(0.2), reduction=far(0.4))
    for kind in (Streams, Host, Blocking):
        direct = kind(blocks, root).run(9)
        assert step_seconds(partial(kind, blocks, root), 9) == pytest.approx(direct, rel=0.02), kind
