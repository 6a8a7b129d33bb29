"""The work of a step's units on given hardware, and how long the step takes."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial

from megatron_zpp.model.part import Part
from megatron_zpp.planner.node_traffic import gradient_messages
from megatron_zpp.planner.parts.planned_local_steps import PlannedLocalSteps
from megatron_zpp.planner.parts.planned_run import Places, PlannedRun, Units
from megatron_zpp.planner.parts.planned_unit import Unit
from megatron_zpp.planner.timing.axis_messages import (
    AT_ENDS,
    IN_LAYER,
    PIPELINE,
    load_of,
    seconds_of,
    stage_messages,
)
from megatron_zpp.planner.timing.computing import (
    Passes,
    expert_passes,
    head_passes,
    layer_passes,
    update_seconds,
)
from megatron_zpp.planner.timing.exchange_time import Exchange
from megatron_zpp.planner.timing.hardware import Rates, hardware_table
from megatron_zpp.planner.timing.links import Load
from megatron_zpp.planner.timing.messages import Messages, UnitMessages, unit_messages
from megatron_zpp.planner.timing.optimizer_time import optimizer_seconds
from megatron_zpp.planner.timing.pipeline import PassSeconds, pass_seconds, pipeline_seconds
from megatron_zpp.planner.timing.timeline import Collective, Streams, UnitWork, step_seconds
from zeropp.wire.route import UNQUANTIZED, Route

Works = tuple[list[UnitWork], UnitWork]  # of a stage: its blocks and their experts, and its root


class StepWork:
    """What the ranks of a planned run compute and send in a step.

    places: the run at the places of its pipeline that differ, and how many are like each.
    local_steps: those of nodes that step alone.
    """

    def __init__(
        self, places: Places, vocab_size: int, local_steps: PlannedLocalSteps | None = None
    ) -> None:
        self.places, self.local_steps = places, local_steps
        self._ranks = [(RankWork(run, vocab_size), count) for run, count in places]

    @cached_property
    def _exchange(self) -> Exchange | None:
        return self.local_steps and Exchange.of(self.local_steps, self.places)

    @property
    def run(self) -> PlannedRun:
        """The run of a first rank."""
        return self._ranks[0][0].run

    def seconds(self, kind: type[Streams], rates: Rates, *, quantizing: bool = True) -> float:
        """Return the seconds of a step in the order of `kind`, the mean of the steps.

        Without `quantizing`, the kernels that quantize take no time.
        """
        step = self._seconds_of_node(kind, rates, quantizing=quantizing)
        if self._exchange is None:
            return step
        return step + self._exchange.seconds(step, rates, quantizing=quantizing)

    def _seconds_of_node(self, kind: type[Streams], rates: Rates, *, quantizing: bool) -> float:
        """Return the seconds of a step without what nodes exchange that step alone."""
        num_micro_batches = self.run.num_micro_batches
        if len(self._ranks) == 1:
            (rank, _), *_ = self._ranks
            ((blocks, root),) = rank.works(rates, quantizing=quantizing)
            streams = partial(kind, sending_share=rates.sending_share)
            passes = step_seconds(streams, blocks, root, num_micro_batches)
            return passes + rank.after_passes(rates)
        by_place: list[list[PassSeconds]] = []
        for rank, count in self._ranks:
            by_place += count * [rank.pass_seconds(kind, rates, quantizing=quantizing)]
        stages = [stage for chunk in zip(*by_place, strict=True) for stage in chunk]
        passes = pipeline_seconds(stages, len(by_place), num_micro_batches)
        return passes + max(rank.after_passes(rates) for rank, _ in self._ranks)

    def optimizer_seconds(self, rates: Rates) -> float:
        """Return what the optimizer takes beside Adam's update, on the rank where that is most."""
        return max(optimizer_seconds(rank.run.optimizer, rates) for rank, _ in self._ranks)

    def busy_seconds(self, kind: type[Streams], rates: Rates, *, quantizing: bool = True) -> float:
        """Return `seconds` of the busiest rank without what it waits for stages of a pipeline."""
        if len(self._ranks) == 1:
            return self.seconds(kind, rates, quantizing=quantizing)
        count = self.run.num_micro_batches
        return max(
            sum(
                stage.busy(count) for stage in rank.pass_seconds(kind, rates, quantizing=quantizing)
            )
            + rank.after_passes(rates)
            for rank, _ in self._ranks
        )


