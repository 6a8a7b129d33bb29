"""Messages take the fastest protocol's start, hops and bytes."""

import pytest

from megatron_zpp.planner.timing.hardware import Protocol, Rates
from megatron_zpp.planner.timing.links import exchange, ring

SLOW_START = Protocol(start=1.0, near=0.1, far=0.5, share=1.0)
HALF_RATE = Protocol(start=0.0, near=0.01, far=0.05, share=0.5)


def rates(*protocols):
    return Rates(
        products=1.0, half_width=0.0, memory=1.0, near=100.0, far=10.0, protocols=protocols
    )


def test_a_ring_starts_passes_all_hops_and_sends():
    hop = ring(8, 2, 700.0, 70.0).hop(rates(SLOW_START))
    latency = 1.0 + 6 * 0.1 + 1 * 0.5
    assert hop.near == pytest.approx(latency + 7) and hop.far == pytest.approx(latency + 7)


def test_an_exchange_waits_for_one_hop_of_its_own_kind():
    assert exchange(100.0, 0.0).hop(rates(SLOW_START)).near == pytest.approx(1.0 + 0.1 + 1.0)
    far = exchange(0.0, 100.0).hop(rates(SLOW_START))
    assert (far.near, far.far) == (0.0, pytest.approx(1.0 + 0.5 + 10.0))
    assert exchange(0.0, 0.0).is_empty


def test_small_messages_take_the_protocol_that_starts_fast():
    both = rates(SLOW_START, HALF_RATE)
    assert exchange(1.0, 0.0).hop(both).near == pytest.approx(0.01 + 0.02)
    assert exchange(1e6, 0.0).hop(both).near == pytest.approx(1.1 + 1e4)
