"""Our training loop against one other at a time: verified, then timed in turn in one process.

Ours stays while its peers come and go, so two models at most are in memory. Of each the memory is
counted without what the other holds.
"""

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.shared.setting import Setting
from benchmarks.shared.stopwatch import GpuStopwatch, Stopwatch, WallStopwatch, quartiles
from benchmarks.step.contest import EPS, SMOOTH_EPS, Disagreement, set_eps, tolerances
from benchmarks.step.loops import Bare, Loop, Numbers, bare, ours

VERIFIED_STEPS = 2
FEED_STEPS = 4  # steps whose batches a peer repeats


@dataclass(kw_only=True)
class Measured:
    """What a loop was seen to do."""

    name: str
    seconds: list[float] = field(default_factory=list)  # of one step, round by round
    held: int = 0  # bytes of the device between steps
    peak: int = 0  # bytes of the device during steps, none of the other loop's


class Duels:
    """Our loop at one setting, ready to meet its peers."""

    def __init__(self, setting: Setting, rounds: int, steps: int) -> None:
        self.setting, self.rounds, self.steps = setting, rounds, steps
        self._device = setting.ranks.device
        self._stopwatch = stopwatch(self._device)
        self._batches = setting.batches(FEED_STEPS)
        before = allocated(self._device)
        self._loop = ours(setting)
        self._weights = {name: w.to("cpu", copy=True) for name, w in self._loop.weights.items()}
        self._history = history(self._loop)
        self.measured = Measured(name=self._loop.name, held=allocated(self._device) - before)

    def meet(self, how: Bare) -> dict:
        """Verify a peer and time it; the row of the table. Raises `Disagreement`."""
        before = allocated(self._device)
        peer = bare(self.setting, how, self._weights, self._batches)
        verified = agreement(peer.name, history(peer), self._history, self.setting)
        measured = Measured(name=peer.name, held=allocated(self._device) - before)
        mine = Measured(name=self._loop.name, held=self.measured.held)
        pairs = [(self._loop, mine, measured.held), (peer, measured, mine.held)]
        for loop, _, _ in pairs:
            finish(loop.step())  # one more step to warm up, with the usual eps
        for number in range(self.rounds):
            for loop, found, others in pairs[:: -1 if number % 2 else 1]:
                self._time(loop, found, others)
        self.measured.seconds += mine.seconds
        self.measured.peak = max(self.measured.peak, mine.peak)
        ratios = [a / b for a, b in zip(measured.seconds, mine.seconds, strict=True)]
        return {
            "name": measured.name, "seconds": measured.seconds, "our_seconds": mine.seconds,
            "peak_bytes": measured.peak or None, "verified": verified,
            "ratio": statistics.median(ratios), "quartiles": quartiles(ratios),
        }  # fmt: skip

    def alone(self) -> None:
        """Time ours where no peer could be met."""
        finish(self._loop.step())
        for _ in range(self.rounds):
            self._time(self._loop, self.measured, 0)

    def close(self) -> None:
        """End the reading of data."""
        self._loop.close()

    def _time(self, loop: Loop, found: Measured, others: int) -> None:
        """One round: a few steps after each other, then a wait for the numbers of the last."""
        done: list[Numbers] = []
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)

        def steps() -> None:
            done.extend(loop.step() for _ in range(self.steps))

        found.seconds.append(self._stopwatch.lap(steps) / self.steps)
        finish(done[-1])
        if on_gpu:
            peak = torch.cuda.max_memory_allocated(self._device) - others
            found.peak = max(found.peak, peak)


def stopwatch(device: torch.device) -> Stopwatch:
    """Events on a GPU, the wall clock elsewhere."""
    return GpuStopwatch(device) if device.type == "cuda" else WallStopwatch()


def allocated(device: torch.device) -> int:
    """Bytes of the device that tensors hold; 0 on the CPU, where nobody counts."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def history(loop: Loop) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first steps, with Adam made smooth, as contest.py explains."""
    set_eps(loop.optimizer, SMOOTH_EPS)
    found = [finish(loop.step()) for _ in range(VERIFIED_STEPS)]
    set_eps(loop.optimizer, EPS)
    return found


def finish(numbers: Numbers) -> tuple[float, float]:
    """Wait for a step's numbers."""
    return numbers()


def agreement(
    name: str, its: Sequence[tuple], mine: Sequence[tuple], setting: Setting
) -> dict[str, float]:
    """The largest relative differences of losses and norms; raises `Disagreement` if too large."""
    found = {}
    for column, (what, allowed) in enumerate(
        zip(("loss", "gradient norm"), tolerances(setting.dtype, 1), strict=True)
    ):
        apart = max(abs(a[column] / b[column] - 1) for a, b in zip(its, mine, strict=True))
        if not apart <= allowed:
            raise Disagreement(
                f"{name} and ours do not train alike: {what} differs by {apart:.2e}, allowed "
                f"{allowed:.2e}; it was not timed"
            )
        found[what] = apart
    return found