class RankWork:
    """What the stages of a rank compute and send in a step."""

    def __init__(self, run: PlannedRun, vocab_size: int) -> None:
        self.run, self.vocab_size = run, vocab_size

    def works(self, rates: Rates, *, quantizing: bool = True) -> list[Works]:
        """Return the work of each stage: its blocks' and experts' in order, and its root's."""
        return [
            self._stage_works(stage, messages, units, rates, quantizing=quantizing)
            for stage, messages, units in zip(
                self.run.stages, self._stage_messages, self.run.units_of_stages, strict=True
            )
        ]

    def pass_seconds(
        self, kind: type[Streams], rates: Rates, *, quantizing: bool = True
    ) -> list[PassSeconds]:
        """Return the seconds of the passes of each stage, with what it sends other stages."""
        works = self.works(rates, quantizing=quantizing)
        return [
            pass_seconds(
                partial(kind, sending_share=rates.sending_share),
                blocks,
                root,
                seconds_of(messages[PIPELINE, True], rates),
                seconds_of(messages[PIPELINE, False], rates),
            )
            for (blocks, root), messages in zip(works, self._stage_messages, strict=True)
        ]

    def after_passes(self, rates: Rates) -> float:
        """Return the seconds of what follows the passes: gradients of other axes, the update."""
        run = self.run
        update = update_seconds(run.trained, rates) + optimizer_seconds(run.optimizer, rates)
        return seconds_of(self._gradient_messages, rates) + update

    def _stage_works(
        self,
        stage: Part,
        messages: Mapping[tuple[str, bool], Sequence[Load]],
        units: Units,
        rates: Rates,
        *,
        quantizing: bool,
    ) -> Works:
        works: dict[tuple[Unit, Passes], UnitWork] = {}
        result = []
        waiting = {
            where: Passes(*(seconds_of(messages[where, each], rates) for each in (True, False)))
            for where in (AT_ENDS, IN_LAYER)
        }
        for layer, unit in units:
            passes = self._passes(stage, layer, unit, rates)
            if not unit.is_experts:
                passes += waiting[AT_ENDS if layer is None else IN_LAYER]
            key = unit, passes
            if key not in works:
                works[key] = self._unit_work(unit, passes, rates, quantizing=quantizing)
            result.append(works[key])
        return result[:-1], result[-1]

    @cached_property
    def _stage_messages(self) -> list[Mapping[tuple[str, bool], Sequence[Load]]]:
        return [stage_messages(self.run, stage) for stage in self.run.stages]

    @cached_property
    def _gradient_messages(self) -> list[Load]:
        """What is sent once per step: gradients that ranks of an axis have parts of."""
        return [load_of(each, self.run.ranks) for each in gradient_messages(self.run)]

    @cached_property
    def _messages(self) -> dict[Unit, UnitMessages]:
        """The messages of each unit."""
        return {unit: unit_messages(self.run.plan, unit.parts) for unit in set(self.run.units)}

    def _passes(self, stage: Part, layer: int | None, unit: Unit, rates: Rates) -> Passes:
        """Return what a unit of a stage computes; the experts of a block may be another one."""
        config, itemsize = self.run.config, self.run.compute_dtype.itemsize
        size = self.run.ranks.expert_ranks
        if layer is None:
            is_last = stage.is_last
            nothing = Passes(0.0, 0.0)
            return head_passes(config, self.vocab_size, itemsize, rates) if is_last else nothing
        place = layer - stage.layers.start
        has_experts = config.model.moe_layers[layer]
        experts = Passes(0.0, 0.0)
        if has_experts and (unit.is_experts or size == 1):
            experts = expert_passes(config, place, size, itemsize, rates)
        if unit.is_experts:
            return experts
        return layer_passes(config, layer, place, itemsize, rates) + experts

    def _unit_work(self, unit: Unit, passes: Passes, rates: Rates, *, quantizing: bool) -> UnitWork:
        messages = self._messages[unit]
        axis, kernels = unit.axis, hardware_table()["kernels"]
        decode, encode = kernels["copy_out"], kernels["reduce_buffers"]
        if quantizing and not axis.weights.is_flat:
            decode += kernels["dequantize_weights"]
        if quantizing and _quantizes(axis.gradients):
            encode += kernels["quantize_gradients"] + kernels["sum_gradients"]

        def collective(hops: Messages, elements: int, kernel_bytes: float) -> Collective:
            seconds = unit.num_shards * elements * kernel_bytes / rates.memory if hops else 0.0
            return Collective(tuple(hop.hop(rates) for hop in hops), seconds)

        return UnitWork(
            forward=passes.forward,
            backward=passes.backward,
            first_gather=collective(messages.first_gather, unit.elements, decode),
            later_gather=collective(messages.later_gather, unit.elements, decode),
            backward_gather=collective(messages.backward_gather, unit.elements, decode),
            reduction=collective(messages.reduction, unit.trained, encode),
            early_reduction=collective(messages.early_reduction, unit.trained, encode),
        )


def _quantizes(route: Route) -> bool:
    return any(bits < UNQUANTIZED for bits in route.bits)
