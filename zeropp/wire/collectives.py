"""The collectives of a sharded step: what is sent, and how its layout changes on the way.

`WeightGather` gathers a unit's weights, outer hop first. `GradientMean` averages its gradients,
inner hop first. W = N*R ranks by the route: N = outer, R = inner; position
n*R + r. C = elements of one rank's padded shard of the unit, P = bytes of a packed row of them.

| weights                | each rank holds       | gradients                    | each rank holds  |
|------------------------|-----------------------|------------------------------|------------------|
| its shard              | (C,)                  | its own of all W slices +)   | (W, C) fp32      |
| quantized              | (1, P)                | quantized, slices reordered  | (R, N, P)        |
| after the outer hop *) | (N, P)                | after the inner hop          | (R, N, P)        |
| after the inner hop    | (R, N, P)             | summed in fp32, quantized    | (N, P')          |
| dequantized, reordered | (W, C), every rank    | after the outer hop          | (N, P')          |
|                        |                       | summed in fp32               | (C,)             |

Units with weights stored as codes (zeropp/wire/quantized_shard.py) are sent as bytes: these weights
as they are, the others as numbers. Such a gather neither quantizes nor dequantizes.
*) hpZ's secondary copy (zeropp/wire/kept_weights.py). A gather that uses it begins below here.
   One that is out of date is brought up to date by what has changed in the codes.
+) Divided by R here, rather than at the end, if sums are sent in fp16, where they could overflow.
Sources: ZeRO++ (Wang et al. 2023), sections 3.1 to 3.3.
"""

import math
from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist

from zeropp import fsdp_adapter as fsdp
from zeropp.quant.ops import dequantize, quantize, reduce_dequantize, reduce_quantize
from zeropp.quant.packing import MULTIPLE, ROTATED_4, RowLayout, row_layout
from zeropp.wire.coded_collectives import OuterGather, exchange_rows
from zeropp.wire.cross_stream import refuse_capture
from zeropp.wire.gradients import GradientUse
from zeropp.wire.in_flight import Gathering, Hops, InFlightTensor, Reductions, run
from zeropp.wire.kept_weights import KeptWeights
from zeropp.wire.rank_group import RankGroup
from zeropp.wire.route import UNQUANTIZED, Route


