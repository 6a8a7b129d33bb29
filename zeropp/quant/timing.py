"""Benchmark cases for the ops: calls on preallocated memory, expected output, and bytes moved.

benchmarks/kernels/quantize_kernels.py verifies and times them. Cases are those of a training step:
K = `ROWS` rows of weights or gradients, C = elements / K.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.quant import reference
from zeropp.quant.ops import Backend
from zeropp.quant.packing import RAW, Layout

ROWS = 8  # ranks that a gradient is cut for
SEED = 7
VECTORS = 8  # of a transformer block: biases and gains, which are sent unchanged
MATRICES = (3, 1, 4, 4)  # of a transformer block, in units of hidden size squared


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel on inputs of one size.

    run: call the kernel, which fills `outputs`. expected: inputs on any device -> what `outputs`
    must hold, by the reference. num_bytes: read and written. op: its name. values, bits: what other
    libraries could quantize for comparison, if they can do what the case does.
    """

    name: str
    op: str
    run: Callable[[], object]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    expected: Callable[..., tuple[Tensor, ...]]
    num_bytes: int
    values: Tensor | None = None
    bits: int | None = None


def cases(backend: Backend, elements: int, device: torch.device) -> Iterator[Case]:
    """The ops of a step's weights and gradients by a backend, on `elements` in all."""
    columns = elements // ROWS
    generator = torch.Generator(device).manual_seed(SEED)
    fp32 = torch.randn(ROWS, columns, generator=generator, device=device)
    bf16 = fp32.to(torch.bfloat16)
    int8, int4 = (Layout(sizes=(columns,), bits=(bits,), wire=torch.bfloat16) for bits in (8, 4))
    yield _quantize(backend, "bf16 -> INT8", bf16, int8)
    yield _quantize(backend, "bf16 -> INT8, 12 segments", bf16, block_layout(columns))
    yield _dequantize(backend, "INT8 -> bf16", bf16, int8)
    yield _quantize(backend, "fp32 -> INT4, reordered", fp32, int4, fold=2)
    yield _dequantize(backend, "INT4 -> bf16", bf16, int4)
    packed8, packed4 = (_packed(backend, bf16, layout) for layout in (int8, int4))
    for terms in (2, 4, 8):
        yield _reduce_quantize(backend, packed8, int8, int4, terms)
    yield _reduce_dequantize(backend, packed4, int4)


def block_layout(columns: int) -> Layout:
    """The 12 parameters of a GPT-2 block in a row of `columns`: INT8 matrices, raw vectors."""
    vector = math.isqrt(columns // sum(MATRICES))
    unit = (columns - VECTORS * vector) // sum(MATRICES)
    sizes = [count * unit for count in MATRICES]
    sizes[-1] += columns - VECTORS * vector - sum(sizes)
    return Layout(
        sizes=(*sizes, *(VECTORS * (vector,))),
        bits=(*(len(sizes) * (8,)), *(VECTORS * (RAW,))),
        wire=torch.bfloat16,
    )


def _packed(backend: Backend, rows: Tensor, layout: Layout) -> Tensor:
    packed = rows.new_empty((len(rows), layout.packed_bytes), dtype=torch.uint8)
    backend.quantize(rows, packed, layout.table, 1)
    return packed


def _quantize(backend: Backend, name: str, rows: Tensor, layout: Layout, fold: int = 1) -> Case:
    packed = torch.ones(ROWS, layout.packed_bytes, dtype=torch.uint8, device=rows.device)

    def expected(rows: Tensor) -> tuple[Tensor, ...]:
        result = rows.new_empty(packed.shape, dtype=torch.uint8)
        reference.quantize(rows, result, layout.table, fold)
        return (result,)

    one_segment = len(layout.sizes) == 1
    return Case(
        name=name, op="quantize", inputs=(rows,), outputs=(packed,), expected=expected,
        run=lambda: backend.quantize(rows, packed, layout.table, fold),
        num_bytes=rows.nbytes + packed.nbytes,
        values=rows if one_segment else None, bits=layout.bits[0] if one_segment else None,
    )  # fmt: skip


def _dequantize(backend: Backend, name: str, rows: Tensor, layout: Layout) -> Case:
    packed, out = _packed(backend, rows, layout), torch.ones_like(rows)

    def expected(packed: Tensor) -> tuple[Tensor, ...]:
        result = packed.new_empty(out.shape, dtype=out.dtype)
        reference.dequantize(packed, result, layout.table, 1)
        return (result,)

    return Case(
        name=name, op="dequantize", inputs=(packed,), outputs=(out,), expected=expected,
        run=lambda: backend.dequantize(packed, out, layout.table, 1),
        num_bytes=packed.nbytes + out.nbytes, values=rows, bits=layout.bits[0],
    )  # fmt: skip


def _reduce_quantize(
    backend: Backend, packed: Tensor, layout: Layout, layout_out: Layout, terms: int
) -> Case:
    shape = (ROWS // terms, layout_out.packed_bytes)
    reduced = torch.ones(shape, dtype=torch.uint8, device=packed.device)

    def expected(packed: Tensor) -> tuple[Tensor, ...]:
        result = packed.new_empty(shape)
        reference.reduce_quantize(packed, result, layout.table, layout_out.table, terms)
        return (result,)

    return Case(
        name=f"{terms} x INT8 -> sum -> INT4", op="reduce_quantize", inputs=(packed,),
        outputs=(reduced,), expected=expected, num_bytes=packed.nbytes + reduced.nbytes,
        run=lambda: backend.reduce_quantize(
            packed, reduced, layout.table, layout_out.table, terms
        ),
    )  # fmt: skip


def _reduce_dequantize(backend: Backend, packed: Tensor, layout: Layout) -> Case:
    out = torch.ones(layout.elements, device=packed.device)

    def expected(packed: Tensor) -> tuple[Tensor, ...]:
        result = packed.new_empty(layout.elements, dtype=torch.float32)
        reference.reduce_dequantize(packed, result, layout.table)
        return (result,)

    return Case(
        name=f"{ROWS} x INT4 -> sum -> fp32", op="reduce_dequantize", inputs=(packed,),
        outputs=(out,), expected=expected, num_bytes=packed.nbytes + out.nbytes,
        run=lambda: backend.reduce_dequantize(packed, out, layout.table),
    )  # fmt: skip
