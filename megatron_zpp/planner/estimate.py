"""What a rank's memory will hold at the fullest moment of a step, by kind, before anything runs.

The step is gone through moment by moment: what FSDP2 and our collectives keep and free, unit by
unit, is added up by formula (docs/memory.md), what a micro-batch keeps is traced without memory.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.model.loss import CPU_CHUNK, DEVICE_CHUNK
from megatron_zpp.planner.activations import Activations, trace
from megatron_zpp.planner.memory_plan import WIDE, Plan, Unit, plan_of
from megatron_zpp.settings.config import Config
from zeropp.fsdp_adapter import AHEAD
from zeropp.ranks.host_memory import pinned_bytes
from zeropp.sharding.sharding import Sharding
from zeropp.wire.collectives import SecondaryCopies
from zeropp.wire.route import Nodes

WEIGHTS, MOMENTS, GRADIENTS = "weights", "optimizer state", "gradients"
GATHERED, COPIES = "gathered weights", "secondary copies (hpZ)"
REDUCED, KEPT, HEAD = "gradients in flight", "activations", "logits and loss"
KINDS = (WEIGHTS, MOMENTS, GRADIENTS, GATHERED, COPIES, REDUCED, KEPT, HEAD)
TWO_MOMENTS = 2 * WIDE  # bytes of Adam's, in fp32


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
    plan = plan_of(config, vocab_size, nodes, is_cpu=is_cpu)
    recompute = config.recompute.recompute_granularity
    shape = config.model
    if not is_cpu:  # a GPU's attention draws its dropout again; a CPU's keeps all scores
        shape = dataclasses.replace(shape, attention_dropout=0.0)
    activations = trace(
        shape, plan.model, config.batch.micro_batch_size, plan.compute,
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
        stores_frozen=config.zero.stores_frozen,
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
        self.fullest = Counter({WEIGHTS: plan.built})
        self._whole: set[int] = set()  # units whose gathered weights are there
        self._copied: set[int] = set()  # units of which hpZ holds a copy
        self._summed: set[int] = set()  # units with whole gradients of earlier micro-batches
        self._reduced: set[int] = set()  # units with reduced gradients
        self._flying: list[tuple[int, ...]] = []  # of each reduction, bytes at each hop

    def run(self) -> None:
        """All micro-batches that differ."""
        self._moment()
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
            if self.plan.regathers:
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
            self._end(index, last=last, gradient=self.plan.units[index].gradient)
            self.held[GATHERED] -= under_way
        self.held[KEPT] = 0
        self.held[HEAD] = 0
        self._moment(head=ends.embedding.backward)
        self._end(root, last=last, gradient=ends.embedding.after)
        self._flying.clear()
        self.held[REDUCED] = 0

    def _rerun(self, index: int) -> int:
        """What the blocks before block `index` of its group keep, which were recomputed with it."""
        block, group = self.activations.block, self.plan.group
        if group == 0 or index >= self.plan.recomputed:
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
            self._moment(gathered=unit.whole + unit.buffer + self._buffers(ahead))
        self.held[GATHERED] += unit.whole
        self._whole.add(index)

    def _buffers(self, indices: object) -> int:
        """Gathers under way."""
        missing = [self.plan.units[index] for index in indices if index not in self._whole]
        if self.plan.shards == 1:
            return 0
        return sum(one.buffer + one.arriving for one in missing)

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
        if not unit.trained:
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
        mean = WIDE * unit.trained
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


def _before(plan: Plan) -> Counter:
    """On the device before a step: this rank's weights, and of Adam's what is not offloaded."""
    trained, frozen = _weights(plan)
    if not plan.offloads:
        return Counter({WEIGHTS: WIDE * trained + frozen, MOMENTS: TWO_MOMENTS * trained})
    stays = _masters(plan, (trained - sum(plan.on_host),), apart=plan.is_delayed)
    if plan.config.zero.offloads_weights and not plan.is_cpu:
        return stays
    return Counter({WEIGHTS: plan.compute.itemsize * trained + frozen}) + stays


def _weights(plan: Plan) -> tuple[int, int]:
    """Of this rank's padded shards, elements that are trained and bytes that are frozen."""
    return sum(unit.trained for unit in plan.units), sum(unit.frozen for unit in plan.units)


def _on_host(plan: Plan) -> Counter:
    """What is offloaded; with a GPU, gradients of later micro-batches arrive beside the first's."""
    pins = plan.config.zero.zero_optimization.offload_optimizer.pin_memory and not plan.is_cpu
    taken = pinned_bytes if pins else int
    held = _masters(plan, plan.on_host, apart=plan.is_delayed or not plan.is_cpu, taken=taken)
    if not plan.is_cpu and plan.stage >= 2 and plan.micro_batches > 1:
        held[GRADIENTS] += sum(taken(WIDE * one) for one in plan.on_host)
    if plan.config.zero.offloads_weights and not plan.is_cpu:
        held[WEIGHTS] += _weights(plan)[1]
    return held


def _masters(
    plan: Plan, sizes: Sequence[int], *, apart: bool, taken: Callable[[int], int] = int
) -> Counter:
    """Weights and gradients in fp32, and moments, of an offloaded optimizer's parameters.

    apart: nothing of them may be the model's own memory, nor the 16-bit weights that are sent.
    taken: what a tensor of so many bytes takes.
    """
    is_narrow = plan.compute.itemsize < WIDE
    own, rounded = WIDE * (is_narrow or apart), plan.compute.itemsize * (is_narrow and apart)
    gradients = sum(taken(WIDE * size) for size in sizes)
    return Counter(
        {
            WEIGHTS: sum(taken(own * size) + taken(rounded * size) for size in sizes),
            MOMENTS: TWO_MOMENTS * sum(sizes),
            GRADIENTS: gradients * (2 if plan.is_delayed else 1),
        }
    )


def _kept(plan: Plan, activations: Activations) -> list[int]:
    """Bytes that each block keeps from forward to backward, its result included."""
    blocks, group = len(plan.units) - 1, plan.group
    kept = [activations.block.kept] * blocks
    if group:
        for index in range(plan.recomputed):
            ends = index % group == group - 1 or index == blocks - 1
            kept[index] = activations.stream if ends else 0
    return kept
