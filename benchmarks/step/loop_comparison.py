"""Training loops side by side: each trains a few steps to be compared, and then all take turns.

The memory of each is that of the device, without what the others hold.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from benchmarks.shared.interleaved import interleaved, ratio_summary
from benchmarks.shared.timers import timer_for
from benchmarks.shared.training_setup import TrainingSetup, largest_of_ranks
from benchmarks.step.device_loops import DeviceLoopKind, device_loop
from benchmarks.step.step_verification import (
    LossesAndNorms,
    first_steps,
    largest_differences,
    require_agreement,
    tolerances,
)
from benchmarks.step.training_loops import TrainingLoop, local_weights, ours

VERIFIED_STEPS = 2
REPEATED_STEPS = 4  # steps whose batches a PyTorch loop repeats


@dataclass(kw_only=True)
class TimedLoop:
    """A loop that has trained a few steps, and what was measured of it since."""

    loop: TrainingLoop
    history: LossesAndNorms = ()
    held_bytes: int = 0  # between steps
    peak_bytes: int = 0  # during steps
    seconds: list[float] = field(default_factory=list)  # of a step of the slowest rank, by round
    processor: list[float] = field(default_factory=list)  # seconds of all ranks

    @property
    def name(self) -> str:
        return self.loop.name

    @classmethod
    def build(
        cls, build: Callable[[], TrainingLoop], setup: TrainingSetup, count: int
    ) -> "TimedLoop":
        """Build a loop and let it train `count` steps."""
        before = allocated_bytes(setup.ranks.device)
        loop = build()
        history = first_steps(loop, setup, count)
        held = allocated_bytes(setup.ranks.device) - before
        return cls(loop=loop, history=history, held_bytes=held)

    def row(self, reference: "TimedLoop") -> dict:
        """The numbers of the loop, beside the reference's of the same rounds."""
        summary = ratio_summary(self.seconds, reference.seconds)
        processor, other = (statistics.median(each.processor) for each in (self, reference))
        return {
            "name": self.name,
            "seconds": self.seconds,
            "median": statistics.median(self.seconds),
            **summary,
            "processor_ratio": processor / other,
            "peak_bytes": self.peak_bytes or None,
        }


def time_in_turn(
    loops: Sequence[TimedLoop], setup: TrainingSetup, rounds: int, steps: int = 1
) -> None:
    """Let each loop take `steps` consecutive steps per round, after one of each to warm up."""
    for each in loops:
        each.loop.step()()  # with the usual eps
    for each in interleaved(loops, rounds):
        others = sum(other.held_bytes for other in loops) - each.held_bytes
        _time(each, setup, steps, others)


def _time(timed: TimedLoop, setup: TrainingSetup, steps: int, others: int) -> None:
    """One round: a few steps, then a wait for the numbers of the last."""
    device, last = setup.ranks.device, None

    def run() -> None:
        nonlocal last
        for _ in range(steps):
            last = timed.loop.step()

    dist.barrier()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    processor = time.process_time()
    seconds = timer_for(device).seconds(run)
    processor = time.process_time() - processor
    last()
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - others
        timed.peak_bytes = max(timed.peak_bytes, peak)
    timed.seconds.append(largest_of_ranks(seconds, device) / steps)
    timed.processor += setup.ranks.sum(processor)


def allocated_bytes(device: torch.device) -> int:
    """Bytes of the device that tensors hold; 0 on the CPU, where nobody counts."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class DeviceComparison:
    """Our loop for one setup, beside PyTorch loops on one device that come and go.

    At most two models are in memory.
    """

    def __init__(self, setup: TrainingSetup, rounds: int, steps: int) -> None:
        self.setup, self.rounds, self.steps = setup, rounds, steps
        self._repeated = setup.steps(REPEATED_STEPS)
        self._weights: dict[str, torch.Tensor] = {}  # before the first step

        def build() -> TrainingLoop:
            loop = ours(setup)
            weights = local_weights(loop.model)
            self._weights = {name: each.to("cpu", copy=True) for name, each in weights.items()}
            return loop

        self.measured = TimedLoop.build(build, setup, VERIFIED_STEPS)

    def compare(self, kind: DeviceLoopKind) -> dict:
        """Verify a PyTorch loop and time it; returns its row. Raises Disagreement."""

        def build() -> TrainingLoop:
            return device_loop(self.setup, kind, self._weights, self._repeated)

        ours_before, mine = len(self.measured.seconds), self.measured
        theirs = TimedLoop.build(build, self.setup, VERIFIED_STEPS)
        differences = largest_differences(theirs.history, mine.history)
        require_agreement(theirs.name, "ours", differences, tolerances(self.setup.dtype, 1))
        time_in_turn([mine, theirs], self.setup, self.rounds, self.steps)
        our_seconds = mine.seconds[ours_before:]
        return {
            "name": theirs.name,
            "seconds": theirs.seconds,
            "our_seconds": our_seconds,
            "peak_bytes": theirs.peak_bytes or None,
            "verified": differences,
            **ratio_summary(theirs.seconds, our_seconds),
        }

    def time_alone(self) -> None:
        """Time our loop where it could be compared with none."""
        time_in_turn([self.measured], self.setup, self.rounds, self.steps)

    def close(self) -> None:
        """Stop reading data."""
        self.measured.loop.close()
