"""Cases for the ops: calls on preallocated memory, expected output, and bytes moved.

quantize_kernels.py verifies and times them. Cases are those of a training step:
K = `ROWS` rows of weights or gradients, C = elements / K.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.quant import code_step_reference, reference
from zeropp.quant.code_step_ops import StepBackend
from zeropp.quant.code_steps import REACHES, StepLayout
from zeropp.quant.ops import Backend
from zeropp.quant.packing import RAW, RowLayout

ROWS = 8  # ranks that a gradient is cut for
SEED = 7
MOVED = 0.01  # of an element's standard deviation: about a third of a code, between two messages
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
    """The ops of a step's weights and gradients by a backend, on `elements` in all.

    A row must be whole blocks of 3 bits.
    """
    columns = elements // ROWS
    generator = torch.Generator(device).manual_seed(SEED)
    fp32 = torch.randn(ROWS, columns, generator=generator, device=device)
    bf16 = fp32.to(torch.bfloat16)
    int8, int4, int3 = (
        RowLayout(sizes=(columns,), bits=(bits,), wire=torch.bfloat16) for bits in (8, 4, 3)
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
    yield _quantize(backend, "fp32 -> rotated -> INT3", fp32, int3)
    yield _reduce_quantize(backend, packed8, int8, int3, 4)
    yield _reduce_dequantize(backend, _packed(backend, fp32, int3), int3)


def code_step_cases(backend: StepBackend, elements: int, device: torch.device) -> Iterator[Case]:
    """Finding the steps of codes of weights in bf16 and fp32, and applying them."""
    columns = elements // ROWS
    generator = torch.Generator(device).manual_seed(SEED)
    weights, change = torch.randn(2, ROWS, columns, generator=generator, device=device)
    layout = RowLayout(sizes=(columns,), bits=(8,), wire=torch.bfloat16)
    packed = torch.empty(ROWS, layout.packed_bytes, dtype=torch.uint8, device=device)
    reference.quantize(weights, packed, layout.table, 1)
    moved = weights + MOVED * change
    for reach in REACHES:
        message = StepLayout(rows=layout, reach=reach)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            yield _code_steps(backend, name, moved.to(dtype), packed, message)
        yield _apply_code_steps(backend, moved, packed, message)


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

    def expected(rows: Tensor) -> tuple[Tensor, ...]:
        result = rows.new_empty(packed.shape, dtype=torch.uint8)
        reference.quantize(rows, result, layout.table, fold)
        return (result,)

    has_peers = len(layout.sizes) == 1 and layout.bits[0] != 3
    return Case(
        name=name, op="quantize", inputs=(rows,), outputs=(packed,), expected=expected,
        run=lambda: backend.quantize(rows, packed, layout.table, fold),
        num_bytes=rows.nbytes + packed.nbytes,
        values=rows if has_peers else None, bits=layout.bits[0] if has_peers else None,
    )  # fmt: skip


def _dequantize(backend: Backend, name: str, rows: Tensor, layout: RowLayout) -> Case:
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
    backend: Backend, packed: Tensor, layout: RowLayout, layout_out: RowLayout, terms: int
) -> Case:
    shape = (ROWS // terms, layout_out.packed_bytes)
    reduced = torch.ones(shape, dtype=torch.uint8, device=packed.device)

    def expected(packed: Tensor) -> tuple[Tensor, ...]:
        result = packed.new_empty(shape)
        reference.reduce_quantize(packed, result, layout.table, layout_out.table, terms)
        return (result,)

    return Case(
        name=f"{terms} x INT8 -> sum -> INT{layout_out.bits[0]}", op="reduce_quantize",
        inputs=(packed,), outputs=(reduced,), expected=expected,
        num_bytes=packed.nbytes + reduced.nbytes,
        run=lambda: backend.reduce_quantize(
            packed, reduced, layout.table, layout_out.table, terms
        ),
    )  # fmt: skip


def _reduce_dequantize(backend: Backend, packed: Tensor, layout: RowLayout) -> Case:
    out = torch.ones(layout.elements, device=packed.device)

    def expected(packed: Tensor) -> tuple[Tensor, ...]:
        result = packed.new_empty(layout.elements, dtype=torch.float32)
        reference.reduce_dequantize(packed, result, layout.table)
        return (result,)

    return Case(
        name=f"{ROWS} x INT{layout.bits[0]} -> sum -> fp32", op="reduce_dequantize",
        inputs=(packed,), outputs=(out,), expected=expected, num_bytes=packed.nbytes + out.nbytes,
        run=lambda: backend.reduce_dequantize(packed, out, layout.table),
    )  # fmt: skip


def _code_steps(
    backend: StepBackend, name: str, rows: Tensor, packed: Tensor, message: StepLayout
) -> Case:
    messages = torch.ones(ROWS, message.num_bytes, dtype=torch.uint8, device=rows.device)

    def expected(rows: Tensor, packed: Tensor) -> tuple[Tensor, ...]:
        result = packed.new_empty(messages.shape)
        code_step_reference.code_steps(rows, packed, result, message.table)
        return (result,)

    return Case(
        name=f"{name}, INT8 -> steps, reach {message.reach}", op="code_steps",
        inputs=(rows, packed), outputs=(messages,), expected=expected,
        run=lambda: backend.code_steps(rows, packed, messages, message.table),
        num_bytes=rows.nbytes + packed.nbytes + messages.nbytes,
    )  # fmt: skip


def _apply_code_steps(
    backend: StepBackend, rows: Tensor, packed: Tensor, message: StepLayout
) -> Case:
    """Applied again and again, the codes go on and wrap around, in the same time."""
    messages = torch.empty(ROWS, message.num_bytes, dtype=torch.uint8, device=rows.device)
    backend.code_steps(rows, packed, messages, message.table)
    moved = packed.clone()

    def expected(messages: Tensor, packed: Tensor) -> tuple[Tensor, ...]:
        result = packed.clone()
        code_step_reference.apply_code_steps(messages, result, message.table)
        return (result,)

    return Case(
        name=f"steps, reach {message.reach} -> INT8", op="apply_code_steps",
        inputs=(messages, packed), outputs=(moved,), expected=expected,
        run=lambda: backend.apply_code_steps(messages, moved, message.table),
        num_bytes=messages.nbytes + 2 * packed.nbytes,
    )  # fmt: skip
