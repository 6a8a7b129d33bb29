"""The ops of a backend as functions that take layouts and return their results."""

from dataclasses import dataclass

import torch
from torch import Tensor

import zeropp.quant.reference
from zeropp.quant.ops import Backend
from zeropp.quant.packing import RowLayout


@dataclass(frozen=True)
class LayoutOps:
    """The ops of a backend, called directly, on a device; emulated ones are `slow`."""

    backend: Backend
    device: str = "cpu"
    slow: bool = False

    def quantize(self, rows: Tensor, layout: RowLayout, fold: int) -> Tensor:
        packed = rows.new_empty((len(rows), layout.packed_bytes), dtype=torch.uint8)
        self.quantize_into(rows, packed, layout, fold)
        return packed

    def quantize_into(self, rows: Tensor, packed: Tensor, layout: RowLayout, fold: int) -> None:
        self.backend.quantize(rows, packed, layout.table, fold)

    def requantize_into(
        self, rows: Tensor, held: Tensor, packed: Tensor, layout: RowLayout
    ) -> None:
        self.backend.requantize(rows, held, packed, layout.table)

    def dequantize(self, packed: Tensor, out: Tensor, layout: RowLayout, fold: int) -> None:
        self.backend.dequantize(packed, out, layout.table, fold)

    def reduce_quantize(
        self, packed: Tensor, layout: RowLayout, layout_out: RowLayout, terms: int
    ) -> Tensor:
        reduced = packed.new_empty((len(packed) // terms, layout_out.packed_bytes))
        self.reduce_quantize_into(packed, reduced, layout, layout_out)
        return reduced

    def reduce_quantize_into(
        self, packed: Tensor, reduced: Tensor, layout: RowLayout, layout_out: RowLayout
    ) -> None:
        terms = len(packed) // len(reduced)
        self.backend.reduce_quantize(packed, reduced, layout.table, layout_out.table, terms)

    def reduce_dequantize(self, packed: Tensor, out: Tensor, layout: RowLayout) -> None:
        self.backend.reduce_dequantize(packed, out, layout.table)


reference = LayoutOps(zeropp.quant.reference)
