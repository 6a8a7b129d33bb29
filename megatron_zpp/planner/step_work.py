"""How long a step takes, as a range, and what its seconds are spent on: the work of its units."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from megatron_zpp.model.part import Part
from megatron_zpp.planner.loads import (
    AT_ENDS,
    IN_LAYER,
    PIPELINE,
    Loads,
    load_of,
    seconds_of,
    stage_loads,
    unit_loads,
)
from megatron_zpp.planner.parts.planned_run import Places, PlannedRun, Units
from megatron_zpp.planner.parts.planned_unit import Unit
from megatron_zpp.planner.replicas import PlannedExchange, PlannedReplicas
from megatron_zpp.planner.timing.computing import (
    NOTHING,
    Passes,
    head_passes,
    unit_passes,
    update_seconds,
)
from megatron_zpp.planner.timing.hardware import (
    FAST,
    SLOW,
    TYPICAL,
    Cluster,
    Rates,
    hardware_table,
)
from megatron_zpp.planner.timing.links import Load
from megatron_zpp.planner.timing.pipeline import PassSeconds, pass_seconds, pipeline_seconds
from megatron_zpp.planner.timing.timeline import Collective, Streams, UnitWork, step_seconds
from zeropp.wire import UNQUANTIZED

Works = tuple[list[UnitWork], UnitWork]  # of a stage: its blocks with inner units, and its root


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


class StepWork:
    """What the ranks of a planned run compute and send in a step.

    places: the run at the places of its pipeline that differ, and how many are like each.
    replicas: of which the run is one, if they do not take each step together.
    """

    def __init__(self, places: Places, replicas: PlannedReplicas | None = None) -> None:
        self.places, self.replicas = places, replicas
        self._ranks = [(RankWork(run), count) for run, count in places]

    @cached_property
    def _exchange(self) -> PlannedExchange | None:
        return self.replicas and PlannedExchange.of(self.replicas, self.places)

    @property
    def run(self) -> PlannedRun:
        """The run of a first rank."""
        return self._ranks[0][0].run

    def typical(self, cluster: Cluster) -> float:
        """Return the typical seconds of a step on GPUs of a cluster."""
        return self.seconds(cluster.at(TYPICAL, self.run.compute_dtype))

    def time(self, cluster: Cluster) -> StepTime:
        """Return how long a step takes on GPUs of a cluster."""
        rates = cluster.at(TYPICAL, self.run.compute_dtype)
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
        num_micro_batches = self.run.num_micro_batches
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
        count = self.run.num_micro_batches
        return max(
            sum(stage.busy(count) for stage in rank.pass_seconds(rates, quantizing=quantizing))
            + rank.after_passes(rates)
            for rank, _ in self._ranks
        )


class RankWork:
    """What the stages of a rank compute and send in a step."""

    def __init__(self, run: PlannedRun) -> None:
        self.run = run

    def works(self, rates: Rates, *, quantizing: bool = True) -> list[Works]:
        """Return the work of each stage: its blocks' in order, with inner units, and its root's."""
        run = self.run
        return [
            self._stage_works(*each, rates, quantizing=quantizing)
            for each in zip(run.stages, self._stage_loads, run.units_of_stages, strict=True)
        ]

    def pass_seconds(self, rates: Rates, *, quantizing: bool = True) -> list[PassSeconds]:
        """Return the seconds of the passes of each stage, with what it sends other stages."""
        works = self.works(rates, quantizing=quantizing)
        return [
            pass_seconds(
                Streams(*of_stage, rates.sending_share),
                *(seconds_of(loads[PIPELINE, each], rates) for each in (True, False)),
            )
            for of_stage, loads in zip(works, self._stage_loads, strict=True)
        ]

    def after_passes(self, rates: Rates) -> float:
        """Return the seconds of what follows the passes: messages, the update."""
        update = update_seconds(self.run.trained, rates) + self.optimizer_seconds(rates)
        return seconds_of(self._step_loads, rates) + update

    def optimizer_seconds(self, rates: Rates) -> float:
        """Return what the optimizer takes beside Adam's update."""
        return 0.0 if self.run.optimizer is None else self.run.optimizer.seconds(rates)

    def _stage_works(
        self,
        stage: Part,
        loads: Mapping[tuple[str, bool], Sequence[Load]],
        units: Units,
        rates: Rates,
        *,
        quantizing: bool,
    ) -> Works:
        works: dict[tuple[Unit, Passes], UnitWork] = {}
        result = []
        waiting = {
            where: Passes(*(seconds_of(loads[where, each], rates) for each in (True, False)))
            for where in (AT_ENDS, IN_LAYER)
        }
        for layer, unit in units:
            passes = self._passes(stage, layer, unit, rates)
            if not unit.is_inner:
                passes += waiting[AT_ENDS if layer is None else IN_LAYER]
            key = unit, passes
            if key not in works:
                works[key] = self._unit_work(unit, passes, rates, quantizing=quantizing)
            result.append(works[key])
        return result[:-1], result[-1]

    @cached_property
    def _stage_loads(self) -> list[Mapping[tuple[str, bool], Sequence[Load]]]:
        return [stage_loads(self.run, stage) for stage in self.run.stages]

    @cached_property
    def _step_loads(self) -> list[Load]:
        """What is sent once per step, beside what units send."""
        return [load_of(each, self.run.ranks) for each in self.run.step_messages()]

    @cached_property
    def _unit_loads(self) -> dict[Unit, dict[str, Loads]]:
        return {unit: unit_loads(self.run.plan, unit.parts) for unit in set(self.run.units)}

    def _passes(self, stage: Part, layer: int | None, unit: Unit, rates: Rates) -> Passes:
        """Return what a unit of a stage computes."""
        config, itemsize = self.run.config, self.run.compute_dtype.itemsize
        if layer is None:
            vocab_size = self.run.model.vocab_size
            return head_passes(config, vocab_size, itemsize, rates) if stage.is_last else NOTHING
        place, size = layer - stage.layers.start, self.run.ranks.inner_size
        return unit_passes(config, layer, place, itemsize, rates, size=size, is_inner=unit.is_inner)

    def _unit_work(self, unit: Unit, passes: Passes, rates: Rates, *, quantizing: bool) -> UnitWork:
        axis, kernels = unit.axis, hardware_table()["kernels"]
        decode, encode = kernels["copy_out"], kernels["reduce_buffers"]
        if quantizing and not axis.weights.is_flat:
            decode += kernels["dequantize_weights"]
        if quantizing and any(bits < UNQUANTIZED for bits in axis.gradients.bits):
            encode += kernels["quantize_gradients"] + kernels["sum_gradients"]

        def collective(name: str, loads: Loads) -> Collective:
            is_mean = name.endswith("reduction")
            elements, kernel_bytes = (unit.trained, encode) if is_mean else (unit.elements, decode)
            seconds = unit.num_shards * elements * kernel_bytes / rates.memory if loads else 0.0
            return Collective(tuple(each.hop(rates) for each in loads), seconds)

        named = {name: collective(name, each) for name, each in self._unit_loads[unit].items()}
        return UnitWork(forward=passes.forward, backward=passes.backward, **named)


def _without_links(rates: Rates, *, near: bool) -> Rates:
    """Return the rates with far links, and near ones if asked for, that take no time."""
    protocols = tuple(
        replace(each, start=0.0, far=0.0, near=0.0) if near else replace(each, far=0.0)
        for each in rates.protocols
    )
    return replace(rates, far=math.inf, near=math.inf if near else rates.near, protocols=protocols)
