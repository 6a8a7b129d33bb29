"""How much memory this rank holds: the CUDA allocator's count, or the process's own on the CPU."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

STATM = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes held by one rank; on the CPU `allocated` and `reserved` are the resident set."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_count: int | None = None  # live tensors in the CUDA allocator


def read_memory(device: torch.device) -> MemoryUse:
    """What this rank holds now and held at most."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return MemoryUse(
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
            allocated_count=stats.get("allocation.all.current", 0),
        )
    peak = resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":
        peak = resident = peak * 1024  # kibibytes except on macOS
    if STATM.exists():
        resident = int(STATM.read_text().split()[1]) * resource.getpagesize()
    return MemoryUse(
        allocated_bytes=resident,
        reserved_bytes=resident,
        peak_allocated_bytes=max(peak, resident),
        peak_reserved_bytes=max(peak, resident),
    )
