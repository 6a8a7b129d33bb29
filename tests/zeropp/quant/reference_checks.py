"""Compare kernels with the plain-torch reference on the CPU, byte by byte, on any device.

What the reference gives is kept for the next instruction set.
"""

from functools import lru_cache

import torch

from tests.zeropp.quant.layout_ops import LayoutOps, reference
from tests.zeropp.quant.packed_bytes import Bits, bits_of, bytes_of
from zeropp.quant.packing import BLOCK, CODE_BITS, FLOATS, ROTATED, ROTATED_4, RowLayout, num_blocks

KEPT = 1024  # results of the reference, most of them a few KB
UNTOUCHED = 0xCD  # in memory that a kernel must fill, including its gaps


def assert_same_bytes(packed: torch.Tensor, expected: torch.Tensor, layout: RowLayout) -> None:
    assert torch.equal(bytes_of(packed.cpu(), layout), bytes_of(expected, layout)), layout


def copied(values: torch.Tensor, device: str, shift: int) -> torch.Tensor:
    """A copy on a device, `shift` elements after the start of its memory."""
    memory = torch.empty(values.numel() + shift, dtype=values.dtype, device=device)
    return memory[shift:].view(values.shape).copy_(values)


def check_rows(
    kernels: LayoutOps, rows: torch.Tensor, layout: RowLayout, fold: int = 1, shift: int = 0
) -> torch.Tensor:
    """Quantize and, into every type, dequantize; returns the packed rows, on the CPU."""
    packed = torch.empty(len(rows), layout.packed_bytes, dtype=torch.uint8, device=kernels.device)
    kernels.quantize_into(
        copied(rows, kernels.device, shift), packed.fill_(UNTOUCHED), layout, fold
    )
    right, numbers = expected_rows(Bits(rows), layout, fold)
    assert_same_bytes(packed, right, layout)
    for dtype, expected in zip(FLOATS, numbers, strict=True):
        own = copied(torch.full_like(expected, 7), kernels.device, shift)
        kernels.dequantize(packed, own, layout, fold)
        assert torch.equal(bits_of(own.cpu()), bits_of(expected)), dtype
    return right


def check_requantized(
    kernels: LayoutOps, rows: torch.Tensor, layout: RowLayout, shift: int = 0
) -> None:
    """Quantize by the scales that were held, again and again, as the numbers change."""
    bits = tuple(16 if bits == 16 else 8 for bits in layout.bits)
    layout = RowLayout(sizes=layout.sizes, bits=bits, wire=layout.wire)
    held = reference.quantize(rows, layout, 1)
    for factor in (1.004, 0.98, 0.3, 1.0, 0.01, 5.0, 0.0, 1.5, float("nan"), 1.0):
        values = (rows.float().nan_to_num(0.0) * factor).clamp(-6e4, 6e4).to(rows.dtype)
        right = torch.empty_like(held)
        reference.requantize_into(values, held, right, layout)
        packed = torch.empty_like(held, device=kernels.device).fill_(UNTOUCHED)
        own, held = copied(values, kernels.device, shift), held.to(kernels.device)
        kernels.requantize_into(own, held, packed, layout)
        if factor == factor:  # the bits of a NaN among raw values are not defined
            assert_same_bytes(packed, right, layout)
        held = right


def check_sums(
    kernels: LayoutOps, packed: torch.Tensor, layout: RowLayout, onto: RowLayout, terms: int,
    shift: int = 0,
) -> None:  # fmt: skip
    """Sums of `terms` rows of `packed`, which is on the CPU, packed again; sums of all of them."""
    on_device = packed.to(kernels.device)
    count = len(packed) // terms
    reduced = torch.empty(count, onto.packed_bytes, dtype=torch.uint8, device=kernels.device)
    kernels.reduce_quantize_into(on_device, reduced.fill_(UNTOUCHED), layout, onto)
    right, numbers = expected_sums(Bits(packed), layout, onto, terms)
    assert_same_bytes(reduced, right, onto)
    for dtype, expected in zip(FLOATS, numbers, strict=True):
        own = copied(torch.full_like(expected, 7), kernels.device, shift)
        kernels.reduce_dequantize(on_device, own, layout)
        assert torch.equal(bits_of(own.cpu()), bits_of(expected)), dtype


@lru_cache(KEPT)
def expected_rows(
    rows: Bits, layout: RowLayout, fold: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The reference's packed rows, and their numbers in every type."""
    (values,) = rows.tensors
    packed = reference.quantize(values, layout, fold)
    numbers = [torch.full(values.shape, 7, dtype=dtype) for dtype in FLOATS]
    for out in numbers:
        reference.dequantize(packed, out, layout, fold)
    return packed, numbers


@lru_cache(KEPT)
def expected_sums(
    rows: Bits, layout: RowLayout, onto: RowLayout, terms: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The reference's sums of `terms` packed rows, packed again, and of all rows in every type."""
    (packed,) = rows.tensors
    numbers = [torch.full((layout.elements,), 7, dtype=dtype) for dtype in FLOATS]
    for out in numbers:
        reference.reduce_dequantize(packed, out, layout)
    return reference.reduce_quantize(packed, layout, onto, terms), numbers


def other_bits(layout: RowLayout) -> RowLayout:
    """The same sizes with every width exchanged for another."""
    bits = tuple(map(_other_width, layout.sizes, layout.bits))
    return RowLayout(sizes=layout.sizes, bits=bits, wire=layout.wire)


def _other_width(size: int, bits: int) -> int:
    of_8_bits = 3 if size % BLOCK[3] == 0 else ROTATED_4 if size % ROTATED == 0 else 4
    return {8: of_8_bits, 4: 16, 3: ROTATED_4, ROTATED_4: 2, 2: 8, 16: 8}[bits]


def many_segments(count: int, wire: torch.dtype) -> RowLayout:
    """Segments of all widths, as many as may take several launches of a GPU's kernels."""
    sizes = (7, 0, 256, 1025, 16, 129, 1000, 64, 1, 96)
    chosen = [sizes[i % len(sizes)] for i in range(count)]
    rotated = {64: 3, 96: ROTATED_4}
    widths = [rotated.get(size, (8, 16, 4, 4, 8)[i % 5]) for i, size in enumerate(chosen)]
    return RowLayout(sizes=tuple(chosen), bits=tuple(widths), wire=wire)


def with_dirty_gaps(packed: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """A copy with ones in bytes and half bytes that hold no number."""
    holds = torch.zeros(layout.packed_bytes, dtype=torch.uint8)
    width = layout.wire.itemsize
    for segment in layout.segments:
        if segment.bits == 16:
            holds[segment.data_at : segment.data_at + segment.size * width] = 0xFF
            continue
        blocks = num_blocks(segment.size, segment.bits)
        holds[segment.scales_at : segment.scales_at + 2 * blocks] = 0xFF
        bits = segment.size * CODE_BITS[segment.bits]
        holds[segment.data_at : segment.data_at + bits // 8] = 0xFF
        if bits % 8:
            holds[segment.data_at + segment.size // 2] = 0x0F
    return packed & holds | 0xA5 & ~holds
