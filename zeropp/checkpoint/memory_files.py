"""Files in shared memory, for another process to read. Nothing here needs torch."""

import errno
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from zeropp.ranks.host_memory import free_bytes

STEP = 64 << 20  # bytes by which the memory grows; free memory is checked before each step


@dataclass(frozen=True)
class Extent:
    """Where a file is in the shared memory: its first byte and the number of bytes."""

    offset: int
    bytes: int


class MemoryFiles:
    """Files one after another in shared memory that a child process inherits by its descriptor.

    The memory stays allocated when the files are removed, so files that are written again and again
    need no more memory than the largest set of them. It belongs to no folder: it ends with the last
    process that has it open.
    """

    def __init__(self) -> None:
        self.descriptor = _anonymous_file()
        self.extents: dict[str, Extent] = {}
        self._end = self._capacity = 0

    def remove_all(self) -> None:
        """Forget all files; the next file starts at the beginning of the memory."""
        self.extents.clear()
        self._end = 0

    def create(self, name: str) -> "MemoryFile":
        """A new file at the end, to be written; it must be closed before the next one."""
        return MemoryFile(self, name, self._end)

    def rename(self, name: str, new_name: str) -> None:
        """Give a file another name."""
        self.extents[new_name] = self.extents.pop(name)

    def close(self) -> None:
        """Close this process's descriptor."""
        os.close(self.descriptor)

    def append(self, data: bytes | memoryview) -> None:
        """Write bytes at the end. Raises OSError with ENOMEM where the host has no memory left."""
        view = memoryview(data).cast("B")
        self._reserve(self._end + len(view))
        while view:  # the system writes at most 2 GiB at once
            written = os.pwrite(self.descriptor, view, self._end)
            self._end += written
            view = view[written:]

    def size_from(self, offset: int) -> int:
        """Number of bytes from `offset` to the end."""
        return self._end - offset

    def _reserve(self, needed: int) -> None:
        if needed <= self._capacity:
            return
        capacity = -(-needed // STEP) * STEP
        free = free_bytes()
        if free is not None and free < capacity - self._capacity:
            raise OSError(
                errno.ENOMEM,
                "too little host memory for the copy of the state that an asynchronous save needs",
            )
        self._capacity = capacity


class MemoryFile(io.RawIOBase):
    """A file of `MemoryFiles` while it is written."""

    def __init__(self, files: MemoryFiles, name: str, offset: int) -> None:
        super().__init__()
        self._files, self._name, self._offset = files, name, offset

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; returns how many, which is all of them."""
        self._files.append(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        """Number of bytes written so far."""
        return self._files.size_from(self._offset)

    def close(self) -> None:
        """End the file."""
        if not self.closed:
            self._files.extents[self._name] = Extent(self._offset, self.tell())
        super().close()


def read_blocks(descriptor: int, extent: Extent, block: int) -> Iterator[bytes]:
    """Yield a file's content from the memory with this descriptor, `block` bytes at a time."""
    for start in range(0, extent.bytes, block):
        yield os.pread(descriptor, min(block, extent.bytes - start), extent.offset + start)


def _anonymous_file() -> int:
    """Descriptor of a file without a name, on Linux in memory, else in the temporary folder."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("zeropp-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
