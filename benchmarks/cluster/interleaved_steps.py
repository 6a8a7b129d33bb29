"""Steps of every configuration in turn, with the bytes that each put on the wire."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.cluster.network.emulation import (
    INTERFACE,
    LOOPBACK,
    Counters,
    address,
    bits_per_second,
    counters,
)
from benchmarks.shared.interleaved import Disagreement, interleaved
from benchmarks.shared.rank_processes import RankProcesses

PROBE_SECONDS = 0.4
PROBE_BYTES = 2**28  # where the rate is not limited
# Before any update every configuration computes the same function but for the rounding of its
# weights: bf16's 2^-9, or that of INT8 blocks, below 1% of a weight and averaged over thousands.
FIRST_LOSS_TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """One step of all ranks."""

    seconds: float  # of the slowest rank
    processor_seconds: float  # of all ranks together
    loss: float  # mean over ranks
    sent: Sequence[Mapping | None]  # by rank, bytes by (purpose, hop) of the traffic ledger
    wire: Sequence[Mapping[str, Counters]]  # by node and interface; empty without a network


@dataclass
class TimedSteps:
    """The timed steps of one configuration, and its passes without gradients."""

    first: TimedStep  # before any update
    steps: list[TimedStep] = field(default_factory=list)
    passes: list[TimedStep] = field(default_factory=list)  # without gradients

    @property
    def seconds(self) -> list[float]:
        return [step.seconds for step in self.steps]


def warm_up(
    ranks: RankProcesses,
    names: Sequence[str],
    processes: Sequence[int],
    *,
    steps: int,
    say: Callable[[str], None],
) -> dict[str, TimedStep]:
    """Let every configuration take its first steps in turn; returns the very first of each.

    `processes` are the ids of one process of each node, whose interfaces are read. Raises
    Disagreement if the first losses differ.
    """
    firsts: dict[str, TimedStep] = {}
    for number in range(steps):
        for name in names:
            say(f"step {number + 1} of {steps} before the timed ones: {name}")
            step = timed_run(ranks, name, "step", processes)
            firsts.setdefault(name, step)
        if number == 0:
            losses = {name: first.loss for name, first in firsts.items()}
            require_equal_losses(losses, FIRST_LOSS_TOLERANCE)
    return firsts


def run_interleaved(
    ranks: RankProcesses,
    firsts: Mapping[str, TimedStep],
    processes: Sequence[int],
    *,
    rounds: int,
    passes: int = 0,
    say: Callable[[str], None],
) -> dict[str, TimedSteps]:
    """Let each configuration take one step per round, and then the passes.

    `firsts` and `processes` are those of `warm_up`.
    """
    names = list(firsts)
    timed = {name: TimedSteps(first=first) for name, first in firsts.items()}
    for name in interleaved(names, rounds):
        steps = timed[name].steps
        say(f"round {len(steps) + 1} of {rounds}: {name}")
        steps.append(timed_run(ranks, name, "step", processes))
    for name in names:
        for _ in range(passes):
            timed[name].passes.append(timed_run(ranks, name, "forward", processes))
    return timed


def timed_run(ranks: RankProcesses, name: str, part: str, processes: Sequence[int]) -> TimedStep:
    """Let all ranks run a step or a forward pass, and read the interfaces before and after."""
    before = [counters(process) for process in processes]
    answers = ranks.ask("run", name=name, part=part)
    after = [counters(process) for process in processes]
    return TimedStep(
        seconds=max(answer["seconds"] for answer in answers),
        processor_seconds=sum(answer["processor_seconds"] for answer in answers),
        loss=_mean_loss(answers),
        sent=[answer["sent"] for answer in answers],
        wire=[
            {interface: end[interface] - start[interface] for interface in (INTERFACE, LOOPBACK)}
            for start, end in zip(before, after, strict=True)
        ],
    )


def measure_link(ranks: RankProcesses, rate: str, ranks_per_node: int) -> dict:
    """Mbit/s of payload of one plain connection between the first two nodes, each way."""
    limit = bits_per_second(rate)
    num_bytes = PROBE_BYTES if limit is None else int(limit / 8 * PROBE_SECONDS)
    rates = []
    for sender, receiver in ((0, 1), (1, 0)):
        answers = ranks.ask(
            "probe",
            sender=sender * ranks_per_node,
            receiver=receiver * ranks_per_node,
            address=address(receiver),
            num_bytes=num_bytes,
        )
        rates.append(answers[receiver * ranks_per_node]["rate"] / 1e6)
    return {"limit": None if limit is None else limit / 1e6, "measured": rates}


def require_equal_losses(losses: Mapping[str, float], tolerance: float) -> None:
    """Raise Disagreement if a loss before any update differs from the first one's, relatively."""
    reference, *others = losses
    expected = losses[reference]
    for name in others:
        if not abs(losses[name] - expected) <= tolerance * abs(expected):
            raise Disagreement(
                f"{name} and {reference} do not train the same model: before any update their "
                f"losses are {losses[name]:.4f} and {expected:.4f}; nothing was timed"
            )


def _mean_loss(answers: Sequence[dict]) -> float:
    return statistics.fmean(answer["loss"] for answer in answers if answer["loss"] is not None)
