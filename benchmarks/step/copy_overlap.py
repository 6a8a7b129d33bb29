"""How much of the time of copies between host and GPU is hidden behind kernels."""

from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]  # begin and end, one clock
COPY = "Memcpy"  # how CUPTI names them begins so; within the device: "Memcpy DtoD"
WITHIN = "DtoD"


def hidden_share(run: Callable[[], object]) -> float:
    """The part of the copies' time in `run` in which some kernel of the GPU ran too."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    copies, kernels = [], []
    for event in found.events():
        span = event.time_range.start, event.time_range.end
        if not event.name.startswith("Mem"):
            kernels.append(span)
        elif event.name.startswith(COPY) and WITHIN not in event.name:
            copies.append(span)
    return overlapped(copies, kernels)


def overlapped(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """The part of the time that `spans` cover which `others` cover too; 1 if there is none."""
    covered, over = union(spans), union(others)
    both = sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in covered
        for first, last in over
    )
    total = sum(end - begin for begin, end in covered)
    return both / total if total else 1.0


def union(spans: Sequence[Span]) -> list[Span]:
    """The time that some span covers, as spans that do not meet."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
