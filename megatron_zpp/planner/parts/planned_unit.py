"""What is gathered and reduced at once in a planned run, with its bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeropp.fsdp_adapter import ShardSpec
from zeropp.sharding import DataAxis, UnitPlan
from zeropp.wire import Route, gradient_layouts, weight_layout

FP32_BYTES = 4  # of a weight or a gradient


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """A block, modules in one that have an axis of their own, or a root.

    parts: the units of the plan that are gathered and reduced together; trained ones beside frozen
    weights are one of their own. Blocks that are alike have the same unit, with the parameters of
    the first of them. Inner ones are gathered and reduced within the passes of their block.
    """

    parts: tuple[UnitPlan, ...]
    is_inner: bool = False

    @property
    def axis(self) -> DataAxis:
        """The data axis, with the routes over it."""
        return self.parts[0].axis

    @property
    def num_shards(self) -> int:
        """Over how many ranks it is cut."""
        return self.parts[0].num_shards

    @cached_property
    def elements(self) -> int:
        """The elements of a rank's padded shard."""
        return sum(spec.elements for spec in self._specs)

    @cached_property
    def trained(self) -> int:
        """The elements of a rank's padded shard that have gradients and moments."""
        return sum(spec.elements for spec in self._trainable)

    @cached_property
    def frozen(self) -> int:
        """The bytes of the part of the shard that is never trained."""
        return stored_bytes(self._specs) - FP32_BYTES * self.trained

    @cached_property
    def gathered(self) -> int:
        """The bytes of all weights in the compute format, and of codes they are decoded from."""
        return self.num_shards * (self._itemsize * self.elements + self._codes)

    @cached_property
    def gradient(self) -> int:
        """The bytes of the whole gradient in the compute format."""
        return self.num_shards * self.trained * self._itemsize

    @cached_property
    def fp32_gradient(self) -> int:
        """The bytes of the whole gradient in fp32."""
        return self.num_shards * self.trained * FP32_BYTES

    @cached_property
    def gather_buffer(self) -> int:
        """The bytes that a gather receives, before they are copied out."""
        return self.num_shards * self._row if self.num_shards > 1 else 0

    @cached_property
    def packed_buffer(self) -> int:
        """The bytes of packed rows that a gather receives from other nodes."""
        if self._route.is_flat or self.num_shards == 1:
            return 0
        rows = self._route.nodes.num_ranks if self._route.keeps else self._route.outer
        return self._packed_row * rows

    @cached_property
    def repeated_buffer(self) -> int:
        """The same where the secondary copy exists: none if that has all rows."""
        return 0 if self._has_copy and self._route.inner == 1 else self.packed_buffer

    @cached_property
    def secondary_copy(self) -> int:
        """The bytes of hpZ's secondary copy."""
        return self._route.outer * self._packed_row if self._has_copy else 0

    @cached_property
    def hop_buffers(self) -> tuple[int, ...]:
        """The bytes of gradients that each hop of a reduction sends and receives."""
        if self.num_shards == 1 or not self._trainable:
            return ()
        route = self.axis.gradients
        inner, outer = gradient_layouts(self._trainable, route, self.parts[0].wire_dtype)
        hops = (route.inner, route.nodes.num_ranks, inner), (route.outer, route.outer, outer)
        return tuple(2 * rows * layout.packed_bytes for size, rows, layout in hops if size > 1)

    @cached_property
    def _specs(self) -> Sequence[ShardSpec]:
        return [spec for part in self.parts for spec in part.specs]

    @cached_property
    def _trainable(self) -> Sequence[ShardSpec]:
        return [spec for spec in self._specs if spec.trainable]

    @property
    def _route(self) -> Route:
        return self.axis.weights

    @property
    def _itemsize(self) -> int:
        return self.parts[0].dtype.itemsize

    @property
    def _codes(self) -> int:
        return sum(spec.packed_bytes for spec in self._specs)

    @cached_property
    def _row(self) -> int:
        """The bytes of a rank's shard as numbers, or as the codes that are stored."""
        return sum(spec.packed_bytes or self._itemsize * spec.elements for spec in self._specs)

    @property
    def _has_copy(self) -> bool:
        return self._route.keeps and self.num_shards > 1

    @cached_property
    def _packed_row(self) -> int:
        """The bytes of a rank's shard as it is sent."""
        if self._codes:
            return self._row
        return weight_layout(self._specs, self._route, self.parts[0].dtype).packed_bytes


def stored_bytes(specs: Iterable[ShardSpec]) -> int:
    """Return the bytes of shards that are stored as codes or in fp32."""
    return sum(spec.packed_bytes or FP32_BYTES * spec.elements for spec in specs)
