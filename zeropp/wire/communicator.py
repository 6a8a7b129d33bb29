"""A hop with its process group: the only place where weights and gradients are sent.

Every byte is entered in the ledger here, where the collective is called, and a profiler shows the
collective by the name that it gets here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import record_function

from zeropp import fsdp_adapter as fsdp
from zeropp.quant.coded_message import most_bytes
from zeropp.quant.packing import RowLayout
from zeropp.ranks.groups import shared_group, uses_gloo
from zeropp.ranks.waits import NamedWork
from zeropp.wire.route import Hop
from zeropp.wire.traffic import Traffic

# torch 2.13 renamed it
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def traced(operation: str, purpose: str, hop: Hop) -> record_function:
    """Return a context that gives what runs in it a name in a profiler's trace."""
    return record_function(f"zeropp {operation} of {purpose}, {hop.size} ranks {hop.place}")


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """The ranks of a hop, connected; `position` is this rank's on the data axis."""

    hop: Hop
    position: int
    group: dist.ProcessGroup
    traffic: Traffic
    is_gloo: bool = False
    is_coded: bool = False  # whether its messages are coded to their entropy

    @property
    def size(self) -> int:
        return self.hop.size

    @property
    def place(self) -> int:
        """This rank's place in the hop."""
        return self.hop.members.index(self.position)

    def all_gather(
        self,
        output: torch.Tensor,
        shard: torch.Tensor,
        purpose: str,
        *,
        unit: fsdp.Unit,
        async_op: bool = False,
    ) -> dist.Work | None:
        """`shard` of each member, in the order of the hop, -> `output`, on every member."""
        self.traffic.add(purpose, self.hop.gather_bytes(self.position, shard.nbytes))
        with traced("all_gather", purpose, self.hop):
            if not self._is_named(shard):
                return ALL_GATHER(output, shard, group=self.group, async_op=async_op)
            work = ALL_GATHER(output, shard, group=self.group, async_op=True)
            return self._named(work, f"the all-gather of {purpose}", unit, async_op=async_op)

    def all_to_all(
        self,
        received: torch.Tensor,
        rows: torch.Tensor,
        purpose: str,
        *,
        unit: fsdp.Unit,
        async_op: bool = False,
    ) -> dist.Work | None:
        """`rows` in equal parts, the i-th for member i -> `received`, in the order of senders."""
        part = rows.nbytes // self.size
        self.traffic.add(purpose, self.hop.exchange_bytes(self.position, part))
        with traced("all_to_all", purpose, self.hop):
            if not self._is_named(rows):
                return dist.all_to_all_single(received, rows, group=self.group, async_op=async_op)
            work = dist.all_to_all_single(received, rows, group=self.group, async_op=True)
            return self._named(work, f"the all-to-all of {purpose}", unit, async_op=async_op)

    def exchange(
        self,
        messages: Sequence[torch.Tensor],
        layout: RowLayout,
        purpose: str,
        *,
        unit: fsdp.Unit,
        async_op: bool = False,
    ) -> tuple[dist.Work | None, Mapping[int, torch.Tensor]]:
        """Send each member its coded row of a layout; return what will hold theirs.

        Messages are uint8, on the host. Nobody is told how long they are: gloo receives one that is
        shorter than the memory for it, at its beginning, so that lengths cost no round trip. What
        comes must say itself where it ends.
        """
        own, group, room = self.place, self.group, most_bytes(layout.packed_bytes)
        others = [member for member in range(self.size) if member != own]
        rooms = [room if member != own else 0 for member in range(self.size)]
        lengths = [len(message) for message in messages]
        for member in others:
            place = self.hop.members[member]
            self.traffic.add(purpose, self.hop.message_bytes(self.position, place, lengths[member]))
        self.traffic.add_coded(purpose, layout.elements * len(others), sum(lengths))
        received = torch.empty(sum(rooms), dtype=torch.uint8)
        with traced("exchange", purpose, self.hop):
            work = dist.all_to_all_single(
                received, torch.cat([*messages]), rooms, lengths, group=group, async_op=True
            )
            work = self._named(work, f"the exchange of {purpose}", unit, async_op=async_op)
        return work, dict(zip(others, received.view(-1, room), strict=True))

    def all_to_all_unequal(
        self, message: torch.Tensor, sent: Sequence[int], received: Sequence[int], purpose: str
    ) -> tuple[dist.Work, torch.Tensor]:
        """Send `sent[i]` of the bytes of `message` to member i; return what will hold theirs.

        All are uint8, one after another in the order of the hop, and `received` says how many come.
        """
        for member, length in zip(self.hop.members, sent, strict=True):
            self.traffic.add(purpose, self.hop.message_bytes(self.position, member, length))
        arrived = message.new_empty(sum(received))
        with traced("all_to_all", purpose, self.hop):
            work = dist.all_to_all_single(
                arrived, message, [*received], [*sent], group=self.group, async_op=True
            )
        if self._is_named(message):
            work = self._named(work, f"the all-to-all of {purpose}", None, async_op=True)
        return work, arrived

    def _is_named(self, tensor: torch.Tensor) -> bool:
        """Whether a failed wait can name the ranks that did not come: the host waits, for gloo."""
        return self.is_gloo and tensor.device.type == "cpu"

    def _named(
        self, work: dist.Work, operation: str, unit: fsdp.Unit | None, *, async_op: bool
    ) -> dist.Work | None:
        def name() -> str:
            what = operation.replace("_", " ")
            of_unit = "" if unit is None else f" of {fsdp.name_of(unit)}"
            return f"{what}{of_unit}, {self.hop.size} ranks {self.hop.place}"

        named = NamedWork(work, self.group, name)
        if async_op:
            return named
        named.wait()
        return None


def connect(
    hop: Hop,
    ranks: tuple[int, ...],
    position: int,
    traffic: Traffic,
    purpose: str,
    *,
    is_coded: bool = False,
) -> Communicator | None:
    """Connect this rank to its hop; return None for a hop of one rank.

    `ranks` are the global ranks of the data axis. Only the hop's members need to call it. Models on
    the same ranks share the process group of a hop and a `purpose`, as with FSDP2 they share the
    mesh's. Gathers and reductions overlap, so that on one communicator they would wait for each
    other: they have different purposes. `is_coded` says whether messages are coded, which
    are lost on a group that has no gloo: there they are not.
    """
    if hop.size == 1:
        return None
    group = shared_group(purpose, [ranks[member] for member in hop.members], ranks)
    is_gloo = uses_gloo(group)
    return Communicator(
        hop=hop,
        position=position,
        group=group,
        traffic=traffic,
        is_gloo=is_gloo,
        is_coded=is_coded and is_gloo,
    )
