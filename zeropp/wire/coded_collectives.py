"""Collectives of a hop across nodes: a gather of rows, and an exchange of coded ones.

N members, rows of P bytes. Coded messages have any length, and no bit is lost. They are coded and
decoded on the host, those of GPUs too: what the links carry is a fraction of what goes to the host
and back.
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp import fsdp_adapter as fsdp
from zeropp.quant.coded_message import Spans, decode, encode
from zeropp.quant.ops import quantize
from zeropp.quant.packing import RowLayout
from zeropp.wire.cross_stream import HostCopy
from zeropp.wire.rank_group import RankGroup


@dataclass(frozen=True)
class OuterGather:
    """The outer hop of one gather of a unit's weights: each of N members sends a row of P bytes.

    `shard` (C,) is what this rank sends: quantized, or as it is for a `layout` of None.
    """

    unit: fsdp.Unit
    outer: RankGroup | None
    shard: Tensor
    layout: RowLayout | None
    purpose: str
    async_op: bool

    def rows(self, row: Tensor | None = None) -> Generator[dist.Work | None, None, Tensor]:
        """Return the rows (N, P) of all members; `row` (1, P) is sent in place of the shard's."""
        if row is None:
            row = self.shard.view(1, -1)
            row = row.clone() if self.layout is None else quantize(row, self.layout)
        if not self.outer:
            return row
        arrived = row.new_empty(self.outer.size, row.shape[1])
        yield self.outer.all_gather(
            arrived, row, self.purpose, unit=self.unit, async_op=self.async_op
        )
        return arrived


def exchange_rows(
    outer: RankGroup,
    rows: Tensor,
    layout: RowLayout,
    purpose: str,
    *,
    unit: fsdp.Unit,
    async_op: bool,
) -> Generator[dist.Work | None, None, Tensor]:
    """`rows` (N, P), the i-th for member i -> those for this one (N, P), in the senders' order."""
    own, threes, host = outer.index, threes_in(layout), rows.cpu()
    messages = [
        encode(host[member], threes=threes) if member != own else host[own, :0]
        for member in range(outer.size)
    ]
    rooms = None
    if outer.coding.sends_lengths:
        lengths = torch.tensor([*map(len, messages)], device=rows.device)
        come = torch.empty_like(lengths)
        yield outer.all_to_all(come, lengths, purpose, unit=unit, async_op=async_op)
        rooms = HostCopy(come).tolist()  # there, if something was computed meanwhile
    work, arrived = outer.exchange_coded(
        messages, layout, purpose, unit=unit, async_op=async_op, rooms=rooms
    )
    yield work
    received = host.new_empty(host.shape)
    received[own] = host[own]
    for member, each in arrived.items():
        decode(each.cpu(), received[member], threes=threes)
    return received.to(rows.device)


def threes_in(layout: RowLayout) -> Spans:
    """Return where a packed row has codes of three bits, as (first, end) of its bytes."""
    return [
        (each.data_at, each.data_at + each.size * each.bits // 8)
        for each in layout.segments
        if each.bits == 3
    ]
