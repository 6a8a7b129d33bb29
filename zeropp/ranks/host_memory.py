"""The host memory that is available to this process.

That is what the system reports as available, or less if a container or a batch system limits the
control group of the process or one of its ancestors (Linux, versions 1 and 2).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MEMINFO, PROCESS_CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


class ControllerFiles(NamedTuple):
    """The memory controller of one version of control groups.

    root: its folder in `CGROUPS`. limit, used: names of the files with the limit and the usage in
    bytes. droppable: entry of memory.stat with the bytes of cached files, which can be dropped.
    """

    root: str
    limit: str
    used: str
    droppable: str


CONTROLLERS = {  # by the controller's name in /proc/self/cgroup, which version 2 leaves empty
    "": ControllerFiles("", "memory.max", "memory.current", "inactive_file"),
    "memory": ControllerFiles(
        "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
}


def free_bytes() -> int | None:
    """Return the available host memory in bytes, or None if the system does not report it."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            available = 1024 * int(line.split()[1])
            return min([available, *_bytes_left_in_groups()]) if available else None
    return None


def _bytes_left_in_groups() -> Iterator[int]:
    """Yield the bytes left below each limit that applies to this process."""
    try:
        lines = PROCESS_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        name = "memory" if "memory" in controllers.split(",") else controllers
        files = CONTROLLERS.get(name)
        if files is None:
            continue
        root = CGROUPS / files.root
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield from _bytes_left(folder, files)


def _bytes_left(folder: Path, files: ControllerFiles) -> Iterator[int]:
    """Yield the bytes left in a group; nothing if it has no limit or is not visible."""
    try:
        limit = (folder / files.limit).read_text().strip()
        used = int((folder / files.used).read_text())
        stat_lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return
    statistics = dict(line.split() for line in stat_lines)
    if limit != "max":
        yield max(0, int(limit) - used + int(statistics.get(files.droppable, 0)))