class WeightGather(fsdp.AllGather):
    """Gather one unit's weights: qwZ by the route's bits, hpZ by the copies it may keep."""

    def __init__(
        self,
        unit: fsdp.Unit,
        route: Route,
        hops: tuple[RankGroup | None, RankGroup | None],
        kept: KeptWeights | None,
    ) -> None:
        self.unit, self.route = unit, route
        self.kept = kept if route.keeps else None
        self.inner, self.outer = hops

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer for FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """`input_tensor` (C,), a view into `output_tensor` (W*C,), which gets all shards."""
        purpose = "weights_backward" if fsdp.in_backward(self.unit) else "weights_forward"
        if self.kept:
            refuse_capture(input_tensor.device, "whether weights that a node keeps are sent again")
        if self.route.is_flat:
            return self.inner.all_gather(
                output_tensor, input_tensor, purpose, unit=self.unit, async_op=async_op
            )
        hops = self._hops(output_tensor, input_tensor, purpose, async_op)
        return Gathering(hops) if async_op else run(hops)

    @property
    def quantizes(self) -> bool:
        """Whether ranks get weights with an error."""
        is_stored = any(spec.packed_bytes for spec in fsdp.own_specs(self.unit))
        return self.route.bits[0] != UNQUANTIZED and not is_stored

    def rounded(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a shard (C,) as all ranks get it."""
        layout = weight_layout(fsdp.own_specs(self.unit), self.route, shard.dtype)
        result = torch.empty_like(shard)
        dequantize(quantize(shard.view(1, -1), layout), result.view(1, -1), layout)
        return result

    def outer_gather(self, shard: torch.Tensor, purpose: str, *, async_op: bool) -> OuterGather:
        """Return the outer hop of a gather of this rank's shard (C,)."""
        is_stored = shard.dtype == torch.uint8  # the codes of frozen weights, numbers as bytes
        layout = None
        if not is_stored:
            layout = weight_layout(fsdp.own_specs(self.unit), self.route, shard.dtype)
        return OuterGather(self.unit, self.outer, shard, layout, purpose, async_op)

    def _hops(self, whole: torch.Tensor, shard: torch.Tensor, purpose: str, async_op: bool) -> Hops:
        hop = self.outer_gather(shard, purpose, async_op=async_op)
        rows = self.kept.copy_of(self.unit) if self.kept else None
        if rows is None:
            rows = yield from (self.kept.gather(hop) if self.kept else hop.rows())
        if self.inner:
            arrived = rows.new_empty(self.inner.size * rows.shape[0], rows.shape[1])
            yield self.inner.all_gather(arrived, rows, purpose, unit=self.unit, async_op=async_op)
            rows = arrived
        if hop.layout is None:
            by_hop = self.route.inner, self.route.outer, -1
            whole.view(by_hop[1], by_hop[0], -1).copy_(rows.view(by_hop).transpose(0, 1))
        else:
            dequantize(rows, whole.view(len(rows), -1), hop.layout, fold=self.route.inner)
        if self.kept:
            self.kept.note_read(self.unit)


class GradientMean(fsdp.ReduceScatter):
    """Average one unit's gradients, each slice on its owner: qgZ by the route's bits.

    Whatever the wire carries, terms are summed in fp32 and in the order of the ranks. Where
    others have sharded the unit, FSDP2 divides by their factor, and the result is the sum
    (`num_losses` is 1); if it then sums that over replicas, the sum has the dtype that it sends
    (`rounds` True).
    """

    def __init__(
        self,
        unit: fsdp.Unit,
        route: Route,
        hops: tuple[RankGroup | None, RankGroup | None],
        wire_dtype: torch.dtype,
        in_flight: Reductions | None,
        use: GradientUse,
        *,
        num_losses: int,
        rounds: bool = False,
    ) -> None:
        self.unit, self.specs = unit, fsdp.own_specs(unit)
        self.reduced: tuple[fsdp.ShardSpec, ...] = ()  # the specs of the next buffer, in its order
        self.route, self.wire_dtype, self.in_flight = route, wire_dtype, in_flight
        self.use, self.rounds = use, rounds
        self.divisor = num_losses
        use.add(unit)
        self.inner, self.outer = hops
        self.leave = fsdp.before_reduction(unit, self.report)
        # Sums travel between the hops; in fp16 they could overflow where the terms do not.
        is_summed_twice = None not in hops
        self.divides_first = num_losses > 1 and wire_dtype == torch.float16 and is_summed_twice

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer for FSDP2: (W*C,) for this rank's gradients, or (C,) for their means.

        `dtype` is what FSDP2 would reduce in. Here it is fp32.
        """
        is_result = math.prod(size) == sum(spec.elements for spec in self.reduced)
        dtype = dtype if is_result and self.rounds else torch.float32
        buffer = torch.empty(*size, dtype=dtype, device=device)
        return InFlightTensor(buffer, self.in_flight) if self.in_flight and is_result else buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """`input_tensor` (W*C,) fp32 of this rank -> `output_tensor` (C,), the mean of its slice.

        With `in_flight`, the mean is there when its values are used, or else when backward ends.
        """
        assert op == dist.ReduceOp.SUM and not async_op, (op, async_op)
        slices = input_tensor.view(self.route.nodes.num_ranks, -1)
        if self.in_flight:
            hops = self._hops(slices, output_tensor.buffer, async_op=True)
            self.in_flight.add(self.unit, output_tensor.filled_by(hops))
        elif self.rounds:
            total = torch.empty_like(output_tensor, dtype=torch.float32)
            run(self._hops(slices, total, async_op=False))
            output_tensor.copy_(total)
        else:
            run(self._hops(slices, output_tensor, async_op=False))

    def report(self, with_gradient: list[int], reduced: list[int]) -> None:
        """Take note of which of the unit's parameters are in the next buffer."""
        self.use.note(self.unit, with_gradient, reduced)
        self.reduced = tuple(self.specs[index] for index in reduced)

    def _hops(self, slices: torch.Tensor, mean: torch.Tensor, *, async_op: bool) -> Hops:
        inner, outer = gradient_layouts(self.reduced, self.route, self.wire_dtype)
        assert inner.elements == slices.shape[1], (inner, slices.shape)
        if self.divides_first:
            slices.div_(self.route.inner)
        layout, rows = inner, slices
        if self.inner:
            rows = quantize(rows, inner, fold=self.route.inner)
            received = torch.empty_like(rows)
            yield self.inner.all_to_all(
                received, rows, "gradients", unit=self.unit, async_op=async_op
            )
            rows = received
        if self.outer:
            layout = outer
            if self.inner:
                rows = reduce_quantize(rows, inner, outer, terms=self.route.inner)
            else:
                rows = quantize(rows, outer)
            rows = yield from self._exchanged(rows, outer, async_op=async_op)
        reduce_dequantize(rows, mean, layout)
        if self.divisor > 1:
            mean.div_(self.divisor / self.route.inner if self.divides_first else self.divisor)

    def _exchanged(
        self, rows: torch.Tensor, layout: RowLayout, *, async_op: bool
    ) -> Generator[dist.Work | None, None, torch.Tensor]:
        """Return the rows (N, P') that the members of the outer hop have for this rank."""
        if self.outer.coding.is_on:
            return (
                yield from exchange_rows(
                    self.outer, rows, layout, "gradients", unit=self.unit, async_op=async_op
                )
            )
        received = torch.empty_like(rows)
        yield self.outer.all_to_all(received, rows, "gradients", unit=self.unit, async_op=async_op)
        return received


def weight_layout(specs: Sequence[fsdp.ShardSpec], route: Route, dtype: torch.dtype) -> RowLayout:
    """Return the layout of one rank's shard; parameters of fewer than two dims stay unquantized."""
    return _layout(specs, route.bits[0], dtype)


def gradient_layouts(
    specs: Sequence[fsdp.ShardSpec], route: Route, wire_dtype: torch.dtype
) -> tuple[RowLayout, RowLayout]:
    """Return the layouts of one rank's slice of a unit's gradients in the inner and outer hop.

    Gradients of 3 and 4 bits are rotated. No 32 elements that are rotated together may span two
    rows, nor may a block of 3 bits, as it has no code for 0: rows without a gradient, those of
    tokens that did not occur, would not stay 0. Matrices whose rows are no multiple of 64 elements
    get 4 bits for 3, and those whose rows are no multiple of 32 get 8.
    """
    inner, outer = (ROTATED_4 if bits == 4 else bits for bits in route.bits)
    return _layout(specs, inner, wire_dtype), _layout(specs, outer, wire_dtype)


def _layout(specs: Sequence[fsdp.ShardSpec], bits: int, wire: torch.dtype) -> RowLayout:
    sizes = tuple(spec.elements for spec in specs)
    return row_layout(sizes, tuple(_width(spec, bits) for spec in specs), wire)


def _width(spec: fsdp.ShardSpec, bits: int) -> int:
    if spec.ndim < 2:
        return UNQUANTIZED
    for narrow, wider in ((3, ROTATED_4), (ROTATED_4, 8)):
        if bits == narrow and spec.row % MULTIPLE[narrow]:
            bits = wider
    return bits
