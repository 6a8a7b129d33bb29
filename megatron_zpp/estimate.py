"""What a rank's memory will hold at the fullest moment of a step, by kind, before anything runs.

The step is gone through moment by moment: what FSDP2 and our collectives keep and free, unit by
unit, is added up by formula (docs/memory.md), what a micro-batch keeps is traced without memory.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import nn

from megatron_zpp.activations import Activations, trace
from megatron_zpp.config import Config
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.loss import CPU_CHUNK, DEVICE_CHUNK
from megatron_zpp.schedule import Schedules
from zeropp.collectives import SecondaryCopies, gradient_layouts, weight_layout
from zeropp.forecast import Forecast
from zeropp.fsdp_adapter import AHEAD, Piece
from zeropp.route import Nodes, gradient_route, weight_route
from zeropp.sharding import Sharding
from zeropp.stages import outermost_blocks

WEIGHTS, MOMENTS, GRADIENTS = "weights", "optimizer state", "gradients"
GATHERED, COPIES = "gathered weights", "secondary copies (hpZ)"
REDUCED, KEPT, HEAD = "gradients in flight", "activations", "logits and loss"
KINDS = (WEIGHTS, MOMENTS, GRADIENTS, GATHERED, COPIES, REDUCED, KEPT, HEAD)
WIDE, TWO_MOMENTS = 4, 8  # bytes in fp32 of a weight or a gradient; of Adam's two moments


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered and reduced at once: bytes, all but `elements`.

    elements: of one rank's padded shard. whole: gathered, in the compute format. arriving: packed
    rows under way to it. copy: hpZ's. sending: gradients to send and to receive, by hop.
    """

    elements: int
    whole: int
    wide: int  # gradients of the whole unit in fp32
    arriving: int
    copy: int
    sending: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The facts of a run that its memory follows from."""

    config: Config
    model: GPT  # on the meta device
    forecast: Forecast
    is_cpu: bool

    @property
    def num_ranks(self) -> int:
        return self.forecast.weights.nodes.num_ranks

    @property
    def stage(self) -> int:
        return self.forecast.stage

    @property
    def shards(self) -> int:
        """Into how many parts a unit is cut."""
        return 1 if self.stage == 0 else self.num_ranks

    @property
    def is_wrapped(self) -> bool:
        """Whether there is an engine; one rank in fp32 has none."""
        return self.num_ranks > 1 or self.compute.itemsize < WIDE

    @property
    def compute(self) -> torch.dtype:
        return self.forecast.compute_dtype

    @property
    def offloads(self) -> bool:
        return self.config.zero.offloads_optimizer

    @property
    def micro_batches(self) -> int:
        batch = Schedules.of(self.config).batch_size.final
        return batch // (self.config.batch.micro_batch_size * self.num_ranks)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The blocks, then the root."""
        return tuple(self._unit(pieces) for pieces in self.forecast.units)

    def _unit(self, pieces: tuple[Piece, ...]) -> Unit:
        elements = sum(one.elements for one in pieces)
        whole = self.shards * elements * self.compute.itemsize
        weights, means = self.forecast.weights, self.forecast.gradients
        flat = weights.is_flat
        packed = weight_layout(pieces, weights, self.compute).packed_bytes
        inner, outer = gradient_layouts(pieces, means, self.forecast.wire_dtype)
        sending = []
        if self.shards > 1:
            hops = ((means.inner, self.num_ranks, inner), (means.outer, means.outer, outer))
            sending = [2 * rows * one.packed_bytes for size, rows, one in hops if size > 1]
        return Unit(
            elements=elements,
            whole=whole,
            wide=self.shards * elements * WIDE,
            arriving=packed * (0 if flat else self.num_ranks if weights.keeps else weights.outer),
            copy=weights.outer * packed if weights.keeps and self.stage else 0,
            sending=tuple(sending),
        )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of the fullest rank at its fullest moment, by kind; on the device and on the host.

    On a CPU all is on the host. `sharding` describes the collectives; its model has no memory.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    parameters: int
    micro_batches: int
    sharding: Sharding

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def estimate(config: Config, vocab_size: int, nodes: Nodes, *, is_cpu: bool) -> Estimate:
    """What `config` will take on a rank of `nodes`, on CPUs or on GPUs.

    Raises InputError for an hpZ partition that does not divide the ranks.
    """
    plan = _plan(config, vocab_size, nodes, is_cpu)
    recompute = config.recompute.recompute_granularity
    shape = config.model
    if not is_cpu:  # a GPU's attention draws its dropout again; a CPU's keeps all scores
        shape = dataclasses.replace(shape, attention_dropout=0.0)
    activations = trace(
        shape, plan.model.vocab_size, config.batch.micro_batch_size, plan.compute,
        selective=recompute == "selective", chunk=CPU_CHUNK if is_cpu else DEVICE_CHUNK,
    )  # fmt: skip
    step = Step(plan, activations)
    step.run()
    device, host = step.fullest, _on_host(plan) if plan.offloads else Counter()
    if is_cpu:
        device, host = {}, device + host
    copies = SecondaryCopies(in_evaluation=True) if plan.forecast.weights.keeps else None
    sharding = Sharding(
        model=plan.model, stage=plan.stage, num_ranks=plan.num_ranks, compute_dtype=plan.compute,
        forecast=plan.forecast if plan.num_ranks > 1 else None, copies=copies,
    )  # fmt: skip
    return Estimate(
        device=MappingProxyType(device), host=MappingProxyType(host),
        parameters=plan.model.num_parameters(), micro_batches=plan.micro_batches, sharding=sharding,
    )  # fmt: skip


