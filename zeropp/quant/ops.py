"""Block quantization of rows of parameters or gradients, as ops of PyTorch.

A row holds the parts of several parameters, one after another; a `RowLayout` says which of them
become codes of 8, 4, 3 or 2 bits and which are sent unchanged. docs/numerics.md defines the
numbers, zeropp/quant/packing.py their places in a packed row. Shapes: K rows, C elements of a row,
P bytes of a packed row, T terms of a sum.

`quantize` and its companions call `torch.ops.zeropp.quantize` and so on, which take a layout
as its `table`. Each device has a backend: zeropp/quant/cpu.py, zeropp/quant/cuda.py, and on all
others zeropp/quant/reference.py. No function is differentiable.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zeropp.quant import cpu, cuda, reference
from zeropp.quant.packing import ELEMENTS, FLOATS, PACKED_BYTES, RAW, RowLayout, segments_in

NAMESPACE = "zeropp"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
SCHEMAS = (
    "quantize(Tensor rows, int[] layout, int fold) -> Tensor",
    "requantize(Tensor rows, Tensor held, int[] layout) -> Tensor",
    "dequantize(Tensor packed, Tensor(a!) out, int[] layout, int fold) -> ()",
    "reduce_quantize(Tensor packed, int[] layout, int[] layout_out, int terms) -> Tensor",
    "reduce_dequantize(Tensor packed, Tensor(a!) out, int[] layout) -> ()",
)
Table = Sequence[int]  # a `RowLayout.table`


def quantize(rows: Tensor, layout: RowLayout, *, fold: int = 1) -> Tensor:
    """Quantize `rows` (K, C) in bf16, fp16 or fp32; returns the packed rows, uint8 (K, P).

    Packed row r*N+n is row n*fold+r, with N = K // fold: the slice reordering of a two-hop
    exchange. A block with a NaN or an infinity becomes NaN. Raises TypeError for another dtype, and
    ValueError for a shape that is not the layout's, for tensors that are not contiguous, and for a
    fold that does not divide K.
    """
    return torch.ops.zeropp.quantize.default(rows, layout.table, fold)


def requantize(rows: Tensor, held: Tensor, layout: RowLayout) -> Tensor:
    """Quantize `rows` (K, C) as `quantize` does, but by the scales of packed rows `held` (K, P).

    What has changed a little since these were made then has nearly the same codes. A block takes
    another scale only where its own no longer fits (docs/numerics.md). Raises as `quantize` does,
    and ValueError for a layout with other codes than INT8.
    """
    return torch.ops.zeropp.requantize.default(rows, held, layout.table)


def dequantize(packed: Tensor, out: Tensor, layout: RowLayout, *, fold: int = 1) -> None:
    """Fill `out` (K, C) in bf16, fp16 or fp32 from `packed` (K, P).

    Packed row r*N+n becomes row n*fold+r, with N = K // fold. Raises as `quantize` does.
    """
    torch.ops.zeropp.dequantize.default(packed, out, layout.table, fold)


def reduce_quantize(
    packed: Tensor, layout: RowLayout, layout_out: RowLayout, *, terms: int
) -> Tensor:
    """Sum `terms` packed rows each and pack the sums: uint8 (T*K, P1) -> uint8 (K, P2).

    T is outermost; the terms are added in fp32 in the order 0 ... T-1. The two layouts have the
    same sizes. Raises as `quantize` does.
    """
    if layout.sizes != layout_out.sizes:
        raise ValueError(f"the layouts differ: sizes {layout.sizes} and {layout_out.sizes}")
    return torch.ops.zeropp.reduce_quantize.default(packed, layout.table, layout_out.table, terms)


def reduce_dequantize(packed: Tensor, out: Tensor, layout: RowLayout) -> None:
    """Fill `out` (C,) with the sum of the rows of `packed` (T, P), in fp32 in the order 0 ... T-1.

    Raises as `quantize` does.
    """
    torch.ops.zeropp.reduce_dequantize.default(packed, out, layout.table)


class Backend(Protocol):
    """Runs the ops on tensors that have been checked; fills memory that it is given."""

    def quantize(self, rows: Tensor, packed: Tensor, layout: Table, fold: int) -> None: ...
    def requantize(self, rows: Tensor, held: Tensor, packed: Tensor, layout: Table) -> None: ...
    def dequantize(self, packed: Tensor, out: Tensor, layout: Table, fold: int) -> None: ...
    def reduce_quantize(
        self, packed: Tensor, reduced: Tensor, layout: Table, layout_out: Table, terms: int
    ) -> None: ...
    def reduce_dequantize(self, packed: Tensor, out: Tensor, layout: Table) -> None: ...


class FakeBackend:
    """The backend of fake tensors, which have shapes but no data."""

    def quantize(self, *arguments: object) -> None:
        """Do nothing."""

    requantize = dequantize = reduce_quantize = reduce_dequantize = quantize


def implementations(backend: Callable[[], Backend]) -> dict[str, Callable]:
    """The ops by name: check the arguments, allocate the result, call the backend."""

    def quantize(rows: Tensor, layout: Table, fold: int) -> Tensor:
        _check(("rows", rows, (None, layout[ELEMENTS])), divisor=("fold", fold))
        packed = rows.new_empty((rows.shape[0], layout[PACKED_BYTES]), dtype=torch.uint8)
        backend().quantize(rows, packed, layout, fold)
        return packed

    def requantize(rows: Tensor, held: Tensor, layout: Table) -> Tensor:
        shape = (rows.shape[0], layout[PACKED_BYTES])
        _check(("rows", rows, (None, layout[ELEMENTS])), ("held", held, shape))
        if not {8, RAW}.issuperset(segment.bits for segment in segments_in(layout)):
            raise ValueError("a layout with other codes than INT8: only those keep their scales")
        packed = torch.empty_like(held)
        backend().requantize(rows, held, packed, layout)
        return packed

    def dequantize(packed: Tensor, out: Tensor, layout: Table, fold: int) -> None:
        _check(
            ("packed", packed, (None, layout[PACKED_BYTES])),
            ("out", out, (packed.shape[0], layout[ELEMENTS])),
            divisor=("fold", fold),
        )
        backend().dequantize(packed, out, layout, fold)

    def reduce_quantize(packed: Tensor, layout: Table, layout_out: Table, terms: int) -> Tensor:
        _check(("packed", packed, (None, layout[PACKED_BYTES])), divisor=("terms", terms))
        reduced = packed.new_empty((packed.shape[0] // terms, layout_out[PACKED_BYTES]))
        backend().reduce_quantize(packed, reduced, layout, layout_out, terms)
        return reduced

    def reduce_dequantize(packed: Tensor, out: Tensor, layout: Table) -> None:
        _check(("packed", packed, (None, layout[PACKED_BYTES])), ("out", out, (layout[ELEMENTS],)))
        if packed.shape[0]:
            backend().reduce_dequantize(packed, out, layout)
        else:
            out.zero_()  # the sum of no terms

    functions = (quantize, requantize, dequantize, reduce_quantize, reduce_dequantize)
    return {function.__name__: function for function in functions}


def _check(
    *tensors: tuple[str, Tensor, tuple[int | None, ...]], divisor: tuple[str, int] | None = None
) -> None:
    """Raise TypeError or ValueError unless tensors have their shapes (None: any) and one device.

    divisor: what must divide the rows of the first tensor, and its name.
    """
    first = tensors[0][1]
    for name, tensor, shape in tensors:
        is_packed = name in ("packed", "held")
        if tensor.dtype not in ((torch.uint8,) if is_packed else FLOATS):
            valid = "uint8, as quantize returns it" if is_packed else "bfloat16, float16 or float32"
            raise TypeError(f"{name} is {tensor.dtype}; give {valid}")
        fits = tensor.dim() == len(shape) and tensor.shape[-1] == shape[-1]
        if not fits or shape[0] not in (None, tensor.shape[0]):
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; its layout needs ({expected})"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; give a contiguous tensor")
        if tensor.device != first.device:
            raise ValueError(
                f"packed is on {first.device} and {name} on {tensor.device}; give one device"
            )
    if divisor and (divisor[1] < 1 or first.shape[0] % divisor[1]):
        raise ValueError(f"{divisor[0]} is {divisor[1]}; it must divide the {first.shape[0]} rows")


def _register() -> None:
    for schema in SCHEMAS:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for name, function in implementations(FakeBackend).items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=LIBRARY)
    backends = {
        "CompositeExplicitAutograd": lambda: reference,
        "CPU": cpu.backend,
        "CUDA": cuda.backend,
    }
    for key, backend in backends.items():
        for name, function in implementations(backend).items():
            LIBRARY.impl(name, function, key)


_register()
