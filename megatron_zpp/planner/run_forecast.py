"""A run that has not started: what its ranks need, what its nodes send, how long its steps take.

Memory is that of a simulated step (`step_simulation.py`), with activations that are traced on the
meta device (`activations.py`), with balanced routing.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from megatron_zpp.planner.activations import traced
from megatron_zpp.planner.parts.meta_model import MetaModel
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.planner.parts.planned_run import Places, PlannedRun, Sent, plan_places
from megatron_zpp.planner.replicas import (
    AGREED,
    EXCHANGE,
    OUTER_STATE,
    PlannedExchange,
    PlannedReplicas,
)
from megatron_zpp.planner.state_memory import (
    GRADIENTS,
    MOMENTS,
    SAVED_COPY,
    WEIGHTS,
    host_bytes,
    saved_bytes,
)
from megatron_zpp.planner.step_simulation import (
    ACTIVATIONS,
    COPIES,
    GATHERED,
    HEAD,
    IN_FLIGHT,
    StepSimulation,
)
from megatron_zpp.planner.step_work import RankWork
from megatron_zpp.planner.timing.hardware import (
    FAST,
    SLOW,
    TYPICAL,
    Cluster,
    Rates,
    hardware_table,
)
from megatron_zpp.planner.timing.pipeline import PassSeconds, pipeline_seconds
from megatron_zpp.planner.timing.timeline import Streams, step_seconds
from megatron_zpp.recipe.capability import capabilities_of
from megatron_zpp.settings.config import Config
from zeropp.wire import Nodes

KINDS = (
    WEIGHTS, MOMENTS, AGREED, OUTER_STATE, GRADIENTS, GATHERED, COPIES, IN_FLIGHT, ACTIVATIONS,
    HEAD, EXCHANGE, SAVED_COPY,
)  # fmt: skip
Bytes = Mapping[str, int]  # of a rank, by kind


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step: the range, and what the typical one consists of.

    The range is that of published runs around their predictions, at the slowest and the fastest
    that links between nodes may be. computing: passes and update of the busiest rank. bubble: what
    it waits for other stages of a pipeline, were the links infinitely fast. across_nodes, in_node:
    what would be saved if these links were infinitely fast, the far ones first. kernels: what
    quantizing and dequantizing take. optimizer: of these, what its products and messages take.
    """

    typical: float
    fastest: float
    slowest: float
    computing: float
    bubble: float
    across_nodes: float
    in_node: float
    kernels: float
    optimizer: float = 0.0


