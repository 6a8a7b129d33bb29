"""Compare the configurations of a run on a cluster: which fit into memory, and which is fastest."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from megatron_zpp.model.flops import TokenFlops
from megatron_zpp.planner.candidates import TIE, Candidate, SearchSpace
from megatron_zpp.planner.crossing import Crossing, crossing_of
from megatron_zpp.planner.parts.meta_model import MetaModel
from megatron_zpp.planner.replicas import compared_intervals
from megatron_zpp.planner.run_forecast import RunForecast, StepTime
from megatron_zpp.planner.timing.balanced_stages import LayerSeconds
from megatron_zpp.planner.timing.computing import Computing
from megatron_zpp.planner.timing.hardware import GIB, TYPICAL, Cluster
from megatron_zpp.planner.zero_settings import compared_settings
from megatron_zpp.recipe.capability import capabilities_of, settled
from megatron_zpp.settings.config import Config, ParallelConfig
from zeropp.optim import OPTIMIZER
from zeropp.wire import HOPS, Nodes

BYTES_PER_WEIGHT = 2  # in M, the bytes of the model in 16 bit
# Local SGD loses loss, which more computing makes up for: three times as much lowers the loss by
# 5% (Kaplan et al. 2020, arXiv:2001.08361: C^-0.05), which is more than the published ones lose.
MUCH_FASTER = 3.0
# Of several intervals the shortest is taken that is at most so much slower than the longest.
LONGEST = 1.25
ROOM = GIB // 20  # memory left below which the table shows 0.0 GiB


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A configuration and its run on a cluster."""

    candidate: Candidate
    cluster: Cluster
    forecast: RunForecast

    @property
    def memory(self) -> Mapping[str, int]:
        """The bytes of its fullest rank, by kind."""
        return self.forecast.device

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters."""
        return self.forecast.first.model.num_parameters

    @property
    def usable_bytes(self) -> int:
        """What is there for a rank."""
        return self.cluster.usable_bytes

    @property
    def sent_in_m(self) -> dict[str, float]:
        """What a node sends in a step, by hop, in M."""
        return {hop: self._in_m(key for key in self.forecast.sent if key[1] == hop) for hop in HOPS}

    @property
    def optimizer_in_m(self) -> dict[str, float]:
        """What of that is the optimizer's."""
        return {hop: self._in_m([(OPTIMIZER, hop)]) for hop in HOPS}

    def _in_m(self, keys: Iterable[tuple[str, str]]) -> float:
        num_bytes = sum(self.forecast.sent.get(key, 0.0) for key in keys)
        return num_bytes / (self.num_parameters * BYTES_PER_WEIGHT)

    @cached_property
    def seconds(self) -> float:
        """The typical seconds of a step, whether it fits or not."""
        return self.forecast.typical(self.cluster)

    @cached_property
    def time(self) -> StepTime | None:
        """All times of a step, if it fits."""
        return self.forecast.time(self.cluster) if self.fits else None

    @property
    def tokens_per_second(self) -> float:
        """The tokens of a step in its typical seconds."""
        config = self.candidate.config
        return config.schedules.batch_size.final * config.model.seq_length / self.seconds

    @property
    def mfu(self) -> float:
        """The share of the peak rate that the model's operations reach."""
        return self._share_of_peak("model")

    @property
    def hfu(self) -> float:
        """The same with those that are recomputed."""
        return self._share_of_peak("performed")

    def _share_of_peak(self, kind: str) -> float:
        config = self.candidate.config
        flops = TokenFlops.of(config.model, config.recompute, self.forecast.first.model.vocab_size)
        peak = self.cluster.gpu.peak(self.forecast.first.compute_dtype)
        return self.tokens_per_second / self.cluster.num_ranks / peak * getattr(flops, kind)

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.usable_bytes

    @property
    def has_room(self) -> bool:
        """Whether it leaves memory, so that a small error of the estimate does not matter."""
        return self.usable_bytes - self.memory_bytes >= ROOM

    @property
    def largest_kind(self) -> str:
        """The kind of memory of which there is most."""
        return max(self.memory, key=self.memory.__getitem__)


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """All configurations that were looked at, those that fit first, and fastest first.

    row_of_flags: the configuration of the flags. places: ranks of the rows that fit; equal ones are
    ties, the fastest first. crossing: what crosses nodes where there is a choice, with the
    settings of the best row that has the choice, or of the flags if none fits. alone: those of
    replicas, by their intervals; only the smallest if none fits in a node.
    """

    cluster: Cluster
    space: SearchSpace
    rows: tuple[Row, ...]
    places: tuple[int, ...]
    row_of_flags: Row
    crossing: Crossing | None = None
    alone: tuple[Row, ...] = ()

    @property
    def config(self) -> Config:
        """What the flags ask for."""
        return self.space.base

    @property
    def fitting(self) -> tuple[Row, ...]:
        return self.rows[: len(self.places)]

    @property
    def best(self) -> Row:
        """Of the rows in the first place the most exact, and of these the one of smallest sizes.

        There must be one that fits.
        """
        return _best(self.fitting, self.places)

    @property
    def advised(self) -> Row:
        """What to use: the best row, or replicas that are `MUCH_FASTER`."""
        best = self.best
        times = [row.seconds for row in self.alone if row.fits]
        if not times or best.seconds <= MUCH_FASTER * min(times):
            return best
        limit = min(LONGEST * min(times), best.seconds / MUCH_FASTER)
        return next(row for row in self.alone if row.seconds <= limit)


