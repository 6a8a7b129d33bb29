"""How much memory this machine still has."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def free_bytes() -> int | None:
    """Host memory that can be had, where the system says so."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    kilobytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(next(kilobytes, 0)) or None
