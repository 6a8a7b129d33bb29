"""Estimate the peak memory of a rank during a step, by kind, without running it.

The step is simulated event by event: what FSDP2 and the collectives allocate and free for each unit
is added up by formula (docs/memory.md), and the activations of a micro-batch are traced on fake
tensors.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.model.loss import CPU_CHUNK, DEVICE_CHUNK
from megatron_zpp.planner.activations import Activations, trace_activations
from megatron_zpp.planner.planned_run import FP32_BYTES, PlannedRun, Unit, plan_run
from megatron_zpp.settings.config import Config
from zeropp.fsdp_adapter import AHEAD
from zeropp.ranks.host_memory import pinned_bytes
from zeropp.sharding.grid import Grid
from zeropp.sharding.sharding import Sharding
from zeropp.wire.route import Nodes
from zeropp.wire.secondary_copies import SecondaryCopies

WEIGHTS, MOMENTS, GRADIENTS = "weights", "optimizer state", "gradients"
GATHERED, COPIES = "gathered weights", "secondary copies (hpZ)"
IN_FLIGHT, ACTIVATIONS, HEAD = "gradients in flight", "activations", "logits and loss"
SAVED_COPY = "copy for --async-save"
KINDS = (WEIGHTS, MOMENTS, GRADIENTS, GATHERED, COPIES, IN_FLIGHT, ACTIVATIONS, HEAD, SAVED_COPY)
MOMENTS_BYTES = 2 * FP32_BYTES  # of Adam's two moments of a weight
DISTINCT_MICRO_BATCHES = 3  # the first, the last, and one between them


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on the device and on the host at the peak of the fullest rank, by kind.

    On a CPU everything is on the host. `sharding` describes the collectives; its model is on the
    meta device.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    micro_batches: int
    sharding: Sharding

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def estimate(config: Config, vocab_size: int, nodes: Nodes, *, is_cpu: bool) -> Estimate:
    """Return the memory that `config` needs on a rank of `nodes`, on CPUs or on GPUs.

    Raises InputError for an hpZ partition that does not divide the ranks.
    """
    run = plan_run(config, vocab_size, nodes, is_cpu=is_cpu)
    return estimate_run(run, trace_run(run))


def trace_run(run: PlannedRun) -> Activations:
    """Return the activations of a micro-batch of `run`."""
    config, model_config = run.config, run.config.model
    if not run.is_cpu:  # a GPU's attention regenerates its dropout mask; a CPU's saves all scores
        model_config = dataclasses.replace(model_config, attention_dropout=0.0)
    return trace_activations(
        model_config, run.model, config.batch.micro_batch_size, run.compute_dtype,
        selective=config.recompute.recompute_granularity == "selective",
        chunk=CPU_CHUNK if run.is_cpu else DEVICE_CHUNK,
    )  # fmt: skip


def estimate_run(run: PlannedRun, activations: Activations) -> Estimate:
    """Return the memory that a rank of `run` needs, with activations as `trace_run` returns."""
    config = run.config
    simulation = StepSimulation(run, activations)
    simulation.run_step()
    device, host = simulation.peak, Counter()
    if run.offloads:
        host = _offloaded_bytes(run)
    if config.checkpoint.async_save and config.checkpoint.save:
        host[SAVED_COPY] += _saved_bytes(run)
    if run.is_cpu:
        device, host = {}, device + host
    copies = SecondaryCopies(in_evaluation=True) if run.forecast.weights.keeps else None
    sharding = Sharding(
        model=run.model, grid=Grid(run.model, None, None), stage=run.stage, num_ranks=run.num_ranks,
        compute_dtype=run.compute_dtype,
        forecast=run.forecast if run.num_ranks > 1 else None, copies=copies,
        stores_frozen=config.zero.stores_frozen,
    )  # fmt: skip
    return Estimate(
        device=MappingProxyType(device), host=MappingProxyType(host),
        micro_batches=run.num_micro_batches, sharding=sharding,
    )  # fmt: skip


class StepSimulation:
    """Simulates the memory of a step in which Adam's moments already exist.

    `allocated` is the current bytes by kind, and `peak` the largest so far.
    """

    def __init__(self, run: PlannedRun, activations: Activations) -> None:
        self.run, self.activations = run, activations
        self.allocated = _initial_bytes(run)
        self.peak = Counter({WEIGHTS: run.construction_bytes})
        self._saved_by_block = _saved_bytes_by_block(run, activations)
        self._root = len(run.units) - 1
        self._gathered: set[int] = set()  # units with gathered weights
        self._copied: set[int] = set()  # units with a secondary copy (hpZ)
        self._accumulated: set[int] = set()  # units with whole gradients of earlier micro-batches
        self._reduced: set[int] = set()  # units with reduced gradients
        self._in_flight: list[tuple[int, ...]] = []  # bytes of each reduction, by remaining hop

    def run_step(self) -> None:
        """Simulate the micro-batches of a step, without repeating equal ones."""
        self._record()
        count = min(self.run.num_micro_batches, DISTINCT_MICRO_BATCHES)
        for index in range(count):
            self._forward()
            self._backward(is_last=index == count - 1)
        self._record()

    def _record(self, temporary: Mapping[str, int] = MappingProxyType({})) -> None:
        """Update the peak, with temporary bytes by kind."""
        current = self.allocated + Counter(temporary)
        if current.total() > self.peak.total():
            self.peak = current

    def _forward(self) -> None:
        run, activations, blocks = self.run, self.activations, range(self._root)
        self._gather(self._root, prefetched=())
        self._record({
            ACTIVATIONS: activations.embedding.forward,
            GATHERED: self._gather_buffers(blocks[:AHEAD]),
        })  # fmt: skip
        self.allocated[ACTIVATIONS] += activations.embedding.saved
        num_prefetched = AHEAD if run.is_cpu else 1
        for index in blocks:
            self._gather(index, blocks[index + 1 : index + num_prefetched])
            buffers = self._gather_buffers(blocks[index + 1 : index + 1 + num_prefetched])
            self._record({ACTIVATIONS: activations.block.forward, GATHERED: buffers})
            self.allocated[ACTIVATIONS] += self._saved_by_block[index]
            if run.regathers:
                self._free_gathered(index)
        self._record({HEAD: activations.head.forward})
        self.allocated[HEAD] += activations.head.saved

    def _backward(self, *, is_last: bool) -> None:
        activations, head = self.activations, self.activations.head
        self._record({HEAD: head.backward - head.saved})
        self.allocated[HEAD] += head.after - head.saved
        for index in reversed(range(self._root)):
            self._gather(index, prefetched=())
            self.allocated[ACTIVATIONS] -= self._saved_by_block[index]
            recomputed = self._recompute(index)
            buffers = self._gather_buffers([index - 1] if index else [])
            self.allocated[GATHERED] += buffers
            self._record({ACTIVATIONS: recomputed + activations.block.backward})
            self._end_backward(index, is_last=is_last, gradient=self.run.units[index].gradient)
            self.allocated[GATHERED] -= buffers
        self.allocated[ACTIVATIONS] = 0
        self.allocated[HEAD] = 0
        self._record({HEAD: activations.embedding.backward})
        self._end_backward(self._root, is_last=is_last, gradient=activations.embedding.after)
        self._in_flight.clear()
        self.allocated[IN_FLIGHT] = 0

    def _recompute(self, index: int) -> int:
        """Return the bytes that the earlier blocks of the group of block `index` have saved."""
        block, group_size = self.activations.block, self.run.recompute_group
        if group_size == 0 or index >= self.run.num_recomputed:
            return 0
        num_earlier = index % group_size
        if num_earlier == group_size - 1 or index == self._root - 1:
            # The whole group is recomputed, and stays gathered until its backward passes.
            for earlier in range(index - num_earlier, index):
                self._gather(earlier, prefetched=())
            peak = num_earlier * block.saved + block.forward + self.activations.stream
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
        stays = run.stage < 3 or run.forecast.reduces_once and index == self._root
        if is_last or not stays:
            self._free_gathered(index)
        is_fp32 = run.compute_dtype.itemsize == FP32_BYTES
        was_accumulated = index in self._accumulated
        new_gradient = 0 if is_fp32 and was_accumulated else gradient
        if not is_last and run.forecast.reduces_once:
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


def _initial_bytes(run: PlannedRun) -> Counter:
    """Return what is on the device before a step: weights, and optimizer state if not offloaded."""
    trained, frozen = _shard_sizes(run)
    if not run.offloads:
        return Counter({WEIGHTS: FP32_BYTES * trained + frozen, MOMENTS: MOMENTS_BYTES * trained})
    not_offloaded = trained - sum(run.offloaded_shards)
    masters = _master_bytes(run, (not_offloaded,), is_separate=run.has_delayed_update)
    if run.config.zero.offloads_weights and not run.is_cpu:
        return masters
    return Counter({WEIGHTS: run.compute_dtype.itemsize * trained + frozen}) + masters


def _shard_sizes(run: PlannedRun) -> tuple[int, int]:
    """Return the trained elements and the frozen bytes of this rank's padded shards."""
    return sum(unit.trained for unit in run.units), sum(unit.frozen for unit in run.units)


