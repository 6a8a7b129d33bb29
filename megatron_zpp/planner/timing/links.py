"""How long a collective occupies the links: near ones within a node, far ones between nodes.

A ring of n ranks on N nodes passes n - N hops near and N - 1 far ones; an all-to-all sends to all
ranks at once, and waits for one hop. NCCL takes the fastest of its protocols.
Source of the latencies' form: NCCL's tuner (src/graph/tuning.cc).
"""

from dataclasses import dataclass

from megatron_zpp.planner.timing.hardware import Protocol, Rates
from zeropp.wire import EXCHANGE, REDUCE

ALL_REDUCE_RINGS = 2  # it is a reduce-scatter and an all-gather


@dataclass(frozen=True)
class HopTime:
    """Seconds that one hop of a collective occupies the near and the far links, both at once."""

    near: float
    far: float

    @property
    def seconds(self) -> float:
        return max(self.near, self.far)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one hop puts on the links: bytes that a rank sends near, bytes that a node sends far.

    `near_hops` and `far_hops` are the hops one after the other that add latency. `times`: how often
    it is sent, one after the other.
    """

    near_bytes: float = 0.0
    far_bytes: float = 0.0
    near_hops: int = 0
    far_hops: int = 0
    times: float = 1

    @property
    def is_empty(self) -> bool:
        return not (self.near_bytes or self.far_bytes)

    def hop(self, rates: Rates) -> HopTime:
        """Return how long the links are occupied once, by the fastest protocol."""
        hops = [self._by(protocol, rates) for protocol in rates.protocols]
        return min(hops, key=lambda hop: hop.seconds)

    def seconds(self, rates: Rates) -> float:
        """Return how long the links are occupied, all times."""
        return self.times * self.hop(rates).seconds

    def _by(self, protocol: Protocol, rates: Rates) -> HopTime:
        latency = protocol.start + self.near_hops * protocol.near + self.far_hops * protocol.far
        near = self.near_bytes / (rates.near * protocol.share)
        far = self.far_bytes / (rates.far * protocol.share) if self.far_bytes else 0.0
        return HopTime(
            near=near + latency if self.near_bytes else 0.0,
            far=far + latency if self.far_bytes else 0.0,
        )


def collective(kind: str, num_ranks: int, num_nodes: int, near: float, far: float) -> Load:
    """Return the message of a collective of a kind of `Message` among ranks on so many nodes."""
    if kind == EXCHANGE:
        return exchange(near, far)
    rings = ALL_REDUCE_RINGS if kind == REDUCE else 1
    return ring(rings * num_ranks, rings * num_nodes, near, far)


def ring(num_ranks: int, num_nodes: int, near_bytes: float, far_bytes: float) -> Load:
    """Return the message of an all-gather or a reduce-scatter among ranks on so many nodes."""
    return Load(
        near_bytes=near_bytes,
        far_bytes=far_bytes,
        near_hops=num_ranks - num_nodes,
        far_hops=num_nodes - 1,
    )


def exchange(near_bytes: float, far_bytes: float) -> Load:
    """Return the message of an all-to-all."""
    return Load(
        near_bytes=near_bytes,
        far_bytes=far_bytes,
        near_hops=1 if near_bytes else 0,
        far_hops=1 if far_bytes else 0,
    )
