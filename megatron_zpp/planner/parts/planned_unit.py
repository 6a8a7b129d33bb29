"""The units of a planned run: which parts of a plan they are, and their sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zeropp.fsdp_adapter import ShardSpec
from zeropp.sharding.plan import DataAxis, Plan, UnitPlan
from zeropp.wire.collectives import gradient_layouts, weight_layout

FP32_BYTES = 4  # of a weight or a gradient


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The sizes of an FSDP unit, which is gathered and reduced at once; bytes if not stated.

    layer: that of a block, None for a root. is_experts: it is the experts of the block before it,
    which are gathered and reduced within the passes of the block.
    axis: its data axis. num_shards: over how many ranks it is cut.
    elements: number of elements of a rank's padded shard.
    trained: number of elements of a rank's padded shard that have gradients and moments.
    frozen: the part of the shard that is never trained.
    gathered: the weights of all ranks in the compute format, and the codes they are decoded from.
    gradient: the whole gradient in the compute format.
    fp32_gradient: the whole gradient in fp32.
    gather_buffer: what a gather receives, before it is copied out.
    packed_buffer: packed rows that a gather receives from other nodes.
    repeated_buffer: the same where the secondary copy exists, none if that has all rows.
    secondary_copy: hpZ's secondary copy.
    hop_buffers: gradients that are sent and received, for each hop.
    """

    layer: int | None
    is_experts: bool
    axis: DataAxis
    num_shards: int
    elements: int
    trained: int
    frozen: int
    gathered: int
    gradient: int
    fp32_gradient: int
    gather_buffer: int
    packed_buffer: int
    repeated_buffer: int
    secondary_copy: int
    hop_buffers: tuple[int, ...]


class PlannedUnit(NamedTuple):
    """The units of a plan that are gathered and reduced together, and what they are of a stage."""

    layer: int | None
    is_experts: bool
    parts: tuple[UnitPlan, ...]

    @property
    def axis(self) -> DataAxis:
        """The data axis, with the routes over it."""
        return self.parts[0].axis


def sizes_of(planned: Sequence[PlannedUnit], plan: Plan) -> tuple[Unit, ...]:
    """Return the sizes of units, of which those of equal layers are computed once."""
    sizes: dict[tuple, Unit] = {}
    result = []
    for each in planned:
        key = each.is_experts, *(id(part.specs) for part in each.parts)
        if key not in sizes:
            sizes[key] = _sizes(each, plan)
        result.append(replace(sizes[key], layer=each.layer))
    return tuple(result)


def _sizes(planned: PlannedUnit, plan: Plan) -> Unit:
    """Return the sizes of a unit of a stage, its adapters included."""
    specs = [spec for part in planned.parts for spec in part.specs]
    itemsize, num_shards = plan.compute_dtype.itemsize, planned.parts[0].num_shards
    trainable = [spec for spec in specs if spec.trainable]
    trained = sum(spec.elements for spec in trainable)
    elements = sum(spec.elements for spec in specs)
    codes = sum(spec.packed_bytes for spec in specs)
    row = sum(spec.packed_bytes or itemsize * spec.elements for spec in specs)
    route = planned.axis.weights
    packed_row = row if codes else weight_layout(specs, route, plan.compute_dtype).packed_bytes
    if route.is_flat:
        packed_rows = 0
    elif route.keeps:
        packed_rows = route.nodes.num_ranks
    else:
        packed_rows = route.outer
    packed_buffer = packed_row * packed_rows if num_shards > 1 else 0
    has_secondary_copy = route.keeps and plan.stage
    is_copy_whole = has_secondary_copy and route.inner == 1
    return Unit(
        layer=planned.layer,
        is_experts=planned.is_experts,
        axis=planned.axis,
        num_shards=num_shards,
        elements=elements,
        trained=trained,
        frozen=stored_bytes(specs) - FP32_BYTES * trained,
        gathered=num_shards * (itemsize * elements + codes),
        gradient=num_shards * trained * itemsize,
        fp32_gradient=num_shards * trained * FP32_BYTES,
        gather_buffer=num_shards * row if num_shards > 1 else 0,
        packed_buffer=packed_buffer,
        repeated_buffer=0 if is_copy_whole else packed_buffer,
        secondary_copy=route.outer * packed_row if has_secondary_copy else 0,
        hop_buffers=_hop_buffers(trainable, planned.parts[0]) if num_shards > 1 else (),
    )


def _hop_buffers(trainable: Sequence[ShardSpec], unit: UnitPlan) -> tuple[int, ...]:
    """Return the bytes that each hop of a gradient reduction sends and receives."""
    if not trainable:
        return ()
    route = unit.axis.gradients
    inner, outer = gradient_layouts(trainable, route, unit.wire_dtype)
    buffers = []
    if route.inner > 1:
        buffers.append(2 * route.nodes.num_ranks * inner.packed_bytes)
    if route.outer > 1:
        buffers.append(2 * route.outer * outer.packed_bytes)
    return tuple(buffers)


def stored_bytes(specs: Sequence[ShardSpec]) -> int:
    """Return the bytes of shards that are stored as codes or in fp32."""
    return sum(spec.packed_bytes or FP32_BYTES * spec.elements for spec in specs)