def _saved_bytes(run: PlannedRun) -> int:
    """Return this rank's part of a checkpoint; at stage 0 the ranks share the work."""
    trained, frozen = _shard_sizes(run)
    num_bytes = FP32_BYTES * trained
    if not run.config.checkpoint.no_save_optim:
        num_bytes += MOMENTS_BYTES * trained
    if not run.config.zero.stores_frozen:  # frozen weights that are stored as codes are not saved
        num_bytes += frozen
    return num_bytes if run.stage else math.ceil(num_bytes / run.num_ranks)


def _offloaded_bytes(run: PlannedRun) -> Counter:
    """Return what is offloaded to the host.

    With a GPU, the gradients of later micro-batches have a buffer of their own.
    """
    offload_optimizer = run.config.zero.zero_optimization.offload_optimizer
    allocated_bytes: Callable[[int], int] = int
    if offload_optimizer.pin_memory and not run.is_cpu:
        allocated_bytes = pinned_bytes
    offloaded = _master_bytes(
        run,
        run.offloaded_shards,
        is_separate=run.has_delayed_update or not run.is_cpu,
        allocated_bytes=allocated_bytes,
    )
    if not run.is_cpu and not run.forecast.reduces_once and run.num_micro_batches > 1:
        offloaded[GRADIENTS] += sum(
            allocated_bytes(FP32_BYTES * elements) for elements in run.offloaded_shards
        )
    if run.config.zero.offloads_weights and not run.is_cpu:
        _, frozen = _shard_sizes(run)
        offloaded[WEIGHTS] += frozen
    return offloaded


