"""Ranks that communicate, and what they send each other, as data.

Every byte is entered in a ledger here, where the collective is called, and a profiler shows the
collective by the name that it gets here. A group without a process group is planned: its
collectives are only counted, so that forecasts and runs are the same calls.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.quant.coded_message import most_bytes
from zeropp.quant.packing import RowLayout
from zeropp.ranks.groups import NamedWork, is_planned, shared_group, uses_gloo
from zeropp.wire.traffic import Coding, Traffic

# torch 2.13 renamed it
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
GATHER, EXCHANGE, REDUCE = "gather", "exchange", "reduce"
AXES = ("tensor", "context", "pipeline", "expert")  # purposes of activations, beside ZeRO's


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of the data axis: each has `ranks_per_node` consecutive positions.

    `parts` is how many ranks of a node there are for each of these: more than 1 where other axes,
    as tensor parallelism, split the model among them. Nodes may be parts of one machine, which is
    then all of `machines`.
    """

    num_ranks: int
    ranks_per_node: int
    parts: int = 1
    machines: int = field(default=1, compare=False)

    @classmethod
    def of(cls, ranks: Sequence[int], ranks_per_node: int) -> "Nodes":
        """Build from the global ranks of the data axis, in order, with `ranks_per_node` to a node.

        Raises InputError if nodes would have different numbers of ranks, or are not contiguous.
        """
        runs = [(node, len(list(run))) for node, run in groupby(r // ranks_per_node for r in ranks)]
        sizes = [size for _, size in runs]
        if len({node for node, _ in runs}) < len(runs):
            raise InputError(
                f"the data axis visits a node twice: ranks {list(ranks)} with {ranks_per_node} "
                "ranks per node; order the mesh so that the ranks of a node follow each other"
            )
        if len(set(sizes)) > 1:
            raise InputError(
                f"zeropp.ranks_per_node = {ranks_per_node} does not divide the {len(ranks)} ranks: "
                f"the nodes would have {', '.join(map(str, sizes))} of them; give every node the "
                "same number, or set ranks_per_node to a divisor of the number of ranks"
            )
        return cls(num_ranks=len(ranks), ranks_per_node=sizes[0])

    @property
    def count(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def same(self, position: int, other: int) -> bool:
        """Whether two positions are on the same node."""
        return position // self.ranks_per_node == other // self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class Message:
    """`times` equal collectives of one rank: the ledger counts them, forecasts are sums of them.

    num_bytes: of a gather, what each rank has; of an exchange, what goes to each other rank, or a
    number for each member; of a reduction, those of the tensor. A gather counts as a ring in rank
    order (what gloo does, and NCCL for large messages), an exchange as direct messages, and a
    reduction as a ring that passes each rank's share around twice.
    in_layers: they are spread over the layers of a stage; others are before or after these.
    """

    group: "RankGroup"
    kind: str
    num_bytes: int | tuple[int, ...]
    purpose: str
    times: float = 1
    is_forward: bool = True
    in_layers: bool = False

    @cached_property
    def sent(self) -> dict[str, float]:
        """The bytes that this rank sends, by hop."""
        group = self.group
        if self.kind == EXCHANGE and isinstance(self.num_bytes, tuple):
            sent = {"in_node": 0, "across_nodes": 0}
            for member, size in zip(group.members, self.num_bytes, strict=True):
                if member != group.position:
                    sent[group.hop_to(member)] += self.times * size
            return sent
        if self.kind == EXCHANGE:
            near = sum(group.nodes.same(group.position, member) for member in group.members) - 1
            each, far = self.times * self.num_bytes, group.size - 1 - near
            return {"in_node": near * each, "across_nodes": far * each}
        share = self.num_bytes if self.kind == GATHER else round(2 * self.num_bytes / group.size)
        following = group.members[(group.index + 1) % group.size]
        return {group.hop_to(following): self.times * (group.size - 1) * share}

    def of(self, position: int) -> "Message":
        """Return the same collective as the member at `position` takes part in it."""
        return replace(self, group=replace(self.group, position=position))


def sum_of(messages: Iterable[Message]) -> Counter[tuple[str, str]]:
    """Return the bytes of messages by (purpose, hop)."""
    total: Counter[tuple[str, str]] = Counter()
    for message in messages:
        for hop, num_bytes in message.sent.items():
            total[message.purpose, hop] += num_bytes
    return total


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way between two ranks."""

    _tensor: Tensor
    _work: dist.Work

    def wait(self) -> Tensor:
        """Return the tensor when it has arrived, or may be written again."""
        self._work.wait()
        return self._tensor


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The ranks that take part in collectives, in their order; this one is at `position`.

    members: positions among the ranks of `nodes`. ranks: the global ranks at all positions, where
    they can be connected. purpose: of messages, unless a call says another.
    ledger: where they are entered. group: None where the ranks are planned, or not connected yet.
    coding: whether `exchange_coded` is to be used across nodes. mesh: of the members, where each
    has a part of the same parameters.
    """

    members: tuple[int, ...]
    position: int
    nodes: Nodes
    ranks: tuple[int, ...] = ()
    purpose: str = ""
    ledger: Traffic | None = field(default=None, compare=False, repr=False)
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    coding: Coding = field(default_factory=Coding, compare=False, repr=False)
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def index(self) -> int:
        """The index of this rank among the members."""
        return self.members.index(self.position)

    @cached_property
    def where(self) -> str:
        """Where the members are, in words."""
        first, *others = self.members
        near = all(self.nodes.same(first, other) for other in others)
        return "in a node" if near else "across nodes"

    def hop_to(self, member: int) -> str:
        """Return the hop on which a message to a member counts."""
        return "in_node" if self.nodes.same(self.position, member) else "across_nodes"

    def consecutive(self, size: int) -> "RankGroup":
        """Return the `size` consecutive members of which this rank is one, not connected."""
        first = self.index - self.index % size
        return replace(self, members=self.members[first : first + size], group=None, mesh=None)

    def strided(self, stride: int) -> "RankGroup":
        """Return every `stride`-th member, this rank among them, not connected."""
        members = self.members[self.index % stride :: stride]
        return replace(self, members=members, group=None, mesh=None)

    def connected(
        self, ledger: Traffic, purpose: str, *, coding: Coding | None = None
    ) -> "RankGroup | None":
        """Return this group with a process group and a ledger; None for a group of one rank.

        Only the members need to call it. Models on the same ranks share the process group of a
        `purpose`, as with FSDP2 they share the mesh's.
        Gathers and reductions overlap, so that on one communicator they would wait for each other:
        they have different purposes. Without gloo, messages are coded if that is not only tried,
        and their lengths are sent.
        """
        if self.size == 1:
            return None
        members = [self.ranks[member] for member in self.members]
        group = shared_group(purpose, members, self.ranks)
        if coding is None or not uses_gloo(group):
            is_coded = bool(coding and coding.is_on and not coding.is_tried)
            coding = Coding(is_coded, sends_lengths=True)
        return replace(self, purpose=purpose, ledger=ledger, group=group, coding=coding)

    def hops(
        self, inner: int, ledger: Traffic, purpose: str, coding: Coding
    ) -> "tuple[RankGroup | None, RankGroup | None]":
        """Return the inner hop, of `inner` consecutive members, and the outer one, connected."""
        near, far = self.consecutive(inner), self.strided(inner)
        return near.connected(ledger, purpose), far.connected(ledger, purpose, coding=coding)

    def message(self, kind: str, num_bytes: int | tuple[int, ...], **others: object) -> Message:
        """Return a collective of this group as data; `others` are further fields of `Message`."""
        return Message(group=self, kind=kind, num_bytes=num_bytes, purpose=self.purpose, **others)

    def count(self, kind: str, num_bytes: int | tuple[int, ...], purpose: str = "") -> None:
        """Enter a collective into the ledger."""
        self.ledger.add(purpose or self.purpose, self.message(kind, num_bytes).sent)

    def all_gather(
        self,
        whole: Tensor,
        part: Tensor,
        purpose: str = "",
        *,
        unit: fsdp.Unit | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write `part` of each member, in their order, to `whole`, on every member."""
        self.count(GATHER, part.nbytes, purpose)
        if self.group is None:
            return None
        with self.traced("all_gather", purpose):
            is_named = self._is_named(part)
            work = ALL_GATHER(whole, part, group=self.group, async_op=async_op or is_named)
        return self._named(work, "all-gather", purpose, unit, async_op) if is_named else work

    def all_to_all(
        self,
        received: Tensor,
        parts: Tensor,
        purpose: str = "",
        *,
        unit: fsdp.Unit | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Send the i-th of equal parts to member i; write what comes to `received`, by sender.

        Planned members send each other the same numbers.
        """
        self.count(EXCHANGE, parts.nbytes // self.size, purpose)
        if is_planned(self.group):
            received.copy_(parts)
        if self.group is None:
            return None
        with self.traced("all_to_all", purpose):
            is_named = self._is_named(parts)
            work = dist.all_to_all_single(
                received, parts, group=self.group, async_op=async_op or is_named
            )
        return self._named(work, "all-to-all", purpose, unit, async_op) if is_named else work

    def all_to_all_unequal(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[dist.Work | None, Tensor]:
        """Send the first `sent[0]` rows [T, ...] to the first member, the next to the second, etc.

        Returns what waits for the rows [M, ...] that arrive, `received[i]` from member i, and them.
        """
        width = rows[:1].nbytes if len(rows) else 0
        self.count(EXCHANGE, tuple(count * width for count in sent))
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        if is_planned(self.group):
            arrived.zero_()[: len(rows)].copy_(rows[: len(arrived)])
        if self.group is None:
            return None, arrived
        with self.traced("all_to_all"):
            work = dist.all_to_all_single(
                arrived, rows.contiguous(), [*received], [*sent], group=self.group, async_op=True
            )
        is_named = self._is_named(rows)
        return self._named(work, "all-to-all", "", None, True) if is_named else work, arrived

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return what `all_to_all_unequal` does when it has arrived."""
        work, arrived = self.all_to_all_unequal(rows, sent, received)
        if work is not None:
            work.wait()
        return arrived

    def exchange_coded(
        self,
        messages: Sequence[Tensor],
        layout: RowLayout,
        purpose: str,
        *,
        unit: fsdp.Unit,
        async_op: bool = False,
        rooms: Sequence[int] | None = None,
    ) -> tuple[dist.Work | None, Mapping[int, Tensor]]:
        """Send each member its coded row of a layout; return what will hold theirs.

        Messages are uint8, on the host. `rooms` are the lengths of what comes. Without them nobody
        is told: gloo receives a message that is shorter than the memory for it, at its beginning,
        so that lengths cost no round trip. What comes must say itself where it ends.
        """
        own, device = self.index, "cpu" if self._is_gloo else fsdp.device_of(unit)
        most = self.size * [most_bytes(layout.packed_bytes)] if rooms is None else rooms
        rooms = [room if member != own else 0 for member, room in enumerate(most)]
        lengths = [len(message) for message in messages]
        self.count(EXCHANGE, tuple(lengths), purpose)
        self.ledger.add_coded(purpose, layout.elements * (self.size - 1), sum(lengths))
        received = torch.empty(sum(rooms), dtype=torch.uint8, device=device)
        sent = torch.cat([*messages]).to(device)
        with self.traced("exchange", purpose):
            work = dist.all_to_all_single(
                received, sent, rooms, lengths, group=self.group, async_op=async_op or self._is_gloo
            )
        if is_planned(self.group):
            received.copy_(sent)
        if self._is_gloo:
            work = self._named(work, "exchange", purpose, unit, async_op)
        return work, {at: each for at, each in enumerate(received.split(rooms)) if at != own}

    def send(self, x: Tensor) -> Transfer:
        """Begin to send x to the other one of two members."""
        x = x.detach().contiguous()
        self.count(EXCHANGE, x.nbytes)
        with self.traced("send"):
            return Transfer(x, dist.isend(x, group=self.group, group_dst=1 - self.index))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Transfer:
        """Begin to receive a tensor from the other one of two members."""
        new = torch.zeros if is_planned(self.group) else torch.empty
        x = new(*shape, dtype=dtype, device=device)
        return Transfer(x, dist.irecv(x, group=self.group, group_src=1 - self.index))

    def maximize(self, x: Tensor) -> None:
        """Replace each element of x by the largest of all members."""
        self.count(REDUCE, x.nbytes)
        if self.group is not None:
            with self.traced("all_reduce"):
                dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the members: of a few numbers, which no ledger counts."""
        if self.group is None:
            return x
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def own_seed(self) -> int:
        """Draw a number from the random state that all members share, and add this one's index."""
        return self.index + (0 if self.group is None else int(torch.randint(2**31, ())))

    def traced(self, operation: str, purpose: str = "") -> record_function:
        """Return a context that gives what runs in it a name in a profiler's trace."""
        what = f"zeropp {operation} of {purpose or self.purpose}"
        return record_function(f"{what}, {self.size} ranks {self.where}")

    def _is_named(self, tensor: Tensor) -> bool:
        """Whether a failed wait can name the ranks that did not come: the host waits, for gloo."""
        return tensor.device.type == "cpu" and self._is_gloo

    @cached_property
    def _is_gloo(self) -> bool:
        return uses_gloo(self.group)

    def _named(
        self,
        work: dist.Work,
        operation: str,
        purpose: str,
        unit: fsdp.Unit | None,
        async_op: bool,
    ) -> dist.Work | None:
        def name() -> str:
            of_unit = "" if unit is None else f" of {fsdp.name_of(unit)}"
            what = f"the {operation} of {(purpose or self.purpose).replace('_', ' ')}"
            return f"{what}{of_unit}, {self.size} ranks {self.where}"

        named = NamedWork(work, self.group, name)
        if async_op:
            return named
        named.wait()
        return None


def everyone(nodes: Nodes, position: int, ranks: Sequence[int] = ()) -> RankGroup:
    """Return the ranks at all positions, as the one at `position` sees them."""
    members = tuple(range(nodes.num_ranks))
    return RankGroup(members=members, position=position, nodes=nodes, ranks=tuple(ranks))
