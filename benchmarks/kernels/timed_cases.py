"""Cases for the ops: calls on preallocated memory, expected output, and bytes moved.

quantize_kernels.py verifies and times them. Cases are those of a training step:
K = `ROWS` rows of weights or gradients, C = elements / K.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zeropp.quant import reference
from zeropp.quant.ops import Backend
from zeropp.quant.packing import CODE_BITS, RAW, ROTATED_4, RowLayout, is_rotated

ROWS = 8  # ranks that a gradient is cut for
SEED = 7
MOVED = 0.01  # of an element's standard deviation: about a third of a code, between two messages
VECTORS = 8  # of a transformer block: biases and gains, which are sent unchanged
MATRICES = (3, 1, 4, 4)  # of a transformer block, in units of hidden size squared


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel on inputs of one size.

    run: call the kernel, which fills `outputs`. expected: inputs on any device -> what `outputs`
    must hold, by the reference. num_bytes: read and written. op: its name.
    """

    name: str
    op: str
    run: Callable[[], object]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    expected: Callable[..., tuple[Tensor, ...]]
    num_bytes: int


def _case(
    backend: Backend, op: str, name: str, inputs: tuple[Tensor, ...], out: Tensor,
    *others: object,
) -> Case:  # fmt: skip
    """A case of `op`, a function of a backend and of the reference alike.

    It takes the inputs, the output and `others`.
    """

    def expected(*inputs: Tensor) -> tuple[Tensor, ...]:
        result = torch.empty(out.shape, dtype=out.dtype, device=inputs[0].device)
        getattr(reference, op)(*inputs, result, *others)
        return (result,)

    return Case(
        name=name, op=op, run=lambda: getattr(backend, op)(*inputs, out, *others), inputs=inputs,
        outputs=(out,), expected=expected,
        num_bytes=sum(tensor.nbytes for tensor in (*inputs, out)),
    )  # fmt: skip


def cases(backend: Backend, elements: int, device: torch.device) -> Iterator[Case]:
    """The ops of a step's weights and gradients by a backend, on `elements` in all.

    A row must be whole blocks of 3 bits.
    """
    columns = elements // ROWS
    generator = torch.Generator(device).manual_seed(SEED)
    fp32 = torch.randn(ROWS, columns, generator=generator, device=device)
    bf16 = fp32.to(torch.bfloat16)
    int8, int4, rotated4, int3, int2 = (
        RowLayout(sizes=(columns,), bits=(bits,), wire=torch.bfloat16)
        for bits in (8, 4, ROTATED_4, 3, 2)
    )
    yield _quantize(backend, "bf16 -> INT8", bf16, int8)
    yield _quantize(backend, "bf16 -> INT8, 12 segments", bf16, block_layout(columns))
    yield _dequantize(backend, "INT8 -> bf16", bf16, int8)
    yield _quantize(backend, "fp32 -> INT4, reordered", fp32, int4, fold=2)
    yield _dequantize(backend, "INT4 -> bf16", bf16, int4)
    packed8, packed4 = (_packed(backend, bf16, layout) for layout in (int8, int4))
    for terms in (2, 4, 8):
        yield _reduce_quantize(backend, packed8, int8, int4, terms)
    yield _reduce_dequantize(backend, packed4, int4)
    for rotated, name in ((rotated4, "INT4"), (int3, "INT3")):
        yield _quantize(backend, f"fp32 -> rotated -> {name}", fp32, rotated)
        yield _reduce_quantize(backend, packed8, int8, rotated, 4)
        yield _reduce_dequantize(backend, _packed(backend, fp32, rotated), rotated)
    yield _quantize(backend, "fp32 -> rotated -> INT2", fp32, int2)
    yield _dequantize(backend, "rotated INT2 -> fp32", fp32, int2)
    packed = _packed(backend, fp32, rotated4)
    yield _reduce_quantize(backend, packed, rotated4, rotated4, 4)


def requantize_cases(backend: Backend, elements: int, device: torch.device) -> Iterator[Case]:
    """Weights in bf16 and fp32 after a step, by the scales of the codes that are held of them."""
    columns = elements // ROWS
    generator = torch.Generator(device).manual_seed(SEED)
    weights, change = torch.randn(2, ROWS, columns, generator=generator, device=device)
    layout = RowLayout(sizes=(columns,), bits=(8,), wire=torch.bfloat16)
    held = torch.empty(ROWS, layout.packed_bytes, dtype=torch.uint8, device=device)
    reference.quantize(weights, held, layout.table, 1)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        rows = (weights + MOVED * change).to(dtype)
        case = _case(
            backend, "requantize", f"{name} -> INT8 by scales that stay",
            (rows, held), torch.empty_like(held), layout.table,
        )  # fmt: skip
        scales = ROWS * layout.segments[0].data_at  # all that is read of what is held
        yield replace(case, num_bytes=rows.nbytes + held.nbytes + scales)


def block_layout(columns: int) -> RowLayout:
    """The 12 parameters of a GPT-2 block in a row of `columns`: INT8 matrices, raw vectors."""
    vector = math.isqrt(columns // sum(MATRICES))
    unit = (columns - VECTORS * vector) // sum(MATRICES)
    sizes = [count * unit for count in MATRICES]
    sizes[-1] += columns - VECTORS * vector - sum(sizes)
    return RowLayout(
        sizes=(*sizes, *(VECTORS * (vector,))),
        bits=(*(len(sizes) * (8,)), *(VECTORS * (RAW,))),
        wire=torch.bfloat16,
    )


def _packed(backend: Backend, rows: Tensor, layout: RowLayout) -> Tensor:
    packed = rows.new_empty((len(rows), layout.packed_bytes), dtype=torch.uint8)
    backend.quantize(rows, packed, layout.table, 1)
    return packed


def _quantize(backend: Backend, name: str, rows: Tensor, layout: RowLayout, fold: int = 1) -> Case:
    packed = torch.ones(ROWS, layout.packed_bytes, dtype=torch.uint8, device=rows.device)
    return _case(backend, "quantize", name, (rows,), packed, layout.table, fold)


def _dequantize(backend: Backend, name: str, rows: Tensor, layout: RowLayout) -> Case:
    packed, out = _packed(backend, rows, layout), torch.ones_like(rows)
    return _case(backend, "dequantize", name, (packed,), out, layout.table, 1)


def _reduce_quantize(
    backend: Backend, packed: Tensor, layout: RowLayout, layout_out: RowLayout, terms: int
) -> Case:
    reduced = packed.new_ones(ROWS // terms, layout_out.packed_bytes)
    name = f"{terms} x {_format(layout)} -> sum -> {_format(layout_out)}"
    others = layout.table, layout_out.table, terms
    return _case(backend, "reduce_quantize", name, (packed,), reduced, *others)


def _reduce_dequantize(backend: Backend, packed: Tensor, layout: RowLayout) -> Case:
    out = torch.ones(layout.elements, device=packed.device)
    name = f"{ROWS} x {_format(layout)} -> sum -> fp32"
    return _case(backend, "reduce_dequantize", name, (packed,), out, layout.table)


def _format(layout: RowLayout) -> str:
    bits = layout.bits[0]
    return f"{'rotated ' * is_rotated(bits)}INT{CODE_BITS[bits]}"
