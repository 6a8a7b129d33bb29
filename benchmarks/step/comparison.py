"""Training loops side by side: each trains a few steps to be compared, and then all take turns.

The memory of each is that of the device, without what the others hold.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.shared.interleaved import Disagreement, interleaved, ratio_summary
from benchmarks.shared.table import RATIOS, Column
from benchmarks.shared.timers import timer_for
from benchmarks.shared.training_setup import TrainingSetup, largest_of_ranks
from benchmarks.step.training_loops import TrainingLoop, local_weights

# Adam with its own eps makes a full step of a gradient that is nothing but rounding (the gradient
# of the keys' bias has no other part). With this eps, far above the clipped gradients, updates are
# smooth in them: an error of 1% in the gradients is at most an error of 1% in the updates.
SMOOTH_EPS, EPS = 1e-2, 1e-8
VERIFIED_STEPS = 3
LOOP_COLUMNS = (  # of `TimedLoop.row`
    Column("", "name"),
    Column("median, ms", "median", ".1f", 1e3),
    *RATIOS,
    Column("processor time", "processor_ratio", ".3f"),
)
LossesAndNorms = Sequence[tuple[float, float]]  # of the first steps


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
        processor, other = (statistics.median(each.processor) for each in (self, reference))
        return {
            "name": self.name,
            "seconds": self.seconds,
            "median": statistics.median(self.seconds),
            **ratio_summary(self.seconds, reference.seconds),
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
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    processor = time.process_time()
    seconds = timer_for(device).seconds(run)
    processor = time.process_time() - processor
    last()
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(device) - others
        timed.peak_bytes = max(timed.peak_bytes, peak)
    timed.seconds.append(largest_of_ranks(seconds, device) / steps)
    timed.processor += setup.ranks.sum(processor)


def allocated_bytes(device: torch.device) -> int:
    """Bytes of the device that tensors hold; 0 on the CPU, where nobody counts."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def verify(loops: Sequence[TrainingLoop], setup: TrainingSetup) -> dict:
    """Train each for a few steps; raise Disagreement unless all agree with the first.

    Returns the largest relative differences: of losses, of gradient norms, and of the updates of
    all weights (L2 norm of the difference over that of the first's update).
    """
    reference, *others = loops
    before = _weights(reference)
    history = first_steps(reference, setup, VERIFIED_STEPS)
    expected = _weights(reference)
    allowed = tolerances(setup.dtype, setup.ranks.num_ranks)
    largest = dict.fromkeys(allowed, 0.0)
    for loop in others:
        differences = largest_differences(first_steps(loop, setup, VERIFIED_STEPS), history)
        differences["update"] = _distance(_weights(loop), expected, before, setup)
        require_agreement(loop.name, reference.name, differences, allowed)
        largest = {name: max(largest[name], differences[name]) for name in largest}
    return {"steps": VERIFIED_STEPS, "differences": largest, "allowed": allowed}


def tolerances(dtype: str, num_ranks: int) -> dict[str, float]:
    """How far losses, gradient norms and updates of two correct loops may differ, relatively.

    fp32: a gradient sums some 2^11 terms in another order, 2^5.5 roundings of 2^-24 = 3e-6, and the
    update of a weight is rounded to the weight's own spacing, as much again; ten times that for
    three steps. Losses: the promise of 1e-5.
    16 bit: W gradients, each rounded by 2^-9 on the way and W - 1 times more where the sum itself
    is in 16 bit, are up to sqrt(W) times as large as their mean if they have nothing in common:
    (W + 1) sqrt(W) 2^-9 for both loops together. A loss is off by one rounding of its logits.
    """
    loss, others = 1e-5, 1e-4
    if dtype != "fp32":
        loss, others = 2.0**-9, (num_ranks + 1) * num_ranks**0.5 * 2.0**-9
    return {"loss": loss, "gradient norm": others, "update": others}


def first_steps(loop: TrainingLoop, setup: TrainingSetup, count: int) -> LossesAndNorms:
    """(mean loss over all ranks, gradient norm) of the first steps, with Adam made smooth."""
    _set_eps(loop.optimizer, SMOOTH_EPS)
    history = []
    for _ in range(count):
        loss, norm = loop.step()()
        if not loop.global_loss:
            loss = setup.ranks.sum(loss)[0] / setup.ranks.num_ranks
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        history.append((loss, float(norm)))
    _set_eps(loop.optimizer, EPS)
    return history


def largest_differences(history: LossesAndNorms, reference: LossesAndNorms) -> dict[str, float]:
    """The largest relative differences of losses and of gradient norms; NaN where one is NaN."""
    mine, right = (torch.tensor(each, dtype=torch.float64) for each in (history, reference))
    loss, norm = (mine / right - 1).abs().amax(0).tolist()
    return {"loss": loss, "gradient norm": norm}


def require_agreement(
    name: str, reference: str, differences: Mapping[str, float], allowed: Mapping[str, float]
) -> None:
    """Raise Disagreement unless each difference is within what is allowed."""
    for quantity, difference in differences.items():
        if not difference <= allowed[quantity]:
            raise Disagreement(
                f"{name} and {reference} do not train alike: {quantity} differs by "
                f"{difference:.2e}, allowed {allowed[quantity]:.2e}; they were not timed"
            )


def _set_eps(optimizer: torch.optim.Optimizer, eps: float) -> None:
    for group in optimizer.param_groups:
        group["eps"] = eps


def _weights(loop: TrainingLoop) -> list[Tensor]:
    """Copies of this rank's shards in fp64."""
    return [weight.double() for weight in local_weights(loop.model).values()]


def _distance(
    weights: Sequence[Tensor],
    expected: Sequence[Tensor],
    before: Sequence[Tensor],
    setup: TrainingSetup,
) -> float:
    """L2 norm of the difference of two updates over all ranks, relative to the expected one's."""
    squares = length = 0.0
    for mine, right, start in zip(weights, expected, before, strict=True):
        squares += (mine - right).square().sum().item()
        length += (right - start).square().sum().item()
    squares, length = setup.ranks.sum(squares, length)
    return (squares / length) ** 0.5
