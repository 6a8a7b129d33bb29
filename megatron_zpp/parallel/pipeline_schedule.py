"""The order in which a rank of a pipeline runs the passes of its micro-batches.

One forward pass and one backward pass in turn (1F1B), after as many forward passes as there are
ranks behind this one: no rank holds activations of more micro-batches than there are stages from it
to the end. With several stages per rank (interleaved), a rank goes through its first stage for as
many micro-batches as there are ranks, then through its next, which divides the time that ranks wait
by the number of stages. Source: Narayanan et al. 2021, section 2.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of a micro-batch through a rank's `chunk`-th stage."""

    is_forward: bool
    chunk: int
    micro_batch: int


def passes(rank: int, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> list[Pass]:
    """Return the passes of a step in the order in which `rank` of the pipeline runs them.

    Several chunks need a multiple of `num_ranks` micro-batches.
    """
    assert num_chunks == 1 or num_micro_batches % num_ranks == 0, (num_micro_batches, num_ranks)
    behind = num_ranks - rank - 1
    ahead = behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * num_ranks
    forwards = list(_in_turn(True, num_ranks, num_micro_batches, num_chunks))
    backwards = list(_in_turn(False, num_ranks, num_micro_batches, num_chunks))
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards) - ahead :]


def waiting_share(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> float:
    """Return the share of a step in which a rank waits for others (the bubble), from 0 to 1."""
    return (num_ranks - 1) / (num_chunks * num_micro_batches + num_ranks - 1)


def _in_turn(
    is_forward: bool, num_ranks: int, num_micro_batches: int, num_chunks: int
) -> Iterator[Pass]:
    """Yield the passes of one direction; backward passes begin with the last chunk."""
    chunks = range(num_chunks) if is_forward else range(num_chunks - 1, -1, -1)
    group = num_ranks if num_chunks > 1 else num_micro_batches
    for first in range(0, num_micro_batches, group):
        for chunk in chunks:
            for micro_batch in range(first, first + group):
                yield Pass(is_forward, chunk, micro_batch)
