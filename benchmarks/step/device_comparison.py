"""Compare our training loop with others on one device: verify each, then time the two in turn.

Our loop stays while the others come and go, so at most two models are in memory. The memory of each
is counted without what the other holds.
"""

import gc
from dataclasses import dataclass, field

import torch

from benchmarks.shared.interleaved import interleaved, ratio_summary
from benchmarks.shared.timers import Timer, Work, timer_for
from benchmarks.shared.training_setup import TrainingSetup
from benchmarks.step.device_loops import DeviceLoopKind, device_loop
from benchmarks.step.step_verification import (
    first_steps,
    largest_differences,
    require_agreement,
    tolerances,
)
from benchmarks.step.training_loops import TrainingLoop, local_weights, ours

VERIFIED_STEPS = 2
REPEATED_STEPS = 4  # steps whose batches a PyTorch loop repeats


@dataclass(kw_only=True)
class Measurements:
    """What was measured of a loop; memory is that of the device."""

    name: str
    seconds: list[float] = field(default_factory=list)  # of one step, round by round
    held_bytes: int = 0  # between steps
    peak_bytes: int = 0  # during steps


class DeviceComparison:
    """Our loop for one setup, to be compared with PyTorch loops one after another."""

    def __init__(self, setup: TrainingSetup, rounds: int, steps: int) -> None:
        self.setup, self.rounds, self.steps = setup, rounds, steps
        self._timer = timer_for(setup.ranks.device)
        self._repeated = setup.steps(REPEATED_STEPS)
        before = allocated_bytes(setup.ranks.device)
        self._loop = ours(setup)
        weights = local_weights(self._loop.model)
        self._weights = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}
        self._history = first_steps(self._loop, setup, VERIFIED_STEPS)
        held = allocated_bytes(setup.ranks.device) - before
        self.measured = Measurements(name=self._loop.name, held_bytes=held)

    def compare(self, kind: DeviceLoopKind) -> dict:
        """Verify a PyTorch loop and time it; returns its row. Raises Disagreement."""
        before = allocated_bytes(self.setup.ranks.device)
        loop = device_loop(self.setup, kind, self._weights, self._repeated)
        differences = largest_differences(
            first_steps(loop, self.setup, VERIFIED_STEPS), self._history
        )
        require_agreement(loop.name, "ours", differences, tolerances(self.setup.dtype, 1))
        held = allocated_bytes(self.setup.ranks.device) - before
        theirs = Measurements(name=loop.name, held_bytes=held)
        mine = Measurements(name=self._loop.name, held_bytes=self.measured.held_bytes)
        pairs = [(self._loop, mine), (loop, theirs)]
        for warmed_up, _ in pairs:
            warmed_up.step()()  # with the usual eps
        for timed, measurements in interleaved(pairs, self.rounds):
            others = mine.held_bytes + theirs.held_bytes - measurements.held_bytes
            self._time(timed, measurements, others)
        self.measured.seconds += mine.seconds
        self.measured.peak_bytes = max(self.measured.peak_bytes, mine.peak_bytes)
        return {
            "name": theirs.name,
            "seconds": theirs.seconds,
            "our_seconds": mine.seconds,
            "peak_bytes": theirs.peak_bytes or None,
            "verified": differences,
            **ratio_summary(theirs.seconds, mine.seconds),
        }

    def time_alone(self) -> None:
        """Time our loop where it could be compared with none."""
        self._loop.step()()
        for _ in range(self.rounds):
            self._time(self._loop, self.measured, 0)

    def close(self) -> None:
        """Stop reading data."""
        self._loop.close()

    def _time(self, loop: TrainingLoop, measurements: Measurements, others: int) -> None:
        """One round: a few consecutive steps, then a wait for the numbers of the last."""
        last = None

        def run() -> None:
            nonlocal last
            for _ in range(self.steps):
                last = loop.step()

        seconds, peak = time_with_peak(self._timer, self.setup.ranks.device, run)
        last()
        measurements.seconds.append(seconds / self.steps)
        measurements.peak_bytes = max(measurements.peak_bytes, peak - others)


def time_with_peak(timer: Timer, device: torch.device, run: Work) -> tuple[float, int]:
    """Seconds of one run, and the most bytes of the device allocated in it; 0 on the CPU."""
    if device.type != "cuda":
        return timer.seconds(run), 0
    torch.cuda.reset_peak_memory_stats(device)
    seconds = timer.seconds(run)
    return seconds, torch.cuda.max_memory_allocated(device)


def allocated_bytes(device: torch.device) -> int:
    """Bytes of the device that tensors hold; 0 on the CPU, where nobody counts."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