class Step:
    """Goes through a step with all moments of Adam in place; `fullest` is its fullest moment."""

    def __init__(self, plan: Plan, activations: Activations) -> None:
        self.plan, self.activations = plan, activations
        self.held = _before(plan)
        self.fullest = Counter(self.held)
        self._whole: set[int] = set()  # units whose gathered weights are there
        self._copied: set[int] = set()  # units of which hpZ holds a copy
        self._summed: set[int] = set()  # units with whole gradients of earlier micro-batches
        self._reduced: set[int] = set()  # units with reduced gradients
        self._flying: list[tuple[int, ...]] = []  # of each reduction, bytes at each hop

    def run(self) -> None:
        """All micro-batches that differ."""
        count = min(self.plan.micro_batches, 3)
        for index in range(count):
            self._forward()
            self._backward(last=index == count - 1)
        self._moment()

    def _moment(self, **more: int) -> None:
        now = self.held + Counter({MORE[name]: size for name, size in more.items()})
        if now.total() > self.fullest.total():
            self.fullest = now

    def _forward(self) -> None:
        root, blocks = len(self.plan.units) - 1, range(len(self.plan.units) - 1)
        self._gather(root, ahead=())
        ends, kept = self.activations, _kept(self.plan, self.activations)
        self._moment(kept=ends.embedding.forward, gathered=self._buffers(blocks[:AHEAD]))
        self.held[KEPT] += ends.embedding.kept
        ahead = AHEAD if self.plan.is_cpu else 1
        for index in blocks:
            self._gather(index, blocks[index + 1 : index + ahead])
            under_way = self._buffers(blocks[index + 1 : index + 1 + ahead])
            self._moment(kept=ends.block.forward, gathered=under_way)
            self.held[KEPT] += kept[index]
            if self.plan.stage == 3 and self.plan.num_ranks > 1:
                self._drop(index)
        self._moment(head=ends.head.forward)
        self.held[HEAD] += ends.head.kept

    def _backward(self, *, last: bool) -> None:
        ends, kept = self.activations, _kept(self.plan, self.activations)
        self._moment(head=ends.head.backward - ends.head.kept)
        self.held[HEAD] += ends.head.after - ends.head.kept
        root = len(self.plan.units) - 1
        for index in reversed(range(root)):
            self._gather(index, ahead=())
            self.held[KEPT] -= kept[index]
            reran = self._rerun(index)
            under_way = self._buffers([index - 1] if index else [])
            self.held[GATHERED] += under_way
            self._moment(kept=reran + ends.block.backward)
            self._end(index, last=last, gradient=self.plan.units[index].whole)
            self.held[GATHERED] -= under_way
        self.held[KEPT] = 0
        self.held[HEAD] = 0
        self._moment(head=ends.embedding.backward)
        self._end(root, last=last, gradient=ends.embedding.after)
        self._flying.clear()
        self.held[REDUCED] = 0

    def _rerun(self, index: int) -> int:
        """What the blocks before block `index` of its group keep, which were recomputed with it."""
        block, group = self.activations.block, _group(self.plan)
        if group == 0 or index >= _recomputed(self.plan):
            return 0
        place = index % group
        if index % group == group - 1 or index == len(self.plan.units) - 2:
            for one in range(index - place, index):  # they stay gathered until their backward
                self._gather(one, ahead=())
            self._moment(kept=place * block.kept + block.forward + self.activations.stream)
        return place * block.kept

    def _gather(self, index: int, ahead: object) -> None:
        """The unit's weights, whole, and while they are copied out the buffer they came in."""
        if index in self._whole or not self.plan.is_wrapped:
            return
        unit = self.plan.units[index]
        if index not in self._copied:
            self._copied.add(index)
            self.held[COPIES] += unit.copy
        if self.plan.shards > 1:
            self._moment(gathered=2 * unit.whole + self._buffers(ahead))
        self.held[GATHERED] += unit.whole
        self._whole.add(index)

    def _buffers(self, indices: object) -> int:
        """Gathers under way."""
        missing = [self.plan.units[one] for one in indices if one not in self._whole]
        if self.plan.shards == 1:
            return 0
        return sum(one.whole + one.arriving for one in missing)

    def _drop(self, index: int) -> None:
        if index in self._whole:
            self._whole.remove(index)
            self.held[GATHERED] -= self.plan.units[index].whole

    def _end(self, index: int, *, last: bool, gradient: int) -> None:
        """After a unit's backward pass, which left `gradient` bytes of whole gradients."""
        plan, unit = self.plan, self.plan.units[index]
        if not plan.is_wrapped:
            self._sum(index, 0 if plan.offloads else unit.wide)
            return
        if last or plan.stage == 3:
            self._drop(index)
        fresh = 0 if plan.compute.itemsize == WIDE and index in self._summed else gradient
        if not last and plan.stage < 2:
            self._moment(reduced=fresh + (plan.compute.itemsize < WIDE) * unit.wide)
            self._sum(index, unit.wide)
            return
        was_summed = index in self._summed
        self._moment(reduced=unit.wide + (0 if was_summed else fresh))
        if was_summed:
            self._summed.remove(index)
            self.held[GRADIENTS] -= unit.wide
        self._reduce(index, unit)

    def _sum(self, index: int, wide: int) -> None:
        if index not in self._summed:
            self._summed.add(index)
            self.held[GRADIENTS] += wide

    def _reduce(self, index: int, unit: Unit) -> None:
        """Send the unit's gradients; on a CPU others have the time until then to arrive."""
        plan, first = self.plan, index not in self._reduced
        mean = WIDE * unit.elements
        later = plan.is_cpu and unit.sending and first and not plan.offloads
        steps = tuple(unit.wide + one for one in unit.sending) if later else (unit.wide,)
        before = sum(flying[0] for flying in self._flying)
        busy = unit.sending[0] if unit.sending else 0
        self._moment(reduced=unit.wide + busy + mean - self.held[REDUCED] + before)
        self._flying = [rest[1:] for rest in self._flying if len(rest) > 1] if later else []
        self._flying.append(steps)
        self.held[REDUCED] = sum(flying[0] for flying in self._flying)
        if first and not plan.offloads:
            self.held[GRADIENTS] += mean
        self._reduced.add(index)


