"""What a rank's step computes and sends, as loads of the links with the bytes of the forecast.

Units are gathered and reduced beside what is computed. Moves of tensor and context parallelism are
waited for where they are made: what a layer computes next needs them. Stages of a pipeline send
beside what they compute.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import lcm

from megatron_zpp.model.part import Part
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.planner.parts.planned_run import PlannedRun, Sent, Units
from megatron_zpp.planner.parts.planned_unit import Unit
from megatron_zpp.planner.timing.computing import (
    NOTHING,
    Computing,
    Passes,
    update_seconds,
)
from megatron_zpp.planner.timing.hardware import Rates, hardware_table
from megatron_zpp.planner.timing.links import Load, collective, exchange, ring
from megatron_zpp.planner.timing.pipeline import PassSeconds, pass_seconds
from megatron_zpp.planner.timing.timeline import Collective, Streams, UnitWork
from zeropp.sharding import Plan, UnitPlan, forecast
from zeropp.wire import REDUCE, UNQUANTIZED, Message, Route

Loads = tuple[Load, ...]  # of a collective's hops, one after the other
FORWARD, BACKWARD, GRADIENTS = "weights_forward", "weights_backward", "gradients"
SEVERAL = 2  # micro-batches: what is sent so often is sent in each
IN_LAYER, AT_ENDS, PIPELINE = "layer", "ends", "pipeline"  # where: the last is a purpose, too
Works = tuple[list[UnitWork], UnitWork]  # of a stage: its blocks with inner units, and its root


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
        itemsize, result = self.run.compute_dtype.itemsize, []
        computing = Computing(config=self.run.config, itemsize=itemsize, rates=rates)
        waiting = {
            where: Passes(*(seconds_of(loads[where, each], rates) for each in (True, False)))
            for where in (AT_ENDS, IN_LAYER)
        }
        for layer, unit in units:
            passes = self._passes(stage, layer, unit, computing)
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

    def _passes(self, stage: Part, layer: int | None, unit: Unit, computing: Computing) -> Passes:
        """Return what a unit of a stage computes."""
        if layer is None:
            return computing.head_passes(self.run.model.vocab_size) if stage.is_last else NOTHING
        place, size = layer - stage.layers.start, self.run.ranks.inner_size
        return computing.unit_passes(layer, place, size, is_inner=unit.is_inner)

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


def unit_loads(plan: Plan, subunits: Sequence[UnitPlan]) -> dict[str, Loads]:
    """Return what a unit that consists of `subunits` of the plan sends, as `UnitWork` names it.

    What does not take place is empty.
    """
    weights, gradients = subunits[0].axis.weights, subunits[0].axis.gradients
    once, each = _sent(plan, subunits)
    first = once + each
    return {
        "first_gather": _gather(weights, first, FORWARD),
        "later_gather": _gather(weights, each, FORWARD),
        "backward_gather": _gather(weights, each, BACKWARD),
        "reduction": _reduction(plan.stage, gradients, first),
        "early_reduction": _reduction(plan.stage, gradients, each),
    }


def _sent(plan: Plan, subunits: Sequence[UnitPlan]) -> tuple[Counter, Counter]:
    """Return what a node sends in one micro-batch of a step, and in each; the mean over nodes."""
    once: Counter[tuple[str, str]] = Counter()
    each: Counter[tuple[str, str]] = Counter()
    nodes, inner = subunits[0].axis.nodes, subunits[0].axis.weights.inner
    per_node = nodes.ranks_per_node
    period = per_node if inner % per_node == 0 else lcm(per_node, inner)
    for unit in subunits:
        for position in range(period):
            for message in forecast.unit_messages(plan, unit, position, SEVERAL, typical=True):
                total = each if message.times == SEVERAL else once
                for hop, num_bytes in message.sent.items():
                    total[message.purpose, hop] += num_bytes and num_bytes / message.times
    for total in (once, each):
        for key in total:
            total[key] *= per_node * nodes.parts / period
    return once, each


def _gather(route: Route, sent: Sent, purpose: str) -> Loads:
    near, far = _by_hop(route, sent, purpose)
    nodes = route.nodes
    if route.outer == 1 or route.inner > nodes.ranks_per_node:
        hops = [ring(nodes.num_ranks, nodes.count, near, far)]
    else:
        hops = [ring(route.outer, route.outer, 0.0, far), ring(route.inner, 1, near, 0.0)]
    return tuple(hop for hop in hops if not hop.is_empty)


def _reduction(stage: int, route: Route, sent: Sent) -> Loads:
    near, far = _by_hop(route, sent, GRADIENTS)
    if stage == 0:
        hops = [collective(REDUCE, route.nodes.num_ranks, route.nodes.count, near, far)]
    else:
        hops = [exchange(near, 0.0), exchange(0.0, far)]
    return tuple(hop for hop in hops if not hop.is_empty)


def _by_hop(route: Route, sent: Sent, purpose: str) -> tuple[float, float]:
    """Return the bytes that a rank sends in its node, and that a node sends to others."""
    ranks = route.nodes.ranks_per_node * route.nodes.parts
    return sent[purpose, "in_node"] / ranks, sent[purpose, "across_nodes"]


def stage_loads(run: PlannedRun, stage: Part) -> dict[tuple[str, bool], list[Load]]:
    """Return what a micro-batch sends in a stage of a rank, by (where, is_forward).

    Those `IN_LAYER` are of each layer, `AT_ENDS` before and after the layers; in a `PIPELINE`
    activations go to the stage after this one, and their gradients to the one before.
    """
    found: dict[tuple[str, bool], list[Load]] = {
        (where, is_forward): []
        for where in (IN_LAYER, AT_ENDS, PIPELINE)
        for is_forward in (True, False)
    }
    for each in run.forecast.messages(stage):
        if each.times:
            where = IN_LAYER if each.in_layers else AT_ENDS
            where = PIPELINE if each.purpose == PIPELINE else where
            parts = len(stage.layers) if where == IN_LAYER else 1
            found[where, each.is_forward].append(load_of(each, run.ranks, parts))
    return found


def load_of(message: Message, ranks: PlannedRanks, parts: int = 1) -> Load:
    """Return how the collectives of a message, spread over equal parts, occupy the links."""
    single, members = replace(message, times=1), message.group.members
    sent = [single.of(member).sent for member in members]
    near = max(each.get("in_node", 0) for each in sent)
    # All ranks of a node that compute the same stage send at once, each in its own group.
    senders = min(ranks.nodes.ranks_per_node, ranks.num_ranks // ranks.pipeline_size)
    far = sum(each.get("across_nodes", 0) for each in sent) / len(members) * senders
    num_nodes = len({rank // ranks.nodes.ranks_per_node for rank in members})
    load = collective(message.kind, len(members), num_nodes, near, far)
    return replace(load, times=message.times / parts)


def seconds_of(loads: Iterable[Load], rates: Rates) -> float:
    """Return how long the links take for loads one after the other."""
    return sum(each.seconds(rates) for each in loads)
