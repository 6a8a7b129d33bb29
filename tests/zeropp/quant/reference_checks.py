"""Compare kernels with the plain-torch reference on the CPU, byte by byte, on any device."""

import torch

from tests.zeropp.quant.layout_ops import LayoutOps, reference
from tests.zeropp.quant.packed_bytes import bits_of, bytes_of
from zeropp.quant.packing import FLOATS, Layout

UNTOUCHED = 0xCD  # in memory that a kernel must fill, including its gaps


def assert_same_bytes(packed: torch.Tensor, expected: torch.Tensor, layout: Layout) -> None:
    assert torch.equal(bytes_of(packed.cpu(), layout), bytes_of(expected, layout)), layout


def copied(values: torch.Tensor, device: str, shift: int) -> torch.Tensor:
    """A copy on a device, `shift` elements after the start of its memory."""
    memory = torch.empty(values.numel() + shift, dtype=values.dtype, device=device)
    return memory[shift:].view(values.shape).copy_(values)


def check_rows(
    kernels: LayoutOps, rows: torch.Tensor, layout: Layout, fold: int, device: str = "cpu",
    shift: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Quantize and, into every type, dequantize; returns the packed rows, on the CPU."""
    packed = torch.empty(len(rows), layout.packed_bytes, dtype=torch.uint8, device=device)
    kernels.quantize_into(copied(rows, device, shift), packed.fill_(UNTOUCHED), layout, fold)
    right = reference.quantize(rows, layout, fold)
    assert_same_bytes(packed, right, layout)
    for dtype in FLOATS:
        expected = torch.full(rows.shape, 7, dtype=dtype)
        own = copied(expected, device, shift)
        kernels.dequantize(packed, own, layout, fold)
        reference.dequantize(right, expected, layout, fold)
        assert torch.equal(bits_of(own.cpu()), bits_of(expected)), dtype
    return right


def check_sums(
    kernels: LayoutOps, packed: torch.Tensor, layout: Layout, onto: Layout, terms: int,
    device: str = "cpu", shift: int = 0,
) -> None:  # fmt: skip
    """Sums of `terms` rows of `packed`, which is on the CPU, packed again; sums of all of them."""
    on_device = packed.to(device)
    count = len(packed) // terms
    reduced = torch.empty(count, onto.packed_bytes, dtype=torch.uint8, device=device)
    kernels.reduce_quantize_into(on_device, reduced.fill_(UNTOUCHED), layout, onto)
    assert_same_bytes(reduced, reference.reduce_quantize(packed, layout, onto, terms), onto)
    for dtype in FLOATS:
        expected = torch.full((layout.elements,), 7, dtype=dtype)
        own = copied(expected, device, shift)
        kernels.reduce_dequantize(on_device, own, layout)
        reference.reduce_dequantize(packed, expected, layout)
        assert torch.equal(bits_of(own.cpu()), bits_of(expected)), dtype


def other_bits(layout: Layout) -> Layout:
    """The same sizes with every width exchanged for another."""
    other = {8: 4, 4: 16, 16: 8}
    bits = tuple(other[width] for width in layout.bits)
    return Layout(sizes=layout.sizes, bits=bits, wire=layout.wire)


def many_segments(count: int, wire: torch.dtype) -> Layout:
    """Segments of all widths, as many as may take several launches of a GPU's kernels."""
    sizes = (7, 0, 256, 1025, 16, 129, 1000, 64, 1)
    return Layout(
        sizes=tuple(sizes[i % len(sizes)] for i in range(count)),
        bits=tuple((8, 16, 4, 4, 8)[i % 5] for i in range(count)),
        wire=wire,
    )


def with_dirty_gaps(packed: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A copy with ones in bytes and half bytes that hold no number."""
    holds = torch.zeros(layout.packed_bytes, dtype=torch.uint8)
    width = layout.wire.itemsize
    for segment in layout.segments:
        if segment.bits == 16:
            holds[segment.data_at : segment.data_at + segment.size * width] = 0xFF
            continue
        blocks = -(-segment.size // {8: 256, 4: 128}[segment.bits])
        holds[segment.scales_at : segment.scales_at + 2 * blocks] = 0xFF
        holds[segment.data_at : segment.data_at + segment.size * segment.bits // 8] = 0xFF
        if segment.size * segment.bits % 8:
            holds[segment.data_at + segment.size // 2] = 0x0F
    return packed & holds | 0xA5 & ~holds
