"""Messages coded to their entropy by Zstandard: what crosses nodes, without loss.

    message = [ checksum of the header | bytes in all | kind | bytes of the content
                | bytes of each frame ... ]          uint32, then
              [ frame of Zstandard | frame | ... ]   each of at most FRAME bytes of the content

The content is a packed row as it is, or rearranged (zeropp/quant/rearranged.py): differences from
the row that the receiver holds, or codes of three bits as two to a byte. Frames have checksums. A
message is at most `most_bytes` long: Zstandard stores what it cannot shorten.

Receivers know the row's size, so that memory is bounded before a frame is read. Raises CodedError
for a message that is not one of a row of this size.
"""

import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from zeropp.quant.rearranged import add_differences, differences, join_threes, spread_threes

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FRAME = 2**18  # bytes of the content: several threads share what is larger
WHOLE, DIFFERENCES, THREES = range(3)  # kinds of content
CHECKSUM, LENGTH, KIND, CONTENT, FRAMES = range(5)  # indices into the header
NUMBER = np.dtype("<u4")  # of the header
ITEM = NUMBER.itemsize
OVERHEAD = 64  # bytes that a frame takes beyond what it holds: its header and those of its blocks
COMPRESSION = {
    zstd.CompressionParameter.compression_level: 1,
    zstd.CompressionParameter.checksum_flag: 1,
}
DECOMPRESSION = {zstd.DecompressionParameter.window_log_max: 18}  # log2(FRAME)

Spans = Sequence[tuple[int, int]]  # (first, end) of bytes of a row


class CodedError(RuntimeError):
    """A message that arrived cannot be decoded."""


def most_bytes(size: int) -> int:
    """Return how long a message of a row of `size` bytes can be."""
    content = size + size // 3  # all of it codes of three bits, spread
    frames = -(-content // FRAME)
    return content + ITEM * (FRAMES + frames) + OVERHEAD * frames


def encode(row: Tensor, *, held: Tensor | None = None, threes: Spans = ()) -> Tensor:
    """`row`, uint8 (P,) with P a multiple of 16 -> a message, uint8 (M,).

    `held` is what the receiver holds in the place of the row, `threes` where the row has codes of
    three bits.
    """
    content, kind = row, WHOLE
    if held is not None:
        content, kind = differences(row, held), DIFFERENCES
        if len(content) > len(row):
            content, kind = row, WHOLE
    elif threes:
        content, kind = _spread(row, threes), THREES
    parts = content.numpy()
    frames = _map(_compressed, [parts[at : at + FRAME] for at in range(0, len(parts), FRAME)])
    sizes = [*map(len, frames)]
    length = ITEM * (FRAMES + len(frames)) + sum(sizes)
    header = np.array([0, length, kind, len(parts), *sizes], NUMBER)
    header[CHECKSUM] = _checksum(header)
    return torch.frombuffer(bytearray(b"".join((header, *frames))), dtype=torch.uint8)


def decode(message: Tensor, row: Tensor, *, holds: bool = False, threes: Spans = ()) -> int:
    """Fill `row` (P,) from the message that `message` begins with; return that message's length.

    With `holds`, the row is what the sender's `held` was. Raises CodedError; the row may then be
    anything.
    """
    length, kind, size, frames = _read(message, row, _sizes_of(len(row), holds, threes))
    if kind == WHOLE:
        row.copy_(_content(frames, size))
        return length
    content = _content(frames, size)
    try:
        if kind == DIFFERENCES:
            add_differences(content, row)
        else:
            _join(content, threes, row)
    except ValueError as error:
        raise CodedError(f"a message that is damaged: {error}") from error
    return length


def _sizes_of(row: int, holds: bool, threes: Spans) -> dict[int, range]:
    """Return how many bytes of content messages of a kind may have for a row of `row` bytes."""
    sizes = {WHOLE: range(row, row + 1)}
    if holds:
        sizes[DIFFERENCES] = range(row // 4, row + 1)
    if threes:
        spread = row + sum(end - first for first, end in threes) // 3
        sizes[THREES] = range(spread, spread + 1)
    return sizes


def _read(
    message: Tensor, row: Tensor, allowed: dict[int, range]
) -> tuple[int, int, int, list[memoryview]]:
    """Return a message's length and kind, its content's size, and its frames, all of them valid."""
    numbers = message.numpy()[: len(message) // ITEM * ITEM].view(NUMBER)
    if len(numbers) < FRAMES:
        raise CodedError(f"a message of {len(message)} bytes, which is less than its header")
    _, length, kind, size = numbers[:FRAMES].tolist()
    if size not in allowed.get(kind, ()):
        raise CodedError(f"a message of kind {kind} with {size} bytes for a row of {len(row)}")
    count = -(-size // FRAME)
    if len(numbers) < FRAMES + count:
        raise CodedError(f"a message of {len(message)} bytes, which is less than its header")
    header = numbers[: FRAMES + count]
    if _checksum(header) != header[CHECKSUM]:
        raise CodedError("a message with a damaged header")
    sizes = header[FRAMES:].tolist()
    at = ITEM * (FRAMES + count)
    if length != at + sum(sizes) or length > len(message):
        raise CodedError(f"a message of {length} bytes in {len(message)}, with frames of {sizes}")
    return length, kind, size, list(_cut(message[at:length], sizes))


def _checksum(header: np.ndarray) -> int:
    return zlib.crc32(header[CHECKSUM + 1 :].tobytes())


def _cut(body: Tensor, sizes: Iterable[int]) -> Iterator[memoryview]:
    view, at = memoryview(body.numpy()), 0
    for size in sizes:
        yield view[at : at + size]
        at += size


def _content(frames: Sequence[memoryview], size: int) -> Tensor:
    """Return what frames hold, uint8 (size,)."""
    wanted = [min(FRAME, size - at) for at in range(0, size, FRAME)]
    content = torch.empty(size, dtype=torch.uint8)
    parts = b"".join(_map(_decompressed, frames, wanted))
    content.numpy()[:] = np.frombuffer(parts, np.uint8)
    return content


def _compressed(part: memoryview) -> bytes:
    return zstd.compress(part, options=COMPRESSION)


def _decompressed(frame: memoryview, size: int) -> bytes:
    decompressor = zstd.ZstdDecompressor(options=DECOMPRESSION)
    try:
        part = decompressor.decompress(frame, max_length=size + 1)
    except zstd.ZstdError as error:
        raise CodedError(f"a message that is damaged: {error}") from error
    if len(part) != size or not decompressor.eof or decompressor.unused_data:
        raise CodedError(f"a message with a frame of other than {size} bytes")
    return part


def _map(function, *columns) -> list:
    """Call a function for each frame, on as many threads as PyTorch uses."""
    threads = min(torch.get_num_threads(), len(columns[0]))
    if threads < 2:
        return [*map(function, *columns)]
    with ThreadPoolExecutor(threads) as pool:
        return [*pool.map(function, *columns)]


def _spread(row: Tensor, threes: Spans) -> Tensor:
    """Return a row with its codes of three bits as two to a byte."""
    parts, at = [], 0
    for first, end in threes:
        parts += [row[at:first], spread_threes(row[first:end])]
        at = end
    return torch.cat((*parts, row[at:]))


def _join(content: Tensor, threes: Spans, row: Tensor) -> None:
    """Undo `_spread`."""
    read = at = 0
    for first, end in threes:
        row[at:first] = content[read : read + first - at]
        read += first - at
        size = (end - first) // 3 * 4
        join_threes(content[read : read + size], row[first:end])
        read, at = read + size, end
    row[at:] = content[read:]
