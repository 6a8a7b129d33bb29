"""The work of a step's units on given hardware, and how long the step takes."""

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise

from megatron_zpp.model.part import Part
from megatron_zpp.planner.node_traffic import gradient_moves
from megatron_zpp.planner.planned_run import Places, PlannedRun, Unit
from megatron_zpp.planner.timing.axis_messages import (
    Repeated,
    StageMessages,
    repeated,
    seconds_of,
    stage_messages,
)
from megatron_zpp.planner.timing.computing import (
    Passes,
    head_passes,
    layer_passes,
    update_seconds,
)
from megatron_zpp.planner.timing.hardware import Rates, hardware_table
from megatron_zpp.planner.timing.messages import Messages, UnitMessages, unit_messages
from megatron_zpp.planner.timing.pipeline import PassSeconds, pass_seconds, pipeline_seconds
from megatron_zpp.planner.timing.timeline import Collective, Streams, UnitWork, step_seconds
from zeropp.wire.route import UNQUANTIZED, Route

Works = tuple[list[UnitWork], UnitWork]  # blocks and root of a stage


class StepWork:
    """What the ranks of a planned run compute and send in a step.

    places: the run at the places of its pipeline that differ, and how many are like each.
    """

    def __init__(self, places: Places, vocab_size: int) -> None:
        self._ranks = [(RankWork(run, vocab_size), count) for run, count in places]

    @property
    def run(self) -> PlannedRun:
        """The run of a first rank."""
        return self._ranks[0][0].run

    def seconds(self, kind: type[Streams], rates: Rates, *, quantizing: bool = True) -> float:
        """Return the seconds of a step in the order of `kind`.

        Without `quantizing`, the kernels that quantize take no time.
        """
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
        """Return the work of each stage: its blocks' in order, and its root's."""
        return [
            self._stage_works(stage, messages, units, rates, quantizing=quantizing)
            for stage, messages, units in zip(
                self.run.stages, self._stage_messages, self._units, strict=True
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
                seconds_of(messages.onward, rates),
                seconds_of(messages.back, rates),
            )
            for (blocks, root), messages in zip(works, self._stage_messages, strict=True)
        ]

    def after_passes(self, rates: Rates) -> float:
        """Return the seconds of what follows the passes: gradients of other axes, the update."""
        trained = sum(unit.trained for unit in self.run.units)
        return seconds_of(self._gradient_messages, rates) + update_seconds(trained, rates)

    def _stage_works(
        self,
        stage: Part,
        messages: StageMessages,
        units: Sequence[tuple[Unit, UnitMessages]],
        rates: Rates,
        *,
        quantizing: bool,
    ) -> Works:
        works: dict[tuple[int, Passes], UnitWork] = {}
        result = []
        forward, backward = messages.layer_forward, messages.layer_backward
        in_layer = Passes(seconds_of(forward, rates), seconds_of(backward, rates))
        forward, backward = messages.ends_forward, messages.ends_backward
        at_ends = Passes(seconds_of(forward, rates), seconds_of(backward, rates))
        *layers, head = self._passes(stage, rates)
        passes = [*(each + in_layer for each in layers), head + at_ends]
        for (unit, sent), each in zip(units, passes, strict=True):
            key = id(sent), each
            if key not in works:
                works[key] = self._unit_work(unit, sent, each, rates, quantizing=quantizing)
            result.append(works[key])
        return result[:-1], result[-1]

    @cached_property
    def _stage_messages(self) -> list[StageMessages]:
        return [stage_messages(self.run, stage) for stage in self.run.stages]

    @cached_property
    def _gradient_messages(self) -> tuple[Repeated, ...]:
        """What is sent once per step: gradients that ranks of an axis have parts of."""
        return repeated(gradient_moves(self.run), self.run.ranks)

    @cached_property
    def _units(self) -> list[list[tuple[Unit, UnitMessages]]]:
        """The units of each stage with their messages; those of equal units are one object."""
        edges = [0, *accumulate(self.run.subunits)]
        subunits = [self.run.plan.units[first:last] for first, last in pairwise(edges)]
        distinct: dict[tuple, UnitMessages] = {}
        result, first = [], 0
        for stage in self.run.stages:
            root, units = first + len(stage.layers), []
            for index in range(first, root + 1):
                key = subunits[index]
                if key not in distinct:
                    distinct[key] = unit_messages(self.run.plan, key)
                units.append((self.run.units[index], distinct[key]))
            result.append(units)
            first = root + 1
        return result

    def _passes(self, stage: Part, rates: Rates) -> list[Passes]:
        """Return what the layers of a stage compute, and then what its root does."""
        config, itemsize = self.run.config, self.run.compute_dtype.itemsize
        layers = [
            layer_passes(config, layer, place, itemsize, rates)
            for place, layer in enumerate(stage.layers)
        ]
        head = Passes(0.0, 0.0)
        if stage.is_last:
            head = head_passes(config, self.vocab_size, itemsize, rates)
        return [*layers, head]

    def _unit_work(
        self, unit: Unit, messages: UnitMessages, passes: Passes, rates: Rates, *, quantizing: bool
    ) -> UnitWork:
        axis, kernels = self.run.axis, hardware_table()["kernels"]
        parameters = self.run.num_shards * unit.trained
        decode, encode = kernels["copy_out"], kernels["reduce_buffers"]
        if quantizing and not axis.weights.is_flat:
            decode += kernels["dequantize_weights"]
        if quantizing and _quantizes(axis.gradients):
            encode += kernels["quantize_gradients"] + kernels["sum_gradients"]

        def collective(hops: Messages, kernel_bytes: float) -> Collective:
            seconds = parameters * kernel_bytes / rates.memory if hops else 0.0
            return Collective(tuple(hop.hop(rates) for hop in hops), seconds)

        return UnitWork(
            forward=passes.forward,
            backward=passes.backward,
            first_gather=collective(messages.first_gather, decode),
            later_gather=collective(messages.later_gather, decode),
            backward_gather=collective(messages.backward_gather, decode),
            reduction=collective(messages.reduction, encode),
            early_reduction=collective(messages.early_reduction, encode),
        )


def _quantizes(route: Route) -> bool:
    return any(bits < UNQUANTIZED for bits in route.bits)
