"""Rows and layouts for the tests of quantization, and access to the parts of packed rows."""

import hashlib
from functools import lru_cache

import torch
from hypothesis import settings
from hypothesis import strategies as st

from zeropp.quant.packing import (
    BLOCK,
    FLOATS,
    MULTIPLE,
    RAW,
    ROTATED_4,
    RowLayout,
    Segment,
    num_blocks,
)

FEW = settings(max_examples=25, deadline=None, derandomize=True)
EDGES = (0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 511, 513)
RAGGED = (  # elements and bits of each segment
    ((1,), (4,)),
    ((0, 7, 0), (8, 4, 16)),
    ((256, 1, 128), (8, 16, 4)),
    ((3, 257, 129, 5, 4096), (16, 8, 4, 16, 4)),
    ((2049, 31, 0, 383, 2047), (8, 4, 8, 4, 16)),
    ((4101, 17, 2305), (4, 8, 8)),
    ((64, 5, 192, 0, 2048 + 576), (3, 16, 3, 3, 3)),
    ((32, 5, 2048 + 96, 160, 0, 2048 + 64), (ROTATED_4, 16, ROTATED_4, 8, ROTATED_4, ROTATED_4)),
    ((96, 32, 3, 2048 + 160, 256, 4096), (2, 2, 16, 2, 3, 2)),
)
KEPT = 512  # rows of tests that are run for several instruction sets
SPECIAL = (0.0, -0.0, 2.0**-94, -(2.0**-94), 2.0**-95, 1e-40, -1e-45)

widths = st.sampled_from((2, 3, 4, ROTATED_4, 8, RAW))
dtypes = st.sampled_from(FLOATS)
segment_sizes = st.one_of(st.sampled_from(EDGES), st.integers(0, 700))
seeds = st.integers(0, 2**32)


@st.composite
def layouts(draw, bits=widths) -> RowLayout:
    """Any layout of up to four segments."""
    sizes = draw(st.lists(segment_sizes, min_size=1, max_size=4))
    chosen = draw(st.lists(bits, min_size=len(sizes), max_size=len(sizes)))
    fitting = map(fitting_width, sizes, chosen)
    return RowLayout(sizes=tuple(sizes), bits=tuple(fitting), wire=draw(dtypes))


def fitting_width(size: int, bits: int) -> int:
    """`bits`, or 4 if the segment cannot be rotated, or is not whole blocks of 3 bits."""
    return 4 if size % MULTIPLE.get(bits, 1) else bits


def ragged_layouts(wire: torch.dtype) -> list[RowLayout]:
    return [RowLayout(sizes=sizes, bits=bits, wire=wire) for sizes, bits in RAGGED]


def finite_rows(count: int, elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """(count, elements): several magnitudes, ties between steps, zeros, denormals, the largest."""
    generator = torch.Generator().manual_seed(seed)

    def chance(one_in: int) -> torch.Tensor:
        return torch.randint(one_in, (count, elements), generator=generator) == 0

    values = torch.randn(count, elements, generator=generator)
    if elements:
        magnitudes = torch.randint(-7, 5, (count, -(-elements // 200)), generator=generator)
        values *= (10.0**magnitudes).repeat_interleave(200, 1)[:, :elements]
    values = torch.where(chance(9), (values * 16).round() / 16, values)
    for value in (*SPECIAL, *(0.0,) * 5):
        values[chance(40)] = value
    largest = torch.finfo(dtype).max
    for value in (largest, -largest):
        values[chance(3000)] = value
    if seed % 3 == 0:
        values[: count // 2] *= 1e-36
    return values.clamp(-largest, largest).to(dtype)


def any_rows(count: int, elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """`finite_rows` with a NaN or an infinity here and there."""
    return _any_rows(count, elements, dtype, seed).clone()


@lru_cache(KEPT)
def _any_rows(count: int, elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    rows = finite_rows(count, elements, dtype, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for value in (float("nan"), float("inf"), -float("inf")):
        rows[torch.randint(1500, rows.shape, generator=generator) == 0] = value
    return rows


def every_16_bit_number(dtype: torch.dtype) -> torch.Tensor:
    """(1, n): all bit patterns; in fp32 those around each tie between two bf16 numbers."""
    words = torch.arange(1 << 16, dtype=torch.int32)
    if dtype == torch.float32:
        low = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x3000])
        rows = ((words << 16)[:, None] | low.int()).view(dtype).view(1, -1)
    else:
        rows = words.to(torch.int16).view(dtype).view(1, -1)
    return torch.where(rows.isnan(), torch.nan, rows)  # one of its many bit patterns


def scales_of(packed: torch.Tensor, segment: Segment) -> torch.Tensor:
    """(K, n) fp64: the scale of each element of a quantized segment."""
    stop = segment.scales_at + 2 * num_blocks(segment.size, segment.bits)
    scales = packed[:, segment.scales_at : stop].contiguous().view(torch.bfloat16).double()
    return scales.repeat_interleave(BLOCK[segment.bits], 1)[:, : segment.size]


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The numbers as integers: -0 differs from 0, and all NaNs are the same."""
    canonical = torch.where(values.isnan(), torch.nan, values)
    return canonical.view({2: torch.int16, 4: torch.int32}[values.itemsize])


class Bits:
    """Tensors as an argument of a cached function; equal are those of the same types and bits."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tuple(tensor.clone() for tensor in tensors)
        self.digest = hashlib.blake2b()
        for tensor in self.tensors:
            self.digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            self.digest.update(tensor.view(torch.uint8).numpy())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bits) and self.digest.digest() == other.digest.digest()

    def __hash__(self) -> int:
        return hash(self.digest.digest())


def bytes_of(packed: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """The packed rows, with the same bits for every NaN among raw values.

    PyTorch's own conversions differ in the NaN that they produce: 0x7FC0 or 0xFFFF in bf16.
    """
    canonical = packed.clone()
    for segment in layout.segments:
        if segment.bits == RAW:
            part = slice(segment.data_at, segment.data_at + segment.size * layout.wire.itemsize)
            raw = packed[:, part].contiguous().view(layout.wire)
            canonical[:, part] = bits_of(raw).contiguous().view(torch.uint8)
    return canonical
