"""TensorBoard event files of an interrupted run, freed of what the resumed run will write again.

An event file is a sequence of records: u64 length, u32 checksum, the bytes of an `Event`, u32
checksum. Points beyond the resume point are left out, the other records are copied as they are.
"""

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from zeropp.atomic import write_atomically

LENGTH = struct.Struct("<Q")
HEADER_BYTES = LENGTH.size + 4  # length, its checksum
TRAILER_BYTES = 4  # checksum of the data


class Axis(enum.Enum):
    """What a curve is drawn over."""

    ITERATIONS = "iterations"
    SAMPLES = "samples"
    TOKENS = "tokens"

    @property
    def suffix(self) -> str:
        """What Megatron-DeepSpeed appends to a scalar's name."""
        return "" if self is Axis.ITERATIONS else f" vs {self.value}"

    @classmethod
    def of(cls, tag: str) -> "Axis":
        """The axis of the scalar named `tag`."""
        for axis in (cls.SAMPLES, cls.TOKENS):
            if tag.endswith((axis.suffix, f",x={axis.value}")):
                return axis
        return cls.ITERATIONS


@dataclass(frozen=True)
class Position:
    """How far training has come: finished iterations, consumed samples and tokens."""

    iteration: int
    samples: int
    tokens: int

    def along(self, axis: Axis) -> int:
        """The coordinate on one axis."""
        return {
            Axis.ITERATIONS: self.iteration,
            Axis.SAMPLES: self.samples,
            Axis.TOKENS: self.tokens,
        }[axis]


def forget_after(path: Path, position: Position) -> int:
    """Rewrite one event file without the points beyond `position`; returns how many there were.

    A file ends at its first damaged record, for instance one that a killed process left half
    written: readers stop there, so what follows is dropped too.
    """
    content = path.read_bytes()
    kept: list[bytes] = []
    forgotten = 0
    for record, event in _records(content):
        points = _points_beyond(event, position)
        forgotten += points
        if not points:
            kept.append(record)
    whole = b"".join(kept)
    if len(whole) != len(content):
        write_atomically(path, lambda file: file.write(whole))
    return forgotten


def _records(content: bytes) -> Iterator[tuple[bytes, Event]]:
    start = 0
    while start + HEADER_BYTES <= len(content):
        (length,) = LENGTH.unpack_from(content, start)
        data = start + HEADER_BYTES
        end = data + length + TRAILER_BYTES
        if end > len(content):
            return
        try:
            event = Event.FromString(content[data : data + length])
        except DecodeError:
            return
        yield content[start:end], event
        start = end


def _points_beyond(event: Event, position: Position) -> int:
    """Number of scalars in `event` beyond `position`; an event's scalars share one axis."""
    values = event.summary.value
    if not values or event.step <= position.along(Axis.of(values[0].tag)):
        return 0
    return len(values)
