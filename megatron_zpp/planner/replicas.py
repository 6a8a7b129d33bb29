"""Local SGD in a run that is only planned: what replicas keep, exchange, wait for and lose.

    differences -> quantized, coded on the host -> owners, who sum -> as much back

A GPU quantizes between its steps. What follows, coding and the links, may run beside later steps.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import torch

from megatron_zpp.planner.parts.planned_run import Places, PlannedRun, Sent
from megatron_zpp.planner.parts.planned_unit import FP32_BYTES
from megatron_zpp.planner.state_memory import MOMENTS, SAVED_COPY, WEIGHTS
from megatron_zpp.planner.timing.hardware import GB, Rates, hardware_table
from megatron_zpp.planner.timing.links import exchange
from megatron_zpp.settings.config import ParallelConfig
from zeropp import ZeroConfig
from zeropp.capabilities.local_sgd import PURPOSE, OuterMean, SyncSchedule, places_in
from zeropp.errors import InputError
from zeropp.settings import read_toml
from zeropp.wire import Nodes

# Buffers of an exchange, in fp32: differences, what comes back from each owner, and both joined; of
# the elements that a replica owns, their sum and what becomes of it; and messages, both ways.
OF_ALL, OF_OWNED, MESSAGES = 3, 3, 2
WAYS = 2  # to the owners, and back
INTERVAL = "sync_every"  # the key of the JSON
OUTER = (PURPOSE, "across_nodes")
AGREED, OUTER_STATE, EXCHANGE = "global parameters", "outer momentum", "buffers of an exchange"
FP32_BITS = 32  # which are not coded


@dataclass(frozen=True, kw_only=True)
class PlannedReplicas:
    """The replicas of a run with local SGD, and the part of the run that is one replica's.

    nodes: of the ranks of one replica.
    """

    zero: ZeroConfig
    nodes: Nodes
    num_replicas: int

    @classmethod
    def of(
        cls, zero: ZeroConfig, parallel: ParallelConfig, nodes: Nodes
    ) -> "PlannedReplicas | None":
        """Return the plan for all ranks of `nodes`, None if they take each step together.

        With `sync_store` these are the ranks of one launch, which is one of `sync_nodes`. Raises
        InputError for ranks that cannot be cut into several nodes.
        """
        settings = zero.zeropp
        if settings.sync_every == 1:
            return None
        if settings.sync_store is not None:
            size, count, rest = nodes.num_ranks, settings.sync_nodes, 0
        else:
            size = parallel.world_ranks(nodes.ranks_per_node)
            count, rest = divmod(nodes.num_ranks, size)
        if rest or (count == 1 and settings.sync_store is None):
            raise InputError(
                f"zeropp.sync_every makes nodes replicas, here of {size} ranks, and "
                f"{nodes.num_ranks} ranks are not several of them: give a multiple, or set "
                "zeropp.ranks_per_node"
            )
        its_nodes = Nodes.of(range(size), min(nodes.ranks_per_node, size))
        return cls(zero=zero, nodes=its_nodes, num_replicas=count)

    def __str__(self) -> str:
        number, when = self.num_replicas, self.schedule
        return f"{number} that train independently, synchronized {when} in {self.bits} bits"

    @cached_property
    def schedule(self) -> SyncSchedule:
        """When the replicas exchange."""
        settings = self.zero.zeropp
        return SyncSchedule.of(settings.sync_every, settings.sync_fragments, settings.sync_delay)

    @property
    def interval(self) -> int:
        """The steps between exchanges; where `sync_every` grows, those of the last steps."""
        return self.schedule.last_interval

    @property
    def bits(self) -> int:
        return self.zero.zeropp.sync_bits

    @property
    def hidden_share(self) -> float:
        """The share of the steps beside which something is exchanged, so that nobody waits."""
        schedule, interval = self.schedule, self.interval
        if interval == 1:  # gradients are averaged in each step
            return 0.0
        return min(1.0, schedule.delay * schedule.fragments / interval)

    def state_bytes(self, run: PlannedRun) -> tuple[int, int]:
        """Return a rank's global parameters, and its outer momentum with what rounding has lost."""
        (sizes, *_) = _sizes_by_rank(run)
        feeds = self.zero.zeropp.sync_feedback
        mean = _mean(sizes, self.num_replicas, self.bits, feeds)
        unsent = sum(each.nbytes for each in mean.unsent)
        owned = 2 * FP32_BYTES * mean.error.numel()
        return FP32_BYTES * sum(sizes), owned + unsent

    def buffer_bytes(self, run: PlannedRun) -> int:
        """Return what an exchange of all weights needs on a rank beside, at most."""
        (sizes, *_) = _sizes_by_rank(run)
        of_element = OF_ALL + OF_OWNED / self.num_replicas
        return round((FP32_BYTES * of_element + MESSAGES * self.bits / 8) * sum(sizes))

    def buffers_beside_steps(self, run: PlannedRun) -> int:
        """Return what of it exists in steps: that of the fragments that are exchanged at once."""
        count, delay = self.schedule.fragments, self.schedule.delay
        at_once = min(count, -(-delay * count // self.interval))
        return self.buffer_bytes(run) * at_once // count

    def packed_bytes(self, run: PlannedRun) -> float:
        """Return the bytes of all weights of a rank of `run` in messages, the mean of its axis."""
        places = places_in([numel for numel, *_ in run.trained_tensors], self.schedule.fragments)
        total, ranks = 0, _sizes_by_rank(run)
        for sizes in ranks:
            fragments: dict[int, list[int]] = {}
            for place, size in zip(places, sizes, strict=True):
                fragments.setdefault(place, []).append(size)
            for fragment in fragments.values():
                total += _packed_bytes(tuple(fragment), self.num_replicas, self.bits)
        return total / len(ranks)

    def exchanged_bytes(self, run: PlannedRun) -> float:
        """Return what a node of ranks of `run` sends in an exchange of all weights, uncoded.

        To each owner its part, and of the own part the mean to all others: the mean of nodes.
        """
        share = 2 * (self.num_replicas - 1) / self.num_replicas
        return self.nodes.ranks_per_node * share * self.packed_bytes(run)

    def sent_by_node(self, run: PlannedRun) -> Sent:
        """Return the bytes of a node of such ranks per step, before they are coded."""
        per_step = self.exchanged_bytes(run) / self.interval
        return {(PURPOSE, "in_node"): 0.0, OUTER: per_step}

    def with_state(
        self, run: PlannedRun, device: Mapping[str, int], host: Mapping[str, int]
    ) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return a rank's memory with what it keeps for exchanges; all is on the host of a CPU.

        An exchange needs its buffers when gradients and activations are freed, and in steps if it
        runs beside them: the peak is then, or in the step.
        """
        agreed, owned = self.state_bytes(run)
        result, on_host = Counter(device or host), Counter(host)
        (on_host if self.zero.zeropp.sync_on_host and device else result)[AGREED] = agreed
        result[OUTER_STATE] = owned
        kept = {kind: result[kind] for kind in (WEIGHTS, MOMENTS, AGREED, OUTER_STATE, SAVED_COPY)}
        exchange = Counter({**kept, EXCHANGE: self.buffer_bytes(run)})
        result[EXCHANGE] = self.buffers_beside_steps(run)
        peak = max(result, exchange, key=Counter.total)
        return (peak, on_host) if device else (device, peak)


def interval_of(zero: ZeroConfig) -> int:
    """Return the steps between exchanges at the end of a run; 1 if all ranks step together."""
    return SyncSchedule.of(zero.zeropp.sync_every).last_interval


def with_interval(zero: ZeroConfig, interval: int) -> ZeroConfig:
    """Return settings with another interval between exchanges."""
    return replace(zero, zeropp=replace(zero.zeropp, sync_every=interval))


@cache
def _packed_bytes(sizes: tuple[int, ...], num_replicas: int, bits: int) -> int:
    return _mean(sizes, num_replicas, bits).packed_bytes


def _mean(sizes: Sequence[int], num: int, bits: int, feeds: bool | None = None) -> OuterMean:
    place = SimpleNamespace(node=0, size=num)  # where none exchange
    return OuterMean(sizes, place, bits, torch.device("meta"), feeds=feeds)


def _sizes_by_rank(run: PlannedRun) -> list[list[int]]:
    """Return the elements that each rank of the data axis has of the trained tensors.

    Shards are cut as FSDP2 cuts them, the last ones shorter; tensors that all ranks have, as at
    stage 0, into a slice for each.
    """
    num_ranks = run.num_ranks
    result: list[list[int]] = [[] for _ in range(num_ranks)]
    for numel, each, parts in run.trained_tensors:
        if run.stage == 0:
            each, parts = -(-numel // num_ranks), num_ranks
        for rank, sizes in enumerate(result):
            first = rank * parts // num_ranks * each
            sizes.append(max(0, min(each, numel - first)))
    return result


@dataclass(frozen=True, kw_only=True)
class PlannedExchange:
    """What replicas exchange every `interval` steps, beside which they take a share of these steps.

    elements: that a rank has. packed_bytes: of these, in messages. far_bytes: that a node sends.
    """

    interval: int
    fragments: int
    hidden_share: float
    elements: float
    packed_bytes: float
    far_bytes: float
    is_coded: bool

    @classmethod
    def of(cls, planned: PlannedReplicas, places: Places) -> "PlannedExchange":
        """Return what the ranks at these places of a pipeline exchange; the slowest decide.

        A node that has ranks of several places sends the mean of them.
        """
        runs = [run for run, count in places for _ in range(count)]
        sent = [planned.exchanged_bytes(run) for run in runs]
        spans_nodes = planned.nodes.num_ranks // len(runs) >= planned.nodes.ranks_per_node
        return cls(
            interval=planned.interval,
            fragments=planned.schedule.fragments,
            hidden_share=planned.hidden_share,
            elements=max(run.trained for run in runs),
            packed_bytes=max(planned.packed_bytes(run) for run in runs),
            far_bytes=max(sent) if spans_nodes else sum(sent) / len(sent),
            is_coded=planned.bits < FP32_BITS,
        )

    def seconds(self, step: float, rates: Rates, *, quantizing: bool) -> float:
        """Return what it adds to each step, of so many seconds, on average.

        Each fragment is sent and comes back; what does not end beside steps is waited for.
        """
        message = exchange(0.0, self.far_bytes / WAYS / self.fragments)
        away = WAYS * self.fragments * message.hop(rates).seconds
        kernels = 0.0
        if quantizing:
            constants = hardware_table()["exchange"]
            kernels = self.elements * constants["kernel_bytes"] / rates.memory
            away += self.is_coded * self.packed_bytes / (constants["coding_gb_s"] * GB)
        return kernels / self.interval + max(0.0, away / self.interval - self.hidden_share * step)


@dataclass(frozen=True, kw_only=True)
class LossChange:
    """Percent by which the held-out loss is above that of every step together, as a range."""

    lowest: float
    highest: float
    source: str

    def __str__(self) -> str:
        return f"{self.lowest:+.1f} to {self.highest:+.1f}%"


def loss_change(optimizer: str, interval: int) -> LossChange | None:
    """Return what an interval between exchanges costs; None for one above all in the table.

    The loss grows with the interval, so that the next larger one in the table is a bound.
    """
    by_optimizer = _loss_table()["loss"]
    table = dict(by_optimizer.get(optimizer, by_optimizer["adam"]))
    source = table.pop("source").strip()
    larger = [int(each) for each in table if int(each) >= interval]
    if not larger:
        return None
    lowest, highest = table[str(min(larger))]
    return LossChange(lowest=lowest, highest=highest, source=source)


def compared_intervals() -> tuple[int, ...]:
    """Return the intervals that a plan compares, ascending."""
    return tuple(sorted(_loss_table()["intervals"]))


@cache
def _loss_table() -> Mapping[str, Any]:
    return read_toml(__package__, "local_sgd_loss.toml")
