"""Simulate the memory of a rank's step event by event, in a pipeline in the order of its schedule.

What FSDP2 and the collectives allocate and free for each unit is added up by formula
(docs/memory.md); the activations of a micro-batch are given.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType

from megatron_zpp.model.part import Execution, Part
from megatron_zpp.parallel.pipeline_schedule import Pass, passes
from megatron_zpp.planner.activations import Activations
from megatron_zpp.planner.parts.planned_run import PlannedRun
from megatron_zpp.planner.parts.planned_unit import FP32_BYTES, Unit
from megatron_zpp.planner.state_memory import GRADIENTS, WEIGHTS, initial_bytes
from zeropp.fsdp_adapter import AHEAD

GATHERED, COPIES = "gathered weights", "secondary copies (hpZ)"
IN_FLIGHT, ACTIVATIONS, HEAD = "gradients in flight", "activations", "logits and loss"
DISTINCT_MICRO_BATCHES = 3  # the first, the last, and one between them


class _Chunk:
    """A stage of a rank: its blocks and its root in `PlannedRun.units`, and its activations.

    units: those of the blocks, each before its inner one, in forward order. inner: by block. saved:
    bytes that each block saves for backward, including its result. groups: those that are
    recomputed at once, by the position of a block. message: bytes of activations, or of their
    gradients, that a stage sends another.
    """

    def __init__(
        self, run: PlannedRun, stage: Part, units: range, activations: Activations
    ) -> None:
        self.stage, self.activations, self.message = stage, activations, activations.stream
        self.units, self.root = units[:-1], units[-1]
        self.inner = {index - 1: index for index in self.units if run.units[index].is_inner}
        self.blocks = [index for index in self.units if not run.units[index].is_inner]
        blocks = run.model.whole.blocks
        self.memory = [activations.blocks[type(blocks[layer].mlp)] for layer in stage.layers]
        self.saved = [each.saved for each in self.memory]
        self.groups: dict[int, range] = {}
        for group in Execution(run.config.recompute).checkpoints(stage.layers):
            first, last = group[0] - stage.layers.start, group[-1] - stage.layers.start
            self.groups |= dict.fromkeys(positions := range(first, last + 1), positions)
            self.saved[first:last] = [0] * (last - first)
            self.saved[last] = activations.stream


class StepSimulation:
    """Simulates the memory of a step in which Adam's moments already exist.

    `activations` are those of the rank's stages. `allocated` is the current bytes by kind.
    """

    def __init__(self, run: PlannedRun, activations: Sequence[Activations]) -> None:
        self.run = run
        self.allocated = initial_bytes(run)
        self._peak: tuple[Mapping[str, int], Mapping[str, int]] = (
            {WEIGHTS: run.construction_bytes},
            {},
        )
        self._most = run.construction_bytes
        edges = pairwise([0, *accumulate(map(len, run.units_of_stages))])
        self._chunks = [
            _Chunk(run, stage, range(*ends), each)
            for stage, ends, each in zip(run.stages, edges, activations, strict=True)
        ]
        self._roots = {chunk.root for chunk in self._chunks}
        self._gathered: set[int] = set()  # units with gathered weights
        self._copied: set[int] = set()  # units with a secondary copy (hpZ)
        self._accumulated: dict[int, int] = {}  # bytes of units' gradients of earlier micro-batches
        self._reduced: set[int] = set()  # units with reduced gradients
        self._in_flight: list[tuple[int, ...]] = []  # bytes of each reduction, by remaining hop
        self._reduced_gradient = 0  # whole gradient of the last one, which FSDP2 keeps to the next
        self._sent = 0  # bytes of the gradients that were last sent to the stage before

    @property
    def peak(self) -> Counter[str]:
        """The bytes by kind when there were most so far."""
        allocated, temporary = self._peak
        return Counter(allocated) + Counter(temporary)

    def run_step(self) -> None:
        """Simulate the micro-batches of a step, without repeating equal ones."""
        self._record()
        ranks = self.run.ranks
        size = ranks.pipeline_size
        # Of one stage, those that are in flight at once end as they began.
        distinct = DISTINCT_MICRO_BATCHES * size if len(self._chunks) > 1 else size + 2
        count = min(self.run.num_micro_batches, distinct)
        order = passes(ranks.pipeline_rank, size, count, len(self._chunks))
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
        num_bytes = sum(self.allocated.values()) + sum(temporary.values())
        if num_bytes > self._most:
            self._most, self._peak = num_bytes, (dict(self.allocated), temporary)

    def _forward(self, chunk: _Chunk) -> None:
        """Simulate a forward pass; what has arrived for it stays until its backward pass."""
        activations, units = chunk.activations, chunk.units
        self._gather(chunk.root, prefetched=())
        self._record(
            {
                ACTIVATIONS: max(activations.embedding.forward),
                GATHERED: self._gather_buffers(units[:AHEAD]),
            }
        )
        self.allocated[ACTIVATIONS] += activations.embedding.saved
        for position, index in enumerate(chunk.blocks):
            inner, (before, *inside) = chunk.inner.get(index), chunk.memory[position].forward
            self._compute(chunk, index, before)
            if inner is not None:
                in_it, after = inside
                self._compute(chunk, inner, in_it)
                self._free_after_forward(inner)
                self._record({ACTIVATIONS: after})
            self.allocated[ACTIVATIONS] += chunk.saved[position]
            self._free_after_forward(index)
        self._record({HEAD: max(activations.head.forward)})
        self.allocated[HEAD] += activations.head.saved

    def _compute(self, chunk: _Chunk, index: int, activations: int) -> None:
        """Gather a unit, and compute its forward pass while the ones after it are gathered."""
        num_prefetched = AHEAD if self.run.is_cpu else 1
        following = range(index + 1, chunk.units.stop)
        self._gather(index, following[: num_prefetched - 1])
        buffers = self._gather_buffers(following[:num_prefetched])
        self._record({ACTIVATIONS: activations, GATHERED: buffers})

    def _free_after_forward(self, index: int) -> None:
        if self.run.regathers:
            self._free_gathered(index)

    def _backward(self, chunk: _Chunk, *, is_last: bool) -> None:
        """Simulate a backward pass, whose result is sent to the stage before."""
        activations, head, stage = chunk.activations, chunk.activations.head, chunk.stage
        result = 0 if stage.is_last else chunk.message  # it is freed after this pass
        self.allocated[ACTIVATIONS] += result
        self._record({HEAD: max(head.backward) - head.saved})
        self.allocated[HEAD] += head.after - head.saved
        for position in reversed(range(len(chunk.blocks))):
            self._backward_of_block(chunk, position, is_last=is_last)
        self.allocated[ACTIVATIONS] -= activations.embedding.saved
        self.allocated[HEAD] -= head.after
        self._record({HEAD: max(activations.embedding.backward)})
        self._end_backward(chunk.root, is_last=is_last, gradient=activations.embedding.after)
        self._in_flight.clear()
        self._reduced_gradient = 0
        self._count_in_flight()
        received = chunk.message * (2 - stage.is_first - stage.is_last)
        sent = 0 if stage.is_first else chunk.message
        self.allocated[ACTIVATIONS] += sent - self._sent - received - result
        self._sent = sent

    def _backward_of_block(self, chunk: _Chunk, position: int, *, is_last: bool) -> None:
        """Simulate the backward pass of a block, in which its inner unit has its own."""
        index = chunk.blocks[position]
        inner = chunk.inner.get(index)
        memory, units = chunk.memory[position], self.run.units
        self._gather(index, prefetched=())
        self.allocated[ACTIVATIONS] -= chunk.saved[position]
        recomputed = self._recompute(chunk, position)
        self.allocated[ACTIVATIONS] += recomputed
        before, *inside = memory.backward
        before_it = chunk.blocks[position - 1] if position else None
        if inner is not None:
            in_it, after = inside
            self._record_backward(before, inner)
            self._gather(inner, prefetched=())
            self._record_backward(in_it, before_it)
            self.allocated[ACTIVATIONS] += memory.after
            self._end_backward(inner, is_last=is_last, gradient=units[inner].gradient)
            self.allocated[ACTIVATIONS] -= memory.after
            before = after
        buffers = self._record_backward(before, before_it)
        self.allocated[GATHERED] += buffers
        self.allocated[ACTIVATIONS] -= recomputed
        self._end_backward(index, is_last=is_last, gradient=units[index].gradient)
        self.allocated[GATHERED] -= buffers

    def _record_backward(self, activations: int, following: int | None) -> int:
        """Record a part of a backward pass while a unit is gathered; return the bytes of that."""
        buffers = self._gather_buffers([] if following is None else [following])
        self._record({ACTIVATIONS: activations, GATHERED: buffers})
        return buffers

    def _recompute(self, chunk: _Chunk, position: int) -> int:
        """Return the bytes that the earlier blocks of a block's group have saved."""
        group = chunk.groups.get(position)
        if group is None:
            return 0
        saved = sum(each.saved for each in chunk.memory[group.start : position])
        if position == group[-1]:
            # The whole group is recomputed, and stays gathered until its backward passes.
            last = chunk.inner.get(chunk.blocks[position], chunk.blocks[position])
            for earlier in range(chunk.blocks[group.start], last + 1):
                self._gather(earlier, prefetched=())
            peak = saved + max(chunk.memory[position].forward) + chunk.activations.stream
            self._record({ACTIVATIONS: peak})
        return saved

    def _gather(self, index: int, prefetched: Sequence[int]) -> None:
        """Allocate the gathered weights of a unit and, until they are copied, their buffer."""
        if index in self._gathered or not self.run.uses_engine:
            return
        unit = self.run.units[index]
        if index not in self._copied:
            self._copied.add(index)
            self.allocated[COPIES] += unit.secondary_copy
        buffers = unit.gather_buffer + self._gather_buffers(prefetched)
        self._record({GATHERED: unit.gathered + buffers})
        self.allocated[GATHERED] += unit.gathered
        self._gathered.add(index)

    def _gather_buffers(self, indices: Sequence[int]) -> int:
        """Return the buffers of gathers that are in progress for these units."""
        total = 0
        for index in set(indices) - self._gathered:
            unit = self.run.units[index]
            packed = unit.repeated_buffer if index in self._copied else unit.packed_buffer
            total += unit.gather_buffer + packed
        return total

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
            is_alone = run.ranks.num_ranks == 1 and not run.offloads
            stays = is_fp32 or is_alone and not was_accumulated  # in the compute format
            self._record({IN_FLIGHT: new_gradient + (0 if stays else unit.fp32_gradient)})
            self._accumulate(index, unit.gradient if stays else unit.fp32_gradient)
            return
        if not unit.trained:
            return
        self._reduced_gradient = 0
        self._count_in_flight()
        self._record({IN_FLIGHT: unit.fp32_gradient + (0 if was_accumulated else new_gradient)})
        self.allocated[GRADIENTS] -= self._accumulated.pop(index, 0)
        self._reduce(index, unit)

    def _accumulate(self, index: int, num_bytes: int) -> None:
        self.allocated[GRADIENTS] += num_bytes - self._accumulated.get(index, 0)
        self._accumulated[index] = num_bytes

    def _reduce(self, index: int, unit: Unit) -> None:
        """Reduce the gradients of a unit; on a CPU earlier reductions may still be in flight."""
        run, is_first = self.run, index not in self._reduced
        mean_gradient = FP32_BYTES * unit.trained
        is_asynchronous = run.is_cpu and unit.hop_buffers and is_first and not run.offloads
        first_buffer = unit.hop_buffers[0] if unit.hop_buffers else 0
        self._record({IN_FLIGHT: unit.fp32_gradient + first_buffer + mean_gradient})
        if is_asynchronous:
            self._in_flight = [hops[1:] for hops in self._in_flight if len(hops) > 1]
            bytes_by_hop = tuple(unit.fp32_gradient + buffer for buffer in unit.hop_buffers)
            self._in_flight.append(bytes_by_hop)
        else:
            self._in_flight = []
            self._reduced_gradient = unit.fp32_gradient
        self._count_in_flight()
        if is_first and not run.offloads:
            self.allocated[GRADIENTS] += mean_gradient
        self._reduced.add(index)

    def _count_in_flight(self) -> None:
        running = sum(hops[0] for hops in self._in_flight)
        self.allocated[IN_FLIGHT] = running + self._reduced_gradient
