"""What nodes that step alone keep and exchange, in a run that is only planned."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from megatron_zpp.planner.parts.planned_run import PlannedRun
from megatron_zpp.settings.config import Config
from zeropp.capabilities.local_sgd.fragment import places_in
from zeropp.capabilities.local_sgd.outer_group import PURPOSE
from zeropp.capabilities.local_sgd.outer_mean import OuterMean
from zeropp.capabilities.local_sgd.sync_schedule import SyncSchedule
from zeropp.errors import InputError
from zeropp.wire.rank_group import Nodes

FP32_BYTES = 4
# Buffers of an exchange, in fp32: differences, what comes back from each owner, and both joined; of
# the elements that a node owns, their sum and what becomes of it; and messages, sent and received.
OF_ALL, OF_OWNED, MESSAGES = 3, 3, 2


@dataclass(frozen=True, kw_only=True)
class PlannedLocalSteps:
    """The nodes of a run which step alone, and the part of it that is one node's.

    config, nodes: of the ranks of one world, with its share of the batch.
    """

    config: Config
    nodes: Nodes
    num_worlds: int

    @classmethod
    def of(cls, config: Config, nodes: Nodes) -> "PlannedLocalSteps | None":
        """Return the plan for all ranks of `nodes`, None if they take each step together.

        With `sync_store` these are the ranks of one launch, which is one of `sync_nodes`. Raises
        InputError for ranks that cannot be cut into several nodes.
        """
        settings = config.zero.zeropp
        if settings.sync_every == 1:
            return None
        if settings.sync_store is not None:
            size, num_worlds, rest = nodes.num_ranks, settings.sync_nodes, 0
        else:
            size = config.parallel.world_ranks(nodes.ranks_per_node)
            num_worlds, rest = divmod(nodes.num_ranks, size)
        if rest or (num_worlds == 1 and settings.sync_store is None):
            raise InputError(
                f"zeropp.sync_every lets nodes step alone, here of {size} ranks, and "
                f"{nodes.num_ranks} ranks are not several of them: give a multiple, or set "
                "zeropp.ranks_per_node"
            )
        batch = config.batch
        share = replace(batch, global_batch_size=batch.global_batch_size // num_worlds)
        return cls(
            config=replace(config, batch=share),
            nodes=Nodes.of(range(size), min(nodes.ranks_per_node, size)),
            num_worlds=num_worlds,
        )

    def __str__(self) -> str:
        bits = self.config.zero.zeropp.sync_bits
        return f"{self.num_worlds} that step alone, exchange {self.schedule} in {bits} bits"

    @cached_property
    def schedule(self) -> SyncSchedule:
        """When the nodes exchange."""
        settings = self.config.zero.zeropp
        return SyncSchedule.of(settings.sync_every, settings.sync_fragments, settings.sync_delay)

    @property
    def interval(self) -> int:
        """The steps between exchanges; where `sync_every` grows, those of the last steps."""
        return self.schedule.last_interval

    @property
    def hidden_share(self) -> float:
        """The share of the steps beside which something is exchanged, so that nobody waits."""
        schedule, interval = self.schedule, self.interval
        if interval == 1:  # gradients are averaged in each step
            return 0.0
        return min(1.0, schedule.delay * schedule.fragments / interval)

    def state_bytes(self, run: PlannedRun) -> tuple[int, int]:
        """Return a rank's agreed weights, and its outer momentum with what rounding has lost."""
        (sizes, *_) = _sizes_by_rank(run)
        feeds = self.config.zero.zeropp.sync_feedback
        mean = _mean(sizes, self.num_worlds, self._bits, feeds)
        unsent = sum(each.nbytes for each in mean.unsent)
        owned = 2 * FP32_BYTES * mean.error.numel()
        return FP32_BYTES * sum(sizes), owned + unsent

    def buffer_bytes(self, run: PlannedRun) -> int:
        """Return what an exchange of all weights needs on a rank beside, at most."""
        (sizes, *_) = _sizes_by_rank(run)
        of_element = OF_ALL + OF_OWNED / self.num_worlds
        return round((FP32_BYTES * of_element + MESSAGES * self._bits / 8) * sum(sizes))

    def buffers_beside_steps(self, run: PlannedRun) -> int:
        """Return what of it exists in steps: that of the fragments that are exchanged at once."""
        count, delay = self.schedule.fragments, self.schedule.delay
        at_once = min(count, -(-delay * count // self.interval))
        return self.buffer_bytes(run) * at_once // count

    def packed_bytes(self, run: PlannedRun) -> float:
        """Return the bytes of all weights of a rank of `run` in messages, the mean of its axis."""
        places = places_in(_numels(run), self.schedule.fragments)
        total, ranks = 0, _sizes_by_rank(run)
        for sizes in ranks:
            fragments: dict[int, list[int]] = {}
            for place, size in zip(places, sizes, strict=True):
                fragments.setdefault(place, []).append(size)
            for fragment in fragments.values():
                total += _packed_bytes(tuple(fragment), self.num_worlds, self._bits)
        return total / len(ranks)

    def exchanged_bytes(self, run: PlannedRun) -> float:
        """Return what a node of ranks of `run` sends in an exchange of all weights, uncoded.

        To each owner its part, and of the own part the mean to all others: the mean of nodes.
        """
        share = 2 * (self.num_worlds - 1) / self.num_worlds
        return self.nodes.ranks_per_node * share * self.packed_bytes(run)

    def sent_by_node(self, run: PlannedRun) -> dict[tuple[str, str], float]:
        """Return the bytes of a node of such ranks per step, before they are coded."""
        per_step = self.exchanged_bytes(run) / self.interval
        return {(PURPOSE, "in_node"): 0.0, (PURPOSE, "across_nodes"): per_step}

    @property
    def _bits(self) -> int:
        return self.config.zero.zeropp.sync_bits


@cache
def _packed_bytes(sizes: tuple[int, ...], num_worlds: int, bits: int) -> int:
    return _mean(sizes, num_worlds, bits).packed_bytes


def _mean(sizes: Sequence[int], num_worlds: int, bits: int, feeds: bool | None = None) -> OuterMean:
    place = _Place(node=0, size=num_worlds)
    return OuterMean(sizes, place, bits, torch.device("meta"), feeds=feeds)


def _trained(run: PlannedRun) -> Iterator[tuple[int, int, int]]:
    """Yield (elements, elements of a shard, number of shards) of what is trained, in order."""
    shards = {
        parameter: (spec.elements, unit.num_shards)
        for unit in run.plan.units
        for parameter, spec in zip(unit.parameters, unit.specs, strict=True)
        if spec.trainable
    }
    own = {None, *(layer for stage in run.stages for layer in stage.layers)}
    for layer, parameter in run.model.parameters(run.ranks):
        if layer in own and parameter in shards:
            yield parameter.numel(), *shards[parameter]


def _numels(run: PlannedRun) -> list[int]:
    return [numel for numel, *_ in _trained(run)]


def _sizes_by_rank(run: PlannedRun) -> list[list[int]]:
    """Return the elements that each rank of the data axis has of the trained tensors.

    Shards are cut as FSDP2 cuts them, the last ones shorter; tensors that all ranks have, as at
    stage 0, into a slice for each.
    """
    num_ranks = run.num_ranks
    result: list[list[int]] = [[] for _ in range(num_ranks)]
    for numel, each, parts in _trained(run):
        if run.stage == 0:
            each, parts = -(-numel // num_ranks), num_ranks
        for rank, sizes in enumerate(result):
            first = rank * parts // num_ranks * each
            sizes.append(max(0, min(each, numel - first)))
    return result


@dataclass(frozen=True, kw_only=True)
class _Place:
    """This node among all of them, where none exchange."""

    node: int
    size: int
