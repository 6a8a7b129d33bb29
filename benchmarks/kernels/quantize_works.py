"""What benchmarks/kernels/quantize_kernels.py times: each quantization kernel on one size, its plain-torch twin."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from zeropp.quant.library import Kernels

from benchmarks.kernels import quantizers
from zeropp.quant import reference
from zeropp.quant.packing import RAW, Layout

ROWS = 8  # ranks that a gradient is cut for
SEED = 7
VECTORS = 8  # of a transformer block: biases and gains, which travel as they are
MATRICES = (3, 1, 4, 4)  # of a transformer block, in units of hidden size squared

Peers = Callable[[], Iterator[quantizers.Peer]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A kernel, the same in plain torch, and the bytes read and written."""

    name: str
    run: Callable[[], object]
    wrote: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    plain: Callable[..., tuple[Tensor, ...]]  # inputs, on any device -> what `wrote` must hold
    num_bytes: int
    peers: Peers = partial(iter, ())


def works(kernels: Kernels, elements: int, device: torch.device) -> Iterator[Work]:
    """The kernels of a step's weights and gradients, over `ROWS` rows of `elements` in all."""
    columns = elements // ROWS
    generator = torch.Generator(device).manual_seed(SEED)
    wide = torch.randn(ROWS, columns, generator=generator, device=device)
    rows = wide.to(torch.bfloat16)
    int8, int4 = (Layout(sizes=(columns,), bits=(bits,), wire=torch.bfloat16) for bits in (8, 4))
    yield quantizing(kernels, "bf16 -> INT8", rows, int8)
    yield quantizing(kernels, "bf16 -> INT8, 12 segments", rows, block_layout(columns))
    yield dequantizing(kernels, "INT8 -> bf16", rows, int8)
    yield quantizing(kernels, "fp32 -> INT4, reordered", wide, int4, fold=2)
    yield dequantizing(kernels, "INT4 -> bf16", rows, int4)
    packed8, packed4 = (kernels.quantize(rows, layout, 1) for layout in (int8, int4))
    for terms in (2, 4, 8):
        yield reducing(kernels, packed8, (int8, int4), terms)
    yield summing(kernels, packed4, int4)


def quantizing(
    kernels: Kernels, name: str, rows: Tensor, layout: Layout, fold: int = 1
) -> Work:
    """Rows of numbers to packed rows."""
    packed = torch.ones(ROWS, layout.packed_bytes, dtype=torch.uint8, device=rows.device)
    whole = len(layout.sizes) == 1
    return Work(
        name=name, wrote=(packed,), inputs=(rows,), num_bytes=rows.nbytes + packed.nbytes,
        run=lambda: kernels.quantize_into(rows, packed, layout, fold),
        plain=lambda rows: (reference.quantize(rows, layout, fold),),
        peers=partial(quantizers.quantizing, rows, layout.bits[0]) if whole else partial(iter, ()),
    )  # fmt: skip


def dequantizing(kernels: Kernels, name: str, rows: Tensor, layout: Layout) -> Work:
    """Packed rows of `rows` back to numbers of their dtype."""
    packed, out = kernels.quantize(rows, layout, 1), torch.ones_like(rows)

    def plain(packed: Tensor) -> tuple[Tensor, ...]:
        found = packed.new_empty(rows.shape, dtype=rows.dtype)
        reference.dequantize(packed, found, layout, 1)
        return (found,)

    return Work(
        name=name, wrote=(out,), inputs=(packed,), plain=plain,
        num_bytes=packed.nbytes + out.nbytes,
        run=lambda: kernels.dequantize(packed, out, layout, 1),
        peers=partial(quantizers.dequantizing, rows, layout.bits[0]),
    )  # fmt: skip


def reducing(
    kernels: Kernels, packed: Tensor, layouts: tuple[Layout, Layout], terms: int
) -> Work:
    """Sums of `terms` packed rows each, packed again."""
    before, after = layouts
    shape = (ROWS // terms, after.packed_bytes)
    sums = torch.ones(shape, dtype=torch.uint8, device=packed.device)
    return Work(
        name=f"{terms} x INT8 -> sum -> INT4", wrote=(sums,), inputs=(packed,),
        num_bytes=packed.nbytes + sums.nbytes,
        run=lambda: kernels.reduce_quantize_into(packed, sums, before, after),
        plain=lambda packed: (reference.reduce_quantize(packed, before, after, terms),),
    )  # fmt: skip


def summing(kernels: Kernels, packed: Tensor, layout: Layout) -> Work:
    """The sum of all packed rows in fp32."""
    total = torch.ones(layout.elements, device=packed.device)

    def plain(packed: Tensor) -> tuple[Tensor, ...]:
        found = packed.new_empty(layout.elements, dtype=torch.float32)
        reference.reduce_dequantize(packed, found, layout)
        return (found,)

    return Work(
        name=f"{ROWS} x INT4 -> sum -> fp32", wrote=(total,), inputs=(packed,), plain=plain,
        num_bytes=packed.nbytes + total.nbytes,
        run=lambda: kernels.reduce_dequantize(packed, total, layout),
    )  # fmt: skip


def block_layout(columns: int) -> Layout:
    """The twelve parameters of a GPT-2 block in a row of `columns`: INT8 matrices, raw vectors."""
    vector = math.isqrt(columns // sum(MATRICES))
    unit = (columns - VECTORS * vector) // sum(MATRICES)
    sizes = [each * unit for each in MATRICES]
    sizes[-1] += columns - VECTORS * vector - sum(sizes)
    return Layout(
        sizes=(*sizes, *(VECTORS * (vector,))),
        bits=(*(len(sizes) * (8,)), *(VECTORS * (RAW,))),
        wire=torch.bfloat16,
    )
