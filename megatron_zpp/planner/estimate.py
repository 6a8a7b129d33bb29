"""Estimate the peak memory of a rank during a step, by kind, without running it.

The step is simulated event by event, in a pipeline in the order of its schedule: what FSDP2 and the
collectives allocate and free for each unit is added up by formula (docs/memory.md), and the
activations of a micro-batch are traced on fake tensors.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

from torch import nn

from megatron_zpp.model.loss import CPU_CHUNK, DEVICE_CHUNK
from megatron_zpp.model.part import Part
from megatron_zpp.parallel.pipeline_schedule import Pass, passes
from megatron_zpp.planner.activations import Activations, ActivationTraces, MicroBatch
from megatron_zpp.planner.node_traffic import mean_of_nodes
from megatron_zpp.planner.planned_run import (
    FP32_BYTES,
    Places,
    PlannedRun,
    Unit,
    plan_places,
)
from megatron_zpp.planner.state_memory import (
    GRADIENTS,
    MOMENTS,
    WEIGHTS,
    initial_bytes,
    offloaded_bytes,
    saved_bytes,
)
from megatron_zpp.settings.config import Config
from zeropp.fsdp_adapter import AHEAD
from zeropp.sharding.plan import Plan
from zeropp.wire.route import Nodes

GATHERED, COPIES = "gathered weights", "secondary copies (hpZ)"
IN_FLIGHT, ACTIVATIONS, HEAD = "gradients in flight", "activations", "logits and loss"
SAVED_COPY = "copy for --async-save"
KINDS = (WEIGHTS, MOMENTS, GRADIENTS, GATHERED, COPIES, IN_FLIGHT, ACTIVATIONS, HEAD, SAVED_COPY)
DISTINCT_MICRO_BATCHES = 3  # the first, the last, and one between them, of each rank of a pipeline


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on the device and on the host at the peak of the fullest rank, by kind.

    On a CPU everything is on the host. `plan` is that of a rank's part of `model`, the whole one on
    the meta device. `sent` is what a node sends in a step, the mean over nodes.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    micro_batches: int
    plan: Plan
    model: nn.Module
    sent: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def estimate(config: Config, vocab_size: int, nodes: Nodes, *, is_cpu: bool) -> Estimate:
    """Return the memory that `config` needs on ranks of `nodes`, on CPUs or on GPUs.

    Raises InputError for ranks that the nodes cannot hold alike, and for an hpZ partition that does
    not divide them.
    """
    places = plan_places(config, vocab_size, nodes, is_cpu=is_cpu)
    return replace(fullest(places, ActivationTraces()), sent=mean_of_nodes(places))


def fullest(places: Places, traces: ActivationTraces) -> Estimate:
    """Return the estimate of the run that needs most memory.

    Between the ends of a pipeline a rank with as many layers needs less than the first, which holds
    more micro-batches.
    """
    first, *_ = (run for run, _ in places)
    chosen = [run for run, _ in places if run.num_layers > first.num_layers or run.has_end]
    estimates = (estimate_run(run, traces) for run in chosen)
    return max(estimates, key=lambda each: each.device_bytes + each.host_bytes)


def estimate_run(run: PlannedRun, traces: ActivationTraces) -> Estimate:
    """Return the memory that a rank of `run` needs; traces that are missing are added."""
    config = run.config
    simulation = StepSimulation(run, [_traced(run, stage, traces) for stage in run.stages])
    simulation.run_step()
    device, host = simulation.peak, Counter()
    if run.offloads:
        host = offloaded_bytes(run)
    if config.checkpoint.async_save and config.checkpoint.save:
        host[SAVED_COPY] += saved_bytes(run)
    if run.is_cpu:
        device, host = {}, device + host
    return Estimate(
        device=MappingProxyType(device),
        host=MappingProxyType(host),
        micro_batches=run.num_micro_batches,
        plan=run.plan,
        model=run.model.whole,
    )


def _traced(run: PlannedRun, stage: Part, traces: ActivationTraces) -> Activations:
    """Return the activations of a micro-batch in a stage."""
    config = run.config
    # A GPU's attention regenerates its dropout mask; a CPU's saves all scores.
    dropout = config.model.attention_dropout if run.is_cpu else 0.0
    micro_batch = MicroBatch(
        size=config.batch.micro_batch_size,
        dtype=run.compute_dtype,
        selective=config.recompute.recompute_granularity == "selective",
        chunk=CPU_CHUNK if run.is_cpu else DEVICE_CHUNK,
        attention_dropout=dropout,
    )
    return traces.trace(run.model, run.ranks, stage, micro_batch)


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """A stage of a rank: its blocks and its root in `PlannedRun.units`, and its activations.

    saved: bytes that each block saves for backward, including its result.
    """

    stage: Part
    blocks: range
    root: int
    activations: Activations
    saved: Sequence[int]

    @property
    def message(self) -> int:
        """Bytes of activations, or of their gradients, that a stage sends another."""
        return self.activations.stream

    def layer(self, index: int) -> int:
        """Return the layer that a block of the units is."""
        return self.stage.layers[index - self.blocks.start]


class StepSimulation:
    """Simulates the memory of a step in which Adam's moments already exist.

    `activations` are those of the rank's stages. `allocated` is the current bytes by kind, and
    `peak` the largest so far.
    """

    def __init__(self, run: PlannedRun, activations: Sequence[Activations]) -> None:
        self.run = run
        self.allocated = initial_bytes(run)
        self.peak = Counter({WEIGHTS: run.construction_bytes})
        self._chunks = _chunks(run, activations)
        self._roots = {chunk.root for chunk in self._chunks}
        self._gathered: set[int] = set()  # units with gathered weights
        self._copied: set[int] = set()  # units with a secondary copy (hpZ)
        self._accumulated: set[int] = set()  # units with whole gradients of earlier micro-batches
        self._reduced: set[int] = set()  # units with reduced gradients
        self._in_flight: list[tuple[int, ...]] = []  # bytes of each reduction, by remaining hop
        self._sent = 0  # bytes of the gradients that were last sent to the stage before

    def run_step(self) -> None:
        """Simulate the micro-batches of a step, without repeating equal ones."""
        self._record()
        ranks = self.run.ranks
        size = ranks.pipeline_size
        count = min(self.run.num_micro_batches, DISTINCT_MICRO_BATCHES * size)
        order = passes(ranks.pipeline_place, size, count, len(self._chunks))
        self.allocated[ACTIVATIONS] += self._arriving(order[0])
        for each, following in pairwise([*order, None]):
            arriving = 0 if following is None else self._arriving(following)
            self.allocated[ACTIVATIONS] += arriving
            chunk = self._chunks[each.chunk]
            if each.is_forward:
                self._forward(chunk)
            else:
                self._backward(chunk, is_last=each.micro_batch == count - 1)
        self._record()

    def _arriving(self, each: Pass) -> int:
        """Return the bytes that a pass receives from another rank."""
        chunk = self._chunks[each.chunk]
        is_end = chunk.stage.is_first if each.is_forward else chunk.stage.is_last
        return 0 if is_end else chunk.message

    def _record(self, temporary: Mapping[str, int] = MappingProxyType({})) -> None:
        """Update the peak, with temporary bytes by kind."""
        current = self.allocated + Counter(temporary)
        if current.total() > self.peak.total():
            self.peak = current

    def _forward(self, chunk: _Chunk) -> None:
        """Simulate a forward pass; what has arrived for it stays until its backward pass."""
        run, activations, blocks = self.run, chunk.activations, chunk.blocks
        self._gather(chunk.root, prefetched=())
        self._record(
            {
                ACTIVATIONS: activations.embedding.forward,
                GATHERED: self._gather_buffers(blocks[:AHEAD]),
            }
        )
        self.allocated[ACTIVATIONS] += activations.embedding.saved
        num_prefetched = AHEAD if run.is_cpu else 1
        for position, index in enumerate(blocks):
            self._gather(index, blocks[position + 1 : position + num_prefetched])
            buffers = self._gather_buffers(blocks[position + 1 : position + 1 + num_prefetched])
            self._record({ACTIVATIONS: activations.block.forward, GATHERED: buffers})
            self.allocated[ACTIVATIONS] += chunk.saved[position]
            if run.regathers:
                self._free_gathered(index)
        self._record({HEAD: activations.head.forward})
        self.allocated[HEAD] += activations.head.saved

    def _backward(self, chunk: _Chunk, *, is_last: bool) -> None:
        """Simulate a backward pass, whose result is sent to the stage before."""
        activations, head, stage = chunk.activations, chunk.activations.head, chunk.stage
        result = 0 if stage.is_last else chunk.message  # it is freed after this pass
        self.allocated[ACTIVATIONS] += result
        self._record({HEAD: head.backward - head.saved})
        self.allocated[HEAD] += head.after - head.saved
        for position in reversed(range(len(chunk.blocks))):
            index = chunk.blocks[position]
            self._gather(index, prefetched=())
            self.allocated[ACTIVATIONS] -= chunk.saved[position]
            recomputed = self._recompute(chunk, index)
            buffers = self._gather_buffers([index - 1] if position else [])
            self.allocated[GATHERED] += buffers
            self._record({ACTIVATIONS: recomputed + activations.block.backward})
            self._end_backward(index, is_last=is_last, gradient=self.run.units[index].gradient)
            self.allocated[GATHERED] -= buffers
        self.allocated[ACTIVATIONS] -= activations.embedding.saved
        self.allocated[HEAD] -= head.after
        self._record({HEAD: activations.embedding.backward})
        self._end_backward(chunk.root, is_last=is_last, gradient=activations.embedding.after)
        self._in_flight.clear()
        self.allocated[IN_FLIGHT] = 0
        received = chunk.message * (2 - stage.is_first - stage.is_last)
        sent = 0 if stage.is_first else chunk.message
        self.allocated[ACTIVATIONS] += sent - self._sent - received - result
        self._sent = sent

    def _recompute(self, chunk: _Chunk, index: int) -> int:
        """Return the bytes that the earlier blocks of the group of block `index` have saved."""
        block, group_size = chunk.activations.block, self.run.recompute_group
        position = index - chunk.blocks.start
        if group_size == 0 or position >= self.run.num_recomputed(chunk.stage):
            return 0
        num_earlier = min(chunk.layer(index) % group_size, position)
        is_end = chunk.layer(index) % group_size == group_size - 1
        if is_end or position == len(chunk.blocks) - 1:
            # The whole group is recomputed, and stays gathered until its backward passes.
            for earlier in range(index - num_earlier, index):
                self._gather(earlier, prefetched=())
            peak = num_earlier * block.saved + block.forward + chunk.activations.stream
            self._record({ACTIVATIONS: peak})
        return num_earlier * block.saved

    def _gather(self, index: int, prefetched: Sequence[int]) -> None:
        """Allocate the gathered weights of a unit and, until they are copied, their buffer."""
        if index in self._gathered or not self.run.uses_engine:
            return
        unit = self.run.units[index]
        if index not in self._copied:
            self._copied.add(index)
            self.allocated[COPIES] += unit.secondary_copy
        if self.run.num_shards > 1:
            buffers = unit.gather_buffer + self._gather_buffers(prefetched)
            self._record({GATHERED: unit.gathered + buffers})
        self.allocated[GATHERED] += unit.gathered
        self._gathered.add(index)

    def _gather_buffers(self, indices: Sequence[int]) -> int:
        """Return the buffers of gathers that are in progress for these units."""
        if self.run.num_shards == 1:
            return 0
        units = [self.run.units[index] for index in indices if index not in self._gathered]
        return sum(unit.gather_buffer + unit.packed_buffer for unit in units)

    def _free_gathered(self, index: int) -> None:
        if index in self._gathered:
            self._gathered.remove(index)
            self.allocated[GATHERED] -= self.run.units[index].gathered

    def _end_backward(self, index: int, *, is_last: bool, gradient: int) -> None:
        """End the backward pass of a unit, which has produced `gradient` bytes of gradients."""
        run, unit = self.run, self.run.units[index]
        if not run.uses_engine:
            self._accumulate(index, 0 if run.offloads else unit.fp32_gradient)
            return
        stays = run.stage < 3 or run.plan.keeps_roots and index in self._roots
        if is_last or not stays:
            self._free_gathered(index)
        is_fp32 = run.compute_dtype.itemsize == FP32_BYTES
        was_accumulated = index in self._accumulated
        new_gradient = 0 if is_fp32 and was_accumulated else gradient
        if not is_last and run.plan.reduces_once:
            converted = 0 if is_fp32 else unit.fp32_gradient
            self._record({IN_FLIGHT: new_gradient + converted})
            self._accumulate(index, unit.fp32_gradient)
            return
        if not unit.trained:
            return
        self._record({IN_FLIGHT: unit.fp32_gradient + (0 if was_accumulated else new_gradient)})
        if was_accumulated:
            self._accumulated.remove(index)
            self.allocated[GRADIENTS] -= unit.fp32_gradient
        self._reduce(index, unit)

    def _accumulate(self, index: int, num_bytes: int) -> None:
        if index not in self._accumulated:
            self._accumulated.add(index)
            self.allocated[GRADIENTS] += num_bytes

    def _reduce(self, index: int, unit: Unit) -> None:
        """Reduce the gradients of a unit; on a CPU earlier reductions may still be in flight."""
        run, is_first = self.run, index not in self._reduced
        mean_gradient = FP32_BYTES * unit.trained
        is_asynchronous = run.is_cpu and unit.hop_buffers and is_first and not run.offloads
        bytes_by_hop: tuple[int, ...] = (unit.fp32_gradient,)
        if is_asynchronous:
            bytes_by_hop = tuple(unit.fp32_gradient + buffer for buffer in unit.hop_buffers)
        first_buffer = unit.hop_buffers[0] if unit.hop_buffers else 0
        # `allocated` already contains the current hops of all reductions in flight.
        in_flight_change = self._in_flight_bytes() - self.allocated[IN_FLIGHT]
        self._record(
            {IN_FLIGHT: unit.fp32_gradient + first_buffer + mean_gradient + in_flight_change}
        )
        if is_asynchronous:
            self._in_flight = [hops[1:] for hops in self._in_flight if len(hops) > 1]
        else:
            self._in_flight = []
        self._in_flight.append(bytes_by_hop)
        self.allocated[IN_FLIGHT] = self._in_flight_bytes()
        if is_first and not run.offloads:
            self.allocated[GRADIENTS] += mean_gradient
        self._reduced.add(index)

    def _in_flight_bytes(self) -> int:
        return sum(hops[0] for hops in self._in_flight)


def _chunks(run: PlannedRun, activations: Sequence[Activations]) -> list[_Chunk]:
    """Return the stages of a rank, with the places of their units."""
    chunks, first = [], 0
    for stage, each in zip(run.stages, activations, strict=True):
        root = first + len(stage.layers)
        chunks.append(
            _Chunk(
                stage=stage,
                blocks=range(first, root),
                root=root,
                activations=each,
                saved=_saved_bytes_by_block(run, stage, each),
            )
        )
        first = root + 1
    return chunks


def _saved_bytes_by_block(run: PlannedRun, stage: Part, activations: Activations) -> list[int]:
    """Return the bytes that each block saves for backward, including its result."""
    layers, group_size = stage.layers, run.recompute_group
    saved = [activations.block.saved] * len(layers)
    if group_size:
        for position in range(run.num_recomputed(stage)):
            is_last = position == len(layers) - 1
            ends_group = layers[position] % group_size == group_size - 1 or is_last
            saved[position] = activations.stream if ends_group else 0
    return saved
