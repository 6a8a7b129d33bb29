"""How much of the time of copies between host and GPU is hidden behind kernels."""

from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]  # begin and end by one clock
MEMORY_EVENT, COPY = "Mem", "Memcpy"  # how CUPTI's names of memory events and copies begin
WITHIN_DEVICE = "DtoD"  # part of the name of a copy within the device


def hidden_share(run: Callable[[], object]) -> float:
    """The share of the copies' time in `run` during which some kernel of the GPU ran too."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    copies, kernels = [], []
    for event in trace.events():
        span = event.time_range.start, event.time_range.end
        if not event.name.startswith(MEMORY_EVENT):
            kernels.append(span)
        elif event.name.startswith(COPY) and WITHIN_DEVICE not in event.name:
            copies.append(span)
    return overlapped_share(copies, kernels)


def overlapped_share(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """The share of the time covered by `spans` that `others` cover too; 1 if there is none."""
    covered, other_covered = union(spans), union(others)
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in covered
        for other_begin, other_end in other_covered
    )
    total = sum(end - begin for begin, end in covered)
    return both / total if total else 1.0


def union(spans: Sequence[Span]) -> list[Span]:
    """The time covered by any span, as disjoint spans in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
