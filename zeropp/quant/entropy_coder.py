"""Packed rows, coded close to their entropy where they are: the same bytes on CPUs and GPUs.

csrc/messages/math.h says what a message is. Shapes: N rows of P bytes, a multiple of 16, which
begin at multiples of 16 bytes. On GPUs, kernels run on the current stream and nothing is waited
for: lengths and status stay on the device. Raises LibraryError where csrc/ was not built.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.native.kernels import cpu_library, cuda_library
from zeropp.quant.cpu import CpuKernels
from zeropp.quant.cuda import CudaKernels
from zeropp.quant.kernels import Kernels
from zeropp.quant.packing import ALIGN, RAW, RowLayout

HEADER = 16  # bytes
COUNTS, SCRATCH = 2048, 24 << 10  # bytes of memory for a row besides its own
BYTES, THREES, DIFFERENCES = range(3)  # in the order of csrc/messages/math.h, as STATUS is
STATUS = ("sound", "a damaged header", "damaged tables", "a damaged tile")


@dataclass(frozen=True)
class Coding:
    """What sender and receiver know of a row.

    size: P. codes: where its codes begin and end, in bytes. has_threes: whether they have three
    bits. is_difference: whether it is coded as differences from a row that the receiver holds.
    """

    size: int
    codes: tuple[int, int]
    has_threes: bool = False
    is_difference: bool = False

    @property
    def kind(self) -> int:
        return DIFFERENCES if self.is_difference else THREES if self.has_threes else BYTES


def coding_of(layout: RowLayout, *, is_difference: bool = False) -> Coding:
    """Return how rows of a layout are coded.

    Of mixed widths, codes of three bits are told apart from others if most of the row is one run of
    them.
    """
    size, runs = layout.packed_bytes, [(0, 0)]
    if is_difference:
        return Coding(size, (0, size), is_difference=True)
    for each in layout.segments:
        if each.bits == 3:
            begin = runs.pop()[0] if runs[-1][1] == each.data_at else each.data_at
            runs.append((begin, each.data_at + each.size * 3 // 8))
    longest = max(runs, key=lambda run: run[1] - run[0])
    if 2 * (longest[1] - longest[0]) > size:
        return Coding(size, longest, has_threes=True)
    return Coding(size, (min([e.data_at for e in layout.segments if e.bits != RAW] or [0]), size))


def coded_bytes(size: int) -> int:
    """Return how long a message of a row of `size` bytes can be."""
    return size + HEADER


def encode(
    rows: Tensor, coded: Tensor, lengths: Tensor, coding: Coding, held: Tensor | None = None
) -> None:
    """`rows` uint8 (N, P) -> a message at the start of each row of `coded` uint8 (N, M).

    M is at least `coded_bytes(P)`; `lengths` int64 (N,) are set to the bytes of each message.
    `held` (N, P) is what the receiver holds, for differences. Raises ValueError for other tensors.
    """
    if coded.shape[1] < coded_bytes(coding.size):
        raise ValueError(f"messages of {coded.shape[1]} bytes for rows of {coding.size}")
    held = rows if held is None else held
    _run("zpp_encode", coding, (rows, held, coded), lengths, (rows, held, coded, lengths))


def decode(coded: Tensor, lengths: Tensor, rows: Tensor, status: Tensor, coding: Coding) -> None:
    """Fill `rows` uint8 (N, P) from messages at the start of each row of `coded` (N, M).

    `lengths` int64 (N,) says how many bytes arrived; none is read beyond these and M. For
    differences, rows are what the senders' `held` were. `status` int32 (N,) is set to 0, or to an
    index into STATUS: that row may then be anything. Raises ValueError for other tensors.
    """
    if status.dtype != torch.int32 or status.shape != lengths.shape or not status.is_contiguous():
        raise ValueError(f"status: give int32 ({len(rows)},)")
    _run("zpp_decode", coding, (rows, rows, coded), lengths, (coded, lengths, rows, status))


def _run(
    function: str, coding: Coding, rows: Sequence[Tensor], lengths: Tensor, memory: Sequence[Tensor]
) -> None:
    count, size = len(rows[0]), coding.size
    for each, most in zip(rows, (size, size, None), strict=True):
        is_row = each.dtype == torch.uint8 and len(each) == count and each.stride(1) == 1
        if not is_row or each.shape[1] != (most or each.shape[1]) or each.stride(0) % ALIGN:
            raise ValueError(f"{tuple(each.shape)}, {each.dtype}: give rows of {size} uint8")
    if lengths.dtype != torch.int64 or lengths.shape != (count,) or not lengths.is_contiguous():
        raise ValueError(f"lengths: give int64 ({count},)")
    if not count or not 0 < size < 2**31:
        raise ValueError(f"{count} rows of {size} bytes")
    numbers = (count, size, *coding.codes, coding.kind, rows[2].shape[1])
    strides = (*(each.stride(0) for each in rows), SCRATCH + size)
    scratch = lengths.new_empty(count * (COUNTS + SCRATCH + size) // 8)
    _kernels(lengths).run(function, (*numbers, *strides), *memory, scratch)


def _kernels(tensor: Tensor) -> Kernels:
    return CudaKernels(cuda_library()) if tensor.is_cuda else CpuKernels(cpu_library())