class RunForecast:
    """What a run that has not started needs, sends and takes, computed when it is asked for.

    places: the run of a rank at the places of its pipeline that differ, and how many are like each.
    replicas: of which these ranks are one, if they do not take each step together.
    """

    def __init__(self, places: Places, replicas: PlannedReplicas | None = None) -> None:
        self.places, self.replicas = places, replicas
        self._ranks = [(RankWork(run), count) for run, count in places]

    @classmethod
    def of(
        cls,
        config: Config,
        vocab_size: int,
        nodes: Nodes,
        *,
        is_cpu: bool,
        model: MetaModel | None = None,
        like: "RunForecast | None" = None,
    ) -> "RunForecast":
        """Return the forecast of a run of `config` on all ranks of `nodes`, on CPUs or on GPUs.

        `model` is that of another run. `like` is one that differs in its micro-batch or
        recomputation alone. Raises InputError for ranks that the nodes cannot hold alike, or that
        are not several replicas, and for an hpZ partition that does not divide them.
        """
        replicas = PlannedReplicas.of(config.zero, config.parallel, nodes)
        if replicas is not None:
            samples = config.batch.global_batch_size // replicas.num_replicas
            batch, nodes = replace(config.batch, global_batch_size=samples), replicas.nodes
            config = replace(config, batch=batch)
        if like is not None:
            places = [
                (replace(run, ranks=replace(run.ranks, config=config)), count)
                for run, count in like.places
            ]
            return cls(places, replicas)
        if model is None:
            model = MetaModel(config.model, vocab_size, capabilities_of(config))
        ranks = PlannedRanks(config=config, nodes=nodes)
        return cls(plan_places(model, ranks, is_cpu=is_cpu), replicas)

    @property
    def first(self) -> PlannedRun:
        """The run of a first rank."""
        return self.places[0][0]

    @cached_property
    def sent(self) -> Sent:
        """The bytes that a node sends in a step, the mean over nodes."""
        total: Counter[tuple[str, str]] = Counter()
        for run, count in self.places:
            outer = {} if self.replicas is None else self.replicas.sent_by_node(run)
            for key, sent in (run.sent_by_node() | outer).items():
                total[key] += count * sent
        num_places = sum(count for _, count in self.places)
        return {key: sent / num_places for key, sent in total.items()}

    @property
    def optimizer_flops(self) -> float | None:
        """The operations of the busiest rank beside element-wise updates, the mean of the steps."""
        optimizers = (run.optimizer for run, _ in self.places)
        return max((each.flops for each in optimizers if each is not None), default=None)

    @property
    def fullest(self) -> PlannedRun:
        """The run of the rank that needs most memory."""
        return self._peak[0]

    @property
    def device(self) -> Bytes:
        """What the fullest rank needs on its device at the peak; nothing on a CPU."""
        return self._peak[1]

    @property
    def host(self) -> Bytes:
        """What the fullest rank needs on the host at the peak."""
        return self._peak[2]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @cached_property
    def _peak(self) -> tuple[PlannedRun, Bytes, Bytes]:
        """The fullest rank, and what it needs.

        Of ranks between the ends of a pipeline with the same kinds of layers, the first holds the
        most micro-batches.
        """
        kinds = self.first.model.layer_kinds(self.first.config.recompute.recompute_num_layers)
        chosen: dict[object, PlannedRun] = {}
        for run, _ in self.places:
            layers = tuple(kinds[layer] for stage in run.stages for layer in stage.layers)
            chosen.setdefault((layers, run.stages[-1].is_last), run)
        run, device, host = max(
            ((run, *rank_memory(run)) for run in chosen.values()),
            key=lambda each: sum(each[1].values()) + sum(each[2].values()),
        )
        if self.replicas is not None:
            device, host = self.replicas.with_state(run, device, host)
        return run, device, host

    @cached_property
    def _exchange(self) -> PlannedExchange | None:
        return self.replicas and PlannedExchange.of(self.replicas, self.places)

    def typical(self, cluster: Cluster) -> float:
        """Return the typical seconds of a step on GPUs of a cluster."""
        return self.seconds(cluster.at(TYPICAL, self.first.compute_dtype))

    def time(self, cluster: Cluster) -> StepTime:
        """Return how long a step takes on GPUs of a cluster."""
        rates = cluster.at(TYPICAL, self.first.compute_dtype)
        residuals = hardware_table()["residuals"]
        slowest, fastest = (
            residuals[level] * self.seconds(replace(rates, far=cluster.far_rate(level)))
            for level in (SLOW, FAST)
        )
        typical = self.seconds(rates)
        near_only = self.seconds(_without_links(rates, near=False))
        no_links = _without_links(rates, near=True)
        kernels_only = self.seconds(no_links)
        passes = self.seconds(no_links, quantizing=False)
        computing = self.busy_seconds(no_links, quantizing=False)
        return StepTime(
            typical=typical,
            fastest=fastest,
            slowest=slowest,
            computing=computing,
            bubble=passes - computing,
            across_nodes=typical - near_only,
            in_node=near_only - kernels_only,
            kernels=kernels_only - passes,
            optimizer=max(rank.optimizer_seconds(rates) for rank, _ in self._ranks),
        )

    def seconds(self, rates: Rates, *, quantizing: bool = True) -> float:
        """Return the seconds of a step, the mean of the steps.

        Without `quantizing`, the kernels that quantize take no time.
        """
        step = self._seconds_of_replica(rates, quantizing=quantizing)
        if self._exchange is None:
            return step
        return step + self._exchange.seconds(step, rates, quantizing=quantizing)

    def _seconds_of_replica(self, rates: Rates, *, quantizing: bool) -> float:
        """Return the seconds of a step without what replicas exchange."""
        num_micro_batches = self.first.num_micro_batches
        if len(self._ranks) == 1:
            (rank, _), *_ = self._ranks
            (works,) = rank.works(rates, quantizing=quantizing)
            streams = partial(Streams, *works, rates.sending_share)
            return step_seconds(streams, num_micro_batches) + rank.after_passes(rates)
        by_place: list[list[PassSeconds]] = []
        for rank, count in self._ranks:
            by_place += count * [rank.pass_seconds(rates, quantizing=quantizing)]
        stages = [stage for chunk in zip(*by_place, strict=True) for stage in chunk]
        passes = pipeline_seconds(stages, len(by_place), num_micro_batches)
        return passes + max(rank.after_passes(rates) for rank, _ in self._ranks)

    def busy_seconds(self, rates: Rates, *, quantizing: bool = True) -> float:
        """Return `seconds` of the busiest rank without what it waits for stages of a pipeline."""
        if len(self._ranks) == 1:
            return self.seconds(rates, quantizing=quantizing)
        count = self.first.num_micro_batches
        return max(
            sum(stage.busy(count) for stage in rank.pass_seconds(rates, quantizing=quantizing))
            + rank.after_passes(rates)
            for rank, _ in self._ranks
        )


def rank_memory(run: PlannedRun) -> tuple[Bytes, Bytes]:
    """Return what a rank needs at the peak of a step on its device and on the host, by kind.

    On a CPU everything is on the host.
    """
    simulation = StepSimulation(run, [traced(run, stage) for stage in run.stages])
    simulation.run_step()
    device, host = simulation.peak, host_bytes(run)
    for each in run.capabilities:
        device.update(each.memory())
    if run.config.checkpoint.async_save and run.config.checkpoint.save:
        host[SAVED_COPY] += saved_bytes(run)
    return ({}, device + host) if run.is_cpu else (device, host)


def _without_links(rates: Rates, *, near: bool) -> Rates:
    """Return the rates with far links, and near ones if asked for, that take no time."""
    protocols = tuple(
        replace(each, start=0.0, far=0.0, near=0.0) if near else replace(each, far=0.0)
        for each in rates.protocols
    )
    return replace(rates, far=math.inf, near=math.inf if near else rates.near, protocols=protocols)
