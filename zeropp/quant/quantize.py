"""Block quantization of rows of parameters or gradients, for the wire: what the collectives call.

A row holds the parts of several parameters, one after another; a `Layout` says which of them become
INT8 or INT4 codes and which travel as they are. What the numbers are is in docs/numerics.md, how
they lie in a packed row in zeropp/quant/packing.py. Legend of the shapes: K rows, C elements of a
row, P bytes of a packed row, T terms of a sum. None of the functions is differentiable.
"""

import torch
from torch import Tensor

from zeropp.quant import ops
from zeropp.quant.packing import BLOCK, RAW, Layout

__all__ = [
    "BLOCK", "RAW", "Layout", "dequantize", "quantize", "reduce_dequantize", "reduce_quantize",
]  # fmt: skip
_OPS = getattr(torch.ops, ops.NAMESPACE)


def quantize(rows: Tensor, layout: Layout, *, fold: int = 1) -> Tensor:
    """The packed rows, a fresh uint8 (K, P), of `rows` (K, C) in bf16, fp16 or fp32.

    Output row r*N+n is input row n*fold+r, with N = K // fold: the slice reordering of a two-hop
    exchange. A block with a NaN or an infinity comes out as NaN. Raises TypeError for another
    dtype, ValueError for a shape that is not the layout's, for strides, for a fold that does not
    divide K.
    """
    return _OPS.quantize(rows, layout.sizes, layout.bits, layout.wire, fold)


def dequantize(packed: Tensor, out: Tensor, layout: Layout, *, fold: int = 1) -> None:
    """Fill `out` (K, C) in bf16, fp16 or fp32 from `packed` (K, P).

    Packed row r*N+n goes to out row n*fold+r, with N = K // fold. Raises as `quantize` does.
    """
    _OPS.dequantize(packed, out, layout.sizes, layout.bits, layout.wire, fold)


def reduce_quantize(packed: Tensor, layout_in: Layout, layout_out: Layout, *, terms: int) -> Tensor:
    """The sums of `terms` packed rows each, packed again: (T*K, P1) -> a fresh uint8 (K, P2).

    T is outermost; the terms are added in fp32 in the order 0 ... T-1. The two layouts have the
    same sizes. Raises as `quantize` does.
    """
    if layout_in.sizes != layout_out.sizes:
        raise ValueError(f"the layouts differ: sizes {layout_in.sizes} and {layout_out.sizes}")
    return _OPS.reduce_quantize(
        packed, layout_in.sizes, layout_in.bits, layout_in.wire, layout_out.bits,
        layout_out.wire, terms,
    )  # fmt: skip


def reduce_dequantize(packed: Tensor, out: Tensor, layout: Layout) -> None:
    """Fill `out` (C,) with the sum of the rows of `packed` (T, P), in fp32 in the order 0 ... T-1.

    Raises as `quantize` does.
    """
    _OPS.reduce_dequantize(packed, out, layout.sizes, layout.bits, layout.wire)
