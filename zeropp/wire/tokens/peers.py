"""The ranks that send each other activations, and the ledger of what this rank has sent them.

An all-gather is counted as a ring in rank order, a sum of whole tensors too; an all-to-all and a
message to a neighbour as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.wire.communicator import ALL_GATHER, traced
from zeropp.wire.route import Hop
from zeropp.wire.traffic import Traffic

GATHER, EXCHANGE, REDUCE = "gather", "exchange", "reduce"
AXES = (
    "tensor",
    "context",
    "pipeline",
    "expert",
)  # the purposes of what is sent, in addition to ZeRO's


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The ranks of `group`; this one is `rank`. `hop` and `rank` count all ranks of the run.

    `purpose` is one of `AXES`. Ranks that are only planned have no group: what they would send is
    counted, and what they would receive is allocated. They send each other the same numbers.
    """

    purpose: str
    rank: int
    group: dist.ProcessGroup | None
    hop: Hop
    traffic: Traffic

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.hop.size

    @property
    def place(self) -> int:
        """The number of this rank among them."""
        return self.hop.members.index(self.rank)

    def gather(self, part: Tensor, whole: Tensor) -> None:
        """Write the parts of all ranks to `whole` [T, ...]."""
        self.count(GATHER, part.nbytes)
        if self.group is None:
            return
        with traced("all_gather", self.purpose, self.hop):
            ALL_GATHER(whole.view(-1), part.contiguous().view(-1), group=self.group)

    def exchange(self, parts: Tensor, received: Tensor) -> None:
        """Send part i of `parts` [T, ...] to rank i; write to `received` what the others send."""
        self.count(EXCHANGE, parts.nbytes // self.size)
        if self.group is None:
            received.copy_(parts)
            return
        with traced("all_to_all", self.purpose, self.hop):
            dist.all_to_all_single(received, parts, group=self.group)

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first `sent[0]` rows [T, H] to rank 0, the next ones to rank 1 and so on.

        Returns the rows [M, H] that arrive, `received[i]` from rank i, in the order of the ranks.
        """
        width = rows[:1].nbytes if len(rows) else 0
        for place, count in enumerate(sent):
            if place != self.place:
                by_hop = self.hop.message_bytes(self.rank, self.hop.members[place], count * width)
                self.traffic.add(self.purpose, by_hop)
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        if self.group is None:
            return arrived
        with traced("all_to_all", self.purpose, self.hop):
            dist.all_to_all_single(
                arrived, rows.contiguous(), [*received], [*sent], group=self.group
            )
        return arrived

    def maximize(self, x: Tensor) -> None:
        """Replace each element of x by the largest of all ranks."""
        self.count(REDUCE, x.nbytes)
        if self.group is None:
            return
        with traced("all_reduce", self.purpose, self.hop):
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)

    def own_seed(self) -> int:
        """Draw a number from the random state that all ranks share, and add this rank's place."""
        shared = 0 if self.group is None else int(torch.randint(2**31, ()))
        return shared + self.place

    def count(self, kind: str, num_bytes: int) -> None:
        """Enter a collective into the ledger.

        num_bytes: of a gather from each rank, of an exchange to each rank, of a reduction in all,
        which passes each rank's share around twice.
        """
        if kind == REDUCE:
            kind, num_bytes = GATHER, 2 * num_bytes // self.size
        sent = self.hop.gather_bytes if kind == GATHER else self.hop.exchange_bytes
        self.traffic.add(self.purpose, sent(self.rank, num_bytes))