def _master_bytes(
    run: PlannedRun,
    shard_sizes: Sequence[int],
    *,
    is_separate: bool,
    allocated_bytes: Callable[[int], int] = int,
) -> Counter:
    """Return the fp32 weights, gradients and moments of an offloaded optimizer.

    shard_sizes: elements of each parameter's shard. is_separate: the fp32 weights and the 16-bit
    weights that are sent cannot share memory with the model. allocated_bytes: the bytes that are
    allocated for a tensor of a size.
    """
    is_16_bit = run.compute_dtype.itemsize < FP32_BYTES
    master_itemsize = FP32_BYTES if is_16_bit or is_separate else 0
    rounded_itemsize = run.compute_dtype.itemsize if is_16_bit and is_separate else 0
    weights = gradients = 0
    for size in shard_sizes:
        weights += allocated_bytes(master_itemsize * size)
        weights += allocated_bytes(rounded_itemsize * size)
        gradients += allocated_bytes(FP32_BYTES * size)
    if run.has_delayed_update:
        gradients *= 2
    return Counter(
        {WEIGHTS: weights, MOMENTS: MOMENTS_BYTES * sum(shard_sizes), GRADIENTS: gradients}
    )


def _saved_bytes_by_block(run: PlannedRun, activations: Activations) -> list[int]:
    """Return the bytes that each block saves for backward, including its result."""
    num_blocks, group_size = len(run.units) - 1, run.recompute_group
    saved = [activations.block.saved] * num_blocks
    if group_size:
        for index in range(run.num_recomputed):
            ends_group = index % group_size == group_size - 1 or index == num_blocks - 1
            saved[index] = activations.stream if ends_group else 0
    return saved
