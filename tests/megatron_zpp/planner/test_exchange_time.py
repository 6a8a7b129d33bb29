"""What nodes that step alone wait for each other is what happens step by step."""

from dataclasses import replace

import pytest
import torch

from megatron_zpp.planner.replicas import PlannedExchange
from megatron_zpp.planner.timing.hardware import TYPICAL, find_cluster, hardware_table
from zeropp.capabilities.local_sgd.sync_schedule import SyncSchedule

RATES = find_cluster(cluster="dgx-a100", num_nodes=2, link="1gbit").at(TYPICAL, torch.bfloat16)
# Without latency, so that a message's time is its bytes divided by the rate of the links.
PLAIN = replace(
    RATES, protocols=tuple(replace(each, start=0.0, far=0.0) for each in RATES.protocols)
)


def exchange(
    interval: int, fragments: int = 1, delay: int = 0, seconds: float = 6.0
) -> PlannedExchange:
    """What takes the links so many seconds in an interval."""
    return PlannedExchange(
        interval=interval,
        fragments=fragments,
        hidden_share=min(1.0, delay * fragments / interval),
        elements=1e9,
        packed_bytes=5e8,
        far_bytes=seconds * PLAIN.far,
        is_coded=True,
    )


def walked(interval: int, fragments: int, delay: int, seconds: float, step: float) -> float:
    """Return the mean time of steps in which a thread exchanges one fragment after another."""
    schedule = SyncSchedule.of(interval, fragments, delay)
    now, thread, merges, begin = 0.0, 0.0, {}, 0.0
    warm_up, last = 10 * interval, 20 * interval
    for number in range(1, last + 1):
        now += step
        for fragment in range(fragments):
            if schedule.is_due(number, fragment):
                thread = max(thread, now) + seconds / fragments
                merges.setdefault(number + delay, []).append(thread)
        now = max([now, *merges.pop(number, [])])
        begin = now if number == warm_up else begin
    return (now - begin) / (last - warm_up)


@pytest.mark.parametrize("step", [0.05, 0.3, 1.0])
@pytest.mark.parametrize(
    ("interval", "fragments", "delay"),
    [(2, 1, 1), (10, 1, 0), (12, 4, 0), (12, 1, 5), (12, 4, 2), (12, 4, 3), (12, 4, 7),
     (30, 3, 29)],
)  # fmt: skip
def test_what_does_not_end_beside_steps_is_waited_for(interval, fragments, delay, step):
    planned = exchange(interval, fragments, delay)
    waits = planned.seconds(step, PLAIN, quantizing=False)
    expected = walked(interval, fragments, delay, 6.0, step) - step
    assert waits == pytest.approx(expected, abs=1e-6 * step)


def test_quantizing_and_coding_take_time_once_in_an_interval():
    table, planned = hardware_table()["exchange"], exchange(10)
    alone = planned.seconds(1.0, PLAIN, quantizing=False)
    assert alone == pytest.approx(0.6)
    kernels = planned.elements * table["kernel_bytes"] / PLAIN.memory
    coding = planned.packed_bytes / (table["coding_gb_s"] * 1e9)
    more = planned.seconds(1.0, PLAIN, quantizing=True) - alone
    assert more == pytest.approx((kernels + coding) / 10)
    uncoded = replace(planned, is_coded=False).seconds(1.0, PLAIN, quantizing=True) - alone
    assert uncoded == pytest.approx(kernels / 10)
    # Of these only the kernels keep the GPU from its steps.
    hidden = replace(planned, hidden_share=1.0).seconds(1.0, PLAIN, quantizing=True)
    assert hidden == pytest.approx(kernels / 10)


def test_each_fragment_has_its_latency_both_ways():
    extra = [
        exchange(10, fragments).seconds(1.0, RATES, quantizing=False)
        - exchange(10, fragments).seconds(1.0, PLAIN, quantizing=False)
        for fragments in (1, 4)
    ]
    assert 0 < extra[0] and extra[1] == pytest.approx(4 * extra[0])