MORE = MappingProxyType({"kept": KEPT, "gathered": GATHERED, "head": HEAD, "reduced": REDUCED})


def _plan(config: Config, vocab_size: int, nodes: Nodes, is_cpu: bool) -> Plan:
    with torch.device("meta"):
        model = GPT(config.model, vocab_size)
    blocks = tuple(outermost_blocks(model))
    inside = {one for block in blocks for one in block.parameters()}
    owned = [tuple(block.parameters()) for block in blocks]
    owned.append(tuple(one for one in model.parameters() if one not in inside))
    shards = 1 if config.zero.stage == 0 else nodes.num_ranks
    forecast = Forecast(
        stage=config.zero.stage,
        units=tuple(tuple(_piece(one, shards) for one in unit) for unit in owned),
        weights=weight_route(config.zero, nodes),
        gradients=gradient_route(config.zero, nodes),
        compute_dtype=getattr(torch, config.zero.compute_format),
        wire_dtype=getattr(torch, config.zero.wire_format),
    )
    return Plan(config=config, model=model, forecast=forecast, is_cpu=is_cpu)


def _piece(parameter: nn.Parameter, shards: int) -> Piece:
    rows = -(-parameter.shape[0] // shards)  # FSDP2 cuts the first axis, the last part padded
    return Piece(
        elements=rows * parameter[0].numel(), ndim=parameter.ndim, trainable=parameter.requires_grad
    )


def _before(plan: Plan) -> Counter:
    """On the device before a step: this rank's weights and Adam's moments."""
    elements = sum(one.elements for one in plan.units)
    if not plan.offloads:
        return Counter({WEIGHTS: WIDE * elements, MOMENTS: TWO_MOMENTS * elements})
    ratio = plan.config.zero.zero_optimization.offload_optimizer.ratio
    left = round((1 - ratio) * elements)
    own = 0 if plan.config.zero.offloads_weights and not plan.is_cpu else plan.compute.itemsize
    held = Counter({WEIGHTS: own * elements})
    if plan.compute.itemsize < WIDE:
        held[WEIGHTS] += WIDE * left
    return held + Counter({MOMENTS: TWO_MOMENTS * left, GRADIENTS: WIDE * left})


def _on_host(plan: Plan) -> Counter:
    """What is offloaded: weights and gradients in fp32, moments, and rounded weights to send."""
    ratio = plan.config.zero.zero_optimization.offload_optimizer.ratio
    elements = round(ratio * sum(one.elements for one in plan.units))
    delayed = plan.config.zero.zeropp.delayed_param_update
    own = 0 if plan.is_cpu and plan.compute.itemsize == WIDE and not delayed else WIDE
    apart = delayed or not plan.is_cpu
    staged = plan.compute.itemsize if apart and plan.compute.itemsize < WIDE else 0
    late = WIDE if not plan.is_cpu and plan.stage >= 2 and plan.micro_batches > 1 else 0
    late += WIDE if delayed else 0
    return Counter(
        {
            WEIGHTS: (own + staged) * elements,
            MOMENTS: TWO_MOMENTS * elements,
            GRADIENTS: (WIDE + late) * elements,
        }
    )


def _group(plan: Plan) -> int:
    """Blocks that are recomputed together; 0 where none is."""
    recompute = plan.config.recompute
    if recompute.recompute_granularity != "full":
        return 0
    return 1 if recompute.recompute_method == "block" else recompute.recompute_num_layers


def _recomputed(plan: Plan) -> int:
    """How many of the first blocks are recomputed."""
    recompute = plan.config.recompute
    blocks = len(plan.units) - 1
    return recompute.recompute_num_layers if recompute.recompute_method == "block" else blocks


def _kept(plan: Plan, activations: Activations) -> list[int]:
    """Bytes that each block keeps from forward to backward, its result included."""
    blocks, group = len(plan.units) - 1, _group(plan)
    kept = [activations.block.kept] * blocks
    if group:
        for index in range(_recomputed(plan)):
            ends = index % group == group - 1 or index == blocks - 1
            kept[index] = activations.stream if ends else 0
    return kept