class Search:
    """Evaluates configurations of one model on one cluster."""

    def __init__(self, base: Config, vocab_size: int, cluster: Cluster) -> None:
        self.vocab_size, self.cluster = vocab_size, cluster
        nodes = Nodes.of(range(cluster.num_ranks), cluster.gpus_per_node)
        capabilities = capabilities_of(base)
        base = replace(base, parallel=settled(base.parallel, capabilities, nodes))
        self.space = SearchSpace(base=base, nodes=nodes)
        self.model = MetaModel(base.model, vocab_size, capabilities)

    @cached_property
    def _layer_seconds(self) -> LayerSeconds:
        """The seconds of layers with the sizes of the flags."""
        base = self.space.base
        dtype = getattr(torch, base.zero.compute_format)
        rates = self.cluster.at(TYPICAL, dtype)
        computing = Computing(config=base, itemsize=dtype.itemsize, rates=rates)
        return computing.layer_seconds(self.vocab_size)

    def run(
        self, *, only_flags: bool = False, on_row: Callable[[int], None] | None = None
    ) -> ClusterPlan:
        """Return the plan; `only_flags` looks at the configuration of the flags alone.

        `on_row` is called with the number of configurations compared so far.
        """
        row_of_flags = self.row(self.space.given)
        rows, alone = [row_of_flags] if only_flags else [], []
        for row in () if only_flags else self._rows():
            rows.append(row)
            if on_row is not None:
                on_row(len(rows))
        if not only_flags:
            alone = self._alone()
            others = rows if row_of_flags.candidate.interval == 1 else alone
            if row_of_flags.fits and not any(_is_same(row_of_flags, row) for row in others):
                others.append(row_of_flags)
        fitting, places = rank_rows([row for row in rows if row.fits])
        too_large = sorted((row for row in rows if not row.fits), key=lambda row: row.memory_bytes)
        plan = ClusterPlan(
            cluster=self.cluster,
            space=self.space,
            rows=(*fitting, *too_large),
            places=tuple(places),
            row_of_flags=row_of_flags,
            alone=tuple(sorted(alone, key=lambda row: row.candidate.interval)),
        )
        best_first = (plan.best, *plan.fitting) if plan.fitting else (row_of_flags,)
        return replace(plan, crossing=self._crossing(best_first))

    def _crossing(self, rows: Iterable[Row]) -> Crossing | None:
        """Return what crosses nodes, of the first row with a choice."""
        crossings = (
            crossing_of(row.candidate, self.space.nodes, self.model)
            for row in rows
            if row.candidate.interval == 1
        )
        return next((each for each in crossings if each is not None), None)

    def _rows(self) -> Iterator[Row]:
        """Yield all rows of steps that all ranks take together."""
        for parallel, nodes in self.space.all_parallel(self._layer_seconds):
            yield from self._rows_with(parallel, nodes, self.cluster.num_ranks)

    def _alone(self) -> list[Row]:
        """Return the best row of replicas, with each interval that is compared.

        What a node does between exchanges does not depend on the interval, so that its layout is
        found once. If nothing fits in a node, the smallest row is returned.
        """
        delay = self.space.base.zero.zeropp.sync_delay
        intervals = [each for each in compared_intervals() if each > delay]
        if self.cluster.num_nodes == 1 or not intervals:
            return []
        rows = list(self._rows_alone(intervals[len(intervals) // 2]))
        fitting, places = rank_rows([row for row in rows if row.fits])
        if not fitting:
            return sorted(rows, key=lambda row: row.memory_bytes)[:1]
        best = _best(fitting, places).candidate
        return [self.row(best.every(interval)) for interval in intervals]

    def _rows_alone(self, interval: int) -> Iterator[Row]:
        """Yield rows of replicas, which divide the model if it does not fit whole."""
        size, num_nodes = self.cluster.gpus_per_node, self.cluster.num_nodes
        base = self.space.base
        samples, rest = divmod(base.schedules.batch_size.final, num_nodes)
        if rest:
            return
        share = replace(base, batch=replace(base.batch, global_batch_size=samples))
        fits, alone = False, SearchSpace(base=share, nodes=Nodes.of(range(size), size))
        for parallel, nodes in alone.all_parallel(self._layer_seconds):
            if fits and parallel.data_parallel_size(size) < size:
                return
            for row in self._rows_with(parallel, nodes, size, interval):
                fits = fits or row.fits
                yield row

    def _rows_with(
        self, parallel: ParallelConfig, nodes: Nodes, num_ranks: int, interval: int = 1
    ) -> Iterator[Row]:
        """Yield rows of `num_ranks` that train a model, but none of micro-batches beyond memory.

        nodes: of the data axis. Those with an `interval` are one node of all, each of which is
        a replica; in these nothing is quantized, as their links are fast.
        """
        num_replicas = parallel.data_parallel_size(num_ranks)
        is_divided = num_replicas < num_ranks
        has_adapters = self.space.base.lora.lora_rank > 0
        for each in compared_settings(nodes, is_divided=is_divided, has_adapters=has_adapters):
            if interval > 1 and each.inexactness:
                continue
            settings = each if interval == 1 else each.every(interval)
            all_replicas = num_replicas * self.cluster.num_ranks // num_ranks
            candidates = self.space.candidates(settings, all_replicas, parallel)
            yield from self._rows_of(candidates, skips_recomputed=is_divided)

    def _rows_of(self, candidates: Iterable[Candidate], *, skips_recomputed: bool) -> Iterator[Row]:
        """Yield rows until micro-batches are too large for each kind of recomputation.

        With `skips_recomputed`, none that recompute more than the first that fits: they are slower.
        If the smallest micro-batch does not fit with all blocks recomputed, only that is yielded:
        others need more.
        """
        candidates = list(candidates)
        least = next((each for each in candidates if each.recomputed == "all"), None)
        if least is None:
            return
        least_row = self.row(least)
        if not least_row.fits and _keeps_least(least):
            yield least_row
            return
        too_large: set[str] = set()
        fitting: set[int] = set()  # micro-batches
        for candidate in candidates:
            is_slower = skips_recomputed and candidate.micro_batch in fitting
            if candidate.recomputed in too_large or is_slower:
                continue
            row = least_row if candidate is least else self.row(candidate, least_row)
            if row.fits:
                fitting.add(candidate.micro_batch)
            else:
                too_large.add(candidate.recomputed)
            yield row

    def row(self, candidate: Candidate, like: Row | None = None) -> Row:
        """Return the row of a configuration.

        `like` is one that differs in its micro-batch or recomputation alone. Raises InputError for
        replicas that are not several.
        """
        forecast = RunForecast.of(
            candidate.config,
            self.vocab_size,
            self.space.nodes,
            is_cpu=False,
            model=self.model,
            like=like and like.forecast,
        )
        return Row(candidate=candidate, cluster=self.cluster, forecast=forecast)


def rank_rows(rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
    """Return rows by step time, and their places.

    What is as fast as the fastest but for `TIE` shares its place, except rows that leave no memory:
    they share the next.
    """
    remaining = sorted(rows, key=lambda row: row.seconds)
    ordered: list[Row] = []
    places: list[int] = []
    while remaining:
        limit = remaining[0].seconds * (1 + TIE)
        tied = [row for row in remaining if row.seconds <= limit]
        remaining = remaining[len(tied) :]
        for has_room in (True, False):
            group = [row for row in tied if row.has_room == has_room]
            places += [len(ordered) + 1] * len(group)
            ordered += group
    return ordered, places


def _best(rows: Sequence[Row], places: Sequence[int]) -> Row:
    first = (row for row, place in zip(rows, places, strict=True) if place == 1)
    return min(first, key=_simplest_first)


def _simplest_first(row: Row) -> tuple[int, int, float]:
    candidate = row.candidate
    return candidate.settings.inexactness, prod(candidate.sizes), row.seconds


def _keeps_least(candidate: Candidate) -> bool:
    """Whether recomputing all blocks needs least: of a single one it keeps the input besides."""
    config = candidate.config
    return min(map(len, config.parallel.stages(config.model.num_layers))) > 1


def _is_same(row: Row, other: Row) -> bool:
    """Whether two rows are of the same run, whatever their settings are called."""
    first, second = row.candidate.config, other.candidate.config
    return (
        first.zero.zero_optimization == second.zero.zero_optimization
        and first.zero.zeropp == second.zero.zeropp
        and first.batch.micro_batch_size == second.batch.micro_batch_size
        and first.recompute == second.recompute
        and first.parallel == second.parallel
    )
