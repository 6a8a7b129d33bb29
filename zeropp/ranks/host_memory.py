"""How much memory of this machine a process can still have.

That is what the system counts as available, or less where a container or a batch system limits the
process's control group, or one that this is in (Linux, versions 1 and 2).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MEMINFO, OWN_GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


class Files(NamedTuple):
    """Where a version of control groups has its numbers, and what it calls files in memory that
    can be dropped."""

    root: str
    limit: str
    used: str
    droppable: str


VERSIONS = {
    "": Files("", "memory.max", "memory.current", "inactive_file"),
    "memory": Files(
        "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
}


def free_bytes() -> int | None:
    """Host memory that can be had, where the system says so."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    kilobytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    available = 1024 * int(next(kilobytes, 0))
    return min([available, *_left_in_groups()]) if available else None


def pinned_bytes(num_bytes: int) -> int:
    """What a tensor of so many bytes takes of page-locked memory: PyTorch's allocator rounds each
    request up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def _left_in_groups() -> Iterator[int]:
    """Bytes left of each limit that holds here."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        name = "memory" if "memory" in controllers.split(",") else controllers
        if (files := VERSIONS.get(name)) is not None:
            root = GROUPS / files.root
            own = root / path.lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(root):
                    yield from _left(folder, files)


def _left(folder: Path, files: Files) -> Iterator[int]:
    """Bytes left of a group's limit; nothing where it has none, or is not shown in a container."""
    try:
        limit = (folder / files.limit).read_text().strip()
        used = int((folder / files.used).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return
    if limit != "max":
        yield max(0, int(limit) - used + int(counts.get(files.droppable, 0)))
