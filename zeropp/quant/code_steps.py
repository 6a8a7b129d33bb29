"""How the steps of a row's INT8 codes are laid out in a message: what changed since the last one.

    message = [ counts | raw segments | scales | steps ]      each part starts at a multiple of 16

Both sides hold a packed row (zeropp/quant/packing.py). A step says by how many codes an element
moves: -reach ... reach, one of 2 reach + 1 levels. Raw segments and scales are sent whole. `counts`
are 8 int32: elements whose code is more than 0, 1, 2 and 4 steps away from where it belongs, blocks
whose scale changed, and zeros.

The steps of a segment are packed in tiles of `TILE` elements, the last of which may be shorter. A
tile of n elements has `planes` planes of ceil(n / planes) lanes: element plane * lanes + lane is in
that plane and lane. Each lane packs the digits step + reach of its planes:

| reach | planes | a lane                                                          | bits each |
|-------|--------|-----------------------------------------------------------------|-----------|
| 1     | 5      | a byte, the digits' number in base 3                            | 1.6       |
| 2     | 24     | 8 numbers in base 5 of 3 digits and 7 bits each, in 7 bytes *)  | 2.333     |
| 4     | 5      | 2 bytes, the digits' number in base 9                           | 3.2       |

*) byte b is number b, and above it bit b of number 7. The bytes b of all lanes follow each other.
Digits beyond the end are those of step 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from zeropp.quant.packing import COUNT, HEADER, RAW, SCALE_BYTES, RowLayout, Segment, num_blocks

TILE = 3840  # elements: 15 blocks, and a multiple of all numbers of planes
PLANES = MappingProxyType({1: 5, 2: 24, 4: 5})  # by reach
LANE_BYTES = MappingProxyType({1: 1, 2: 7, 4: 2})
REACHES = tuple(PLANES)
COUNTED = (0, 1, 2, 4)  # how many steps away
RESCALED = len(COUNTED)  # index into the counts
COUNTS = 8
COUNT_BYTES = 4 * COUNTS
ALIGN = 16


class StepSegment(NamedTuple):
    """The place of one segment in a message, in bytes."""

    scales_at: int  # 0 for a raw segment
    data_at: int  # of the steps, or of the raw values


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """The message for a row of `rows`, whose codes move by at most `reach`.

    Raises ValueError for another reach than 1, 2 or 4, and for segments that are not INT8 or raw.
    """

    rows: RowLayout
    reach: int

    def __post_init__(self) -> None:
        if self.reach not in REACHES:
            raise ValueError(f"reach {self.reach}: expected one of {', '.join(map(str, REACHES))}")
        if not {8, RAW}.issuperset(self.rows.bits):
            raise ValueError(f"bits {self.rows.bits}: codes with 8 bits have steps, others do not")

    @cached_property
    def num_bytes(self) -> int:
        """S, the bytes of a message, a multiple of 16."""
        return self._places[0]

    @cached_property
    def segments(self) -> tuple[StepSegment, ...]:
        """The places of `rows.segments`."""
        return self._places[1]

    @cached_property
    def table(self) -> tuple[int, ...]:
        """The layout as ops take it and kernels read it.

        `rows.table`, whose entries keep their places; then S, the reach, and each `StepSegment`.
        """
        numbers = [*self.rows.table, self.num_bytes, self.reach]
        for segment in self.segments:
            numbers.extend(segment)
        return tuple(numbers)

    @cached_property
    def _places(self) -> tuple[int, tuple[StepSegment, ...]]:
        segments = self.rows.segments
        raw_at = COUNT_BYTES
        raw = sum(each.size for each in segments if each.bits == RAW) * self.rows.wire.itemsize
        scales_at = raw_at + _up(raw)
        blocks = sum(num_blocks(each.size, each.bits) for each in segments if each.bits != RAW)
        steps_at = scales_at + _up(SCALE_BYTES * blocks)
        places = []
        for each in segments:
            if each.bits == RAW:
                places.append(StepSegment(0, raw_at))
                raw_at += each.size * self.rows.wire.itemsize
                continue
            places.append(StepSegment(scales_at, steps_at))
            scales_at += SCALE_BYTES * num_blocks(each.size, each.bits)
            steps_at += _up(step_bytes(each.size, self.reach))
        return steps_at, tuple(places)


@lru_cache(maxsize=4096)
def step_layout(rows: RowLayout, reach: int) -> StepLayout:
    """The `StepLayout` of these arguments, cached with what it computes."""
    return StepLayout(rows=rows, reach=reach)


def rows_end(table: Sequence[int]) -> int:
    """How much of a `StepLayout.table` is the `RowLayout.table` that it begins with."""
    return HEADER + len(Segment._fields) * table[COUNT]


def places_in(table: Sequence[int]) -> tuple[int, list[StepSegment]]:
    """The reach and the places of a `StepLayout.table`."""
    at = rows_end(table)
    numbers = table[at + 2 :]
    return table[at + 1], [StepSegment(*numbers[i : i + 2]) for i in range(0, len(numbers), 2)]


def message_bytes(table: Sequence[int]) -> int:
    """S of a `StepLayout.table`."""
    return table[rows_end(table)]


def step_bytes(size: int, reach: int) -> int:
    """The bytes of the steps of a segment of `size` elements."""
    whole, rest = divmod(size, TILE)
    return LANE_BYTES[reach] * (whole * TILE // PLANES[reach] - (-rest // PLANES[reach]))


def _up(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
