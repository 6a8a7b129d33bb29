"""The work of a step's units on given hardware, and how long the step takes."""

from functools import cached_property
from itertools import accumulate, pairwise

from megatron_zpp.planner.planned_run import PlannedRun, Unit
from megatron_zpp.planner.timing.computing import (
    Passes,
    head_passes,
    layer_passes,
    update_seconds,
)
from megatron_zpp.planner.timing.hardware import Rates, hardware_table
from megatron_zpp.planner.timing.messages import Messages, UnitMessages, unit_messages
from megatron_zpp.planner.timing.timeline import Collective, Streams, UnitWork, step_seconds
from zeropp.wire.route import UNQUANTIZED, Route


class StepWork:
    """What the units of a planned run compute and send in a step."""

    def __init__(self, run: PlannedRun, vocab_size: int) -> None:
        self.run, self.vocab_size = run, vocab_size

    def seconds(self, kind: type[Streams], rates: Rates, *, quantizing: bool = True) -> float:
        """Return the seconds of a step in the order of `kind`.

        Without `quantizing`, the kernels that quantize take no time.
        """
        *blocks, root = self.unit_works(rates, quantizing=quantizing)
        passes = step_seconds(kind, blocks, root, self.run.num_micro_batches)
        return passes + self.update_seconds(rates)

    def computing_seconds(self, rates: Rates) -> float:
        """Return the seconds of a step's passes and update alone, without collectives."""
        passes = sum(each.forward + each.backward for each in self._passes(rates))
        return self.run.num_micro_batches * passes + self.update_seconds(rates)

    def update_seconds(self, rates: Rates) -> float:
        """Return the seconds of the update of this rank's weights."""
        return update_seconds(sum(unit.trained for unit in self.run.units), rates)

    def unit_works(self, rates: Rates, *, quantizing: bool = True) -> list[UnitWork]:
        """Return the blocks' work in order, then the root's."""
        works: dict[tuple[int, Passes], UnitWork] = {}
        result = []
        for unit, messages, passes in zip(
            self.run.units, self._messages, self._passes(rates), strict=True
        ):
            key = id(messages), passes
            if key not in works:
                works[key] = self._unit_work(unit, messages, passes, rates, quantizing=quantizing)
            result.append(works[key])
        return result

    @cached_property
    def _messages(self) -> list[UnitMessages]:
        """The messages of each unit; equal units share an object."""
        edges = [0, *accumulate(self.run.subunits)]
        units = [self.run.forecast.units[first:last] for first, last in pairwise(edges)]
        distinct: dict[tuple, UnitMessages] = {}
        result = []
        for index, unit in enumerate(units):
            key = unit, index == len(units) - 1
            if key not in distinct:
                distinct[key] = unit_messages(self.run.forecast, unit, is_root=key[1])
            result.append(distinct[key])
        return result

    def _passes(self, rates: Rates) -> list[Passes]:
        config, itemsize = self.run.config, self.run.compute_dtype.itemsize
        layers = [
            layer_passes(config, index, itemsize, rates) for index in range(config.model.num_layers)
        ]
        return [*layers, head_passes(config, self.vocab_size, itemsize, rates)]

    def _unit_work(
        self, unit: Unit, messages: UnitMessages, passes: Passes, rates: Rates, *, quantizing: bool
    ) -> UnitWork:
        forecast, kernels = self.run.forecast, hardware_table()["kernels"]
        parameters = self.run.num_shards * unit.trained
        decode, encode = kernels["copy_out"], kernels["reduce_buffers"]
        if quantizing and not forecast.weights.is_flat:
            decode += kernels["dequantize_weights"]
        if quantizing and _quantizes(forecast.gradients):
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
