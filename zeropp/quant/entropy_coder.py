"""Packed rows, coded close to their entropy where they are: the same bytes on CPUs and GPUs.

csrc/messages/math.h says what a message is. Shapes: N rows of P bytes, a multiple of 16, which
begin at multiples of 16 bytes. On GPUs, kernels run on the current stream and nothing is waited
for: lengths and status stay on the device. Raises LibraryError where csrc/ was not built.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.native.kernels import cpu_library, cuda_library
from zeropp.quant.cpu import CpuKernels
from zeropp.quant.cuda import CudaKernels
from zeropp.quant.kernels import Kernels
from zeropp.quant.packing import ALIGN, RAW, RowLayout
from zeropp.quant.rearranged import join_threes, spread_threes

HEADER = 16  # bytes
COUNTS, SCRATCH = 2048, 25 << 10  # bytes of memory for a row besides its words
STATUS = ("sound", "a damaged header", "damaged tables", "a damaged tile")


@dataclass(frozen=True)
class RowCoding:
    """What sender and receiver know of a row.

    size: P. codes: where its codes begin and end, in bytes. has_threes: whether they have three
    bits. is_difference: whether it is coded as differences from a row that the receiver holds.
    """

    size: int
    codes: tuple[int, int]
    has_threes: bool = False
    is_difference: bool = False

    @property
    def spread(self) -> tuple[int, int, int]:
        """The size of what is coded, and where its codes are: those of three bits two to a byte."""
        first, end = self.codes
        more = (end - first) // 3 if self.has_threes else 0
        return self.size + more, first, end + more


def coding_of(layout: RowLayout, *, is_difference: bool = False) -> RowCoding:
    """Return how rows of a layout are coded.

    Of mixed widths, codes of three bits are told apart from others if most of the row is one run of
    them.
    """
    size, runs = layout.packed_bytes, [(0, 0)]
    if is_difference:
        return RowCoding(size, (0, size), is_difference=True)
    for each in layout.segments:
        if each.bits == 3:
            begin = runs.pop()[0] if runs[-1][1] == each.data_at else each.data_at
            runs.append((begin, each.data_at + each.size * 3 // 8))
    longest = max(runs, key=lambda run: run[1] - run[0])
    if 2 * (longest[1] - longest[0]) > size:
        return RowCoding(size, longest, has_threes=True)
    return RowCoding(
        size, (min([e.data_at for e in layout.segments if e.bits != RAW] or [0]), size)
    )


def coded_bytes(coding: RowCoding) -> int:
    """Return how long a message can be, up to a multiple of 16."""
    return -(-(coding.spread[0] + HEADER) // ALIGN) * ALIGN


def encode(
    rows: Tensor, coded: Tensor, lengths: Tensor, coding: RowCoding, held: Tensor | None = None
) -> None:
    """`rows` uint8 (N, P) -> a message at the start of each row of `coded` uint8 (N, M).

    M is at least `coded_bytes`; `lengths` int64 (N,) are set to the bytes of each message.
    `held` (N, P) is what the receiver holds, for differences. Raises ValueError for other tensors.
    """
    if coded.shape[1] < coded_bytes(coding):
        raise ValueError(f"messages of {coded.shape[1]} bytes for rows of {coding.size}")
    _require(coding, lengths, rows, coded, rows if held is None else held)
    if coding.has_threes:
        (first, end), count = coding.codes, len(rows)
        two = spread_threes(rows[:, first:end].reshape(-1)).view(count, -1)
        rows = torch.cat((rows[:, :first], two, rows[:, end:]), 1)
    held = rows if held is None else held
    _run("zpp_encode", coding, (rows, held, coded), (rows, held, coded, lengths))


def decode(coded: Tensor, lengths: Tensor, rows: Tensor, status: Tensor, coding: RowCoding) -> None:
    """Fill `rows` uint8 (N, P) from messages at the start of each row of `coded` (N, M).

    `lengths` int64 (N,) says how many bytes arrived; none is read beyond these and M. For
    differences, rows are what the senders' `held` were. `status` int32 (N,) is set to 0, or to an
    index into STATUS: that row may then be anything. Raises ValueError for other tensors.
    """
    if status.dtype != torch.int32 or status.shape != lengths.shape or not status.is_contiguous():
        raise ValueError(f"status: give int32 ({len(rows)},)")
    _require(coding, lengths, rows, coded)
    content = rows.new_empty(len(rows), coding.spread[0]) if coding.has_threes else rows
    _run("zpp_decode", coding, (content, content, coded), (coded, lengths, content, status))
    if coding.has_threes:
        (first, end), (_, _, spread_end) = coding.codes, coding.spread
        threes = rows.new_empty(len(rows), end - first)
        join_threes(content[:, first:spread_end].reshape(-1), threes.view(-1))
        torch.cat((content[:, :first], threes, content[:, spread_end:]), 1, out=rows)


def _require(
    coding: RowCoding, lengths: Tensor, rows: Tensor, coded: Tensor, *held: Tensor
) -> None:
    count, size = len(rows), coding.size
    if not count or not 0 < size < 2**31:
        raise ValueError(f"{count} rows of {size} bytes")
    for each in (coded, rows, *held):
        is_row = each.dtype == torch.uint8 and len(each) == count and each.stride(1) == 1
        if not is_row or each.stride(0) % ALIGN or (each is not coded and each.shape[1] != size):
            raise ValueError(f"{tuple(each.shape)}, {each.dtype}: give rows of {size} uint8")
    if lengths.dtype != torch.int64 or lengths.shape != (count,) or not lengths.is_contiguous():
        raise ValueError(f"lengths: give int64 ({count},)")


def _run(
    function: str,
    coding: RowCoding,
    rows: tuple[Tensor, Tensor, Tensor],
    memory: tuple[Tensor, ...],
) -> None:
    size, *codes = coding.spread
    count, scratch_size = len(rows[0]), SCRATCH + 3 * size // ALIGN * ALIGN
    numbers = (count, size, *codes, int(coding.is_difference), rows[2].shape[1])
    strides = (*(each.stride(0) for each in rows), scratch_size)
    scratch = rows[0].new_empty(count * (COUNTS + scratch_size))
    _kernels(scratch).run(function, (*numbers, *strides), *memory, scratch)


def _kernels(tensor: Tensor) -> Kernels:
    return CudaKernels(cuda_library()) if tensor.is_cuda else CpuKernels(cpu_library())
