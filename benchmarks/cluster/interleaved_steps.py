"""Steps of every configuration in turn, with the bytes that each left on the wire."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.cluster.crew import Crew
from benchmarks.cluster.emulation import (
    INTERFACE,
    LOOPBACK,
    Cluster,
    Counters,
    bits_per_second,
    counters,
)

PROBE_SECONDS = 0.4
PROBE_BYTES = 2**28  # where there is no limit
# Before any update every configuration computes the same function but for the rounding of its
# weights: bf16's 2^-9, or that of INT8 blocks, below 1% of a weight and averaged over thousands.
FIRST_LOSS_APART = 0.01


class Disagreement(RuntimeError):
    """A configuration does not compute what the others compute."""


class Order(Protocol):
    """What `take_turns` needs to know of a plan."""

    names: tuple[str, ...]
    ranks_per_node: int
    rounds: int
    warm_up: int


@dataclass
class Turns:
    """The timed steps of one configuration; of each step one entry."""

    first_loss: float
    seconds: list[float] = field(default_factory=list)  # of the slowest rank
    work: list[float] = field(default_factory=list)  # processor time of all ranks together
    losses: list[float] = field(default_factory=list)  # mean over ranks
    sent: list[list[dict | None]] = field(default_factory=list)  # by rank, what its ledger says
    wire: list[list[dict[str, Counters]]] = field(default_factory=list)  # by node and interface


def take_turns(
    crew: Crew, order: Order, has_network: bool, say: Callable[[str], None]
) -> dict[str, Turns]:
    """Let every configuration take `order.rounds` steps, one in turn, after warming up.

    The order turns round each round. Raises Disagreement if the first losses are not alike.
    """
    turns: dict[str, Turns] = {}
    for number in range(order.warm_up):
        for name in order.names:
            say(f"warming up {name}")
            loss = _mean_loss(crew.ask("step", name=name))
            if number == 0:
                turns[name] = Turns(first_loss=loss)
    _require_agreement(turns)
    processes = crew.processes(order.ranks_per_node) if has_network else []
    for number in range(order.rounds):
        for name in order.names[:: -1 if number % 2 else 1]:
            say(f"round {number + 1} of {order.rounds}: {name}")
            before = [counters(process) for process in processes]
            answers = crew.ask("step", name=name)
            after = [counters(process) for process in processes]
            one = turns[name]
            one.seconds.append(max(answer["seconds"] for answer in answers))
            one.work.append(sum(answer["work"] for answer in answers))
            one.losses.append(_mean_loss(answers))
            one.sent.append([answer["sent"] for answer in answers])
            one.wire.append(
                [{name: a[name] - b[name] for name in (INTERFACE, LOOPBACK)}
                 for a, b in zip(after, before, strict=True)]
            )
    return turns


def measure_link(crew: Crew, cluster: Cluster, ranks_per_node: int) -> dict:
    """Mbit/s of payload that one plain connection carries between the first two nodes, each way."""
    limit = bits_per_second(cluster.rate)
    num_bytes = PROBE_BYTES if limit is None else int(limit / 8 * PROBE_SECONDS)
    rates = []
    for sender, receiver in ((0, 1), (1, 0)):
        answers = crew.ask(
            "probe",
            sender=sender * ranks_per_node,
            receiver=receiver * ranks_per_node,
            address=cluster.address(receiver),
            num_bytes=num_bytes,
        )
        rates.append(answers[receiver * ranks_per_node]["rate"] / 1e6)
    return {"limit": None if limit is None else limit / 1e6, "measured": rates}


def _mean_loss(answers: Sequence[dict]) -> float:
    return statistics.fmean(answer["loss"] for answer in answers)


def _require_agreement(turns: dict[str, Turns]) -> None:
    first, *others = turns
    right = turns[first].first_loss
    for name in others:
        loss = turns[name].first_loss
        if not abs(loss - right) <= FIRST_LOSS_APART * abs(right):
            raise Disagreement(
                f"{name} and {first} do not train the same model: before any update their losses "
                f"are {loss:.4f} and {right:.4f}; nothing was timed"
            )
