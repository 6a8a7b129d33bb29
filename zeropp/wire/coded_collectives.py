"""Collectives of a hop across nodes whose messages are coded: any length, and no bit lost.

N members, rows of P bytes. Messages are coded and decoded on the host, those of GPUs too: what the
links carry is a fraction of what goes to the host and back.

After an optimizer's step most of the codes that hpZ keeps in each node are what they were, as their
blocks keep their scales (`requantize`), and the others have not moved far. So a message says what
has changed in a row that all nodes hold. Their copies are equal, as they start from the same bytes
and are changed by the same messages. To make sure of it, `is_same_on_all_nodes` compares sums.
"""

from collections.abc import Generator

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp import fsdp_adapter as fsdp
from zeropp.quant.coded_message import Spans, decode, encode
from zeropp.quant.packing import RowLayout
from zeropp.wire.in_flight import Hops
from zeropp.wire.rank_group import RankGroup

CHECK_BYTES = 8  # that a rank sends of a unit to compare its copies


def gather_changes(
    outer: RankGroup,
    row: Tensor,
    rows: Tensor,
    layout: RowLayout,
    purpose: str,
    *,
    unit: fsdp.Unit,
    async_op: bool,
) -> Hops:
    """`row` (1, P) of each member -> `rows` (N, P), in place; all members hold the same rows."""
    own, held = outer.index, rows.cpu()
    message = encode(row[0].cpu(), held=held[own])
    messages = [message if member != own else message[:0] for member in range(outer.size)]
    work, arrived = outer.exchange_coded(messages, layout, purpose, unit=unit, async_op=async_op)
    yield work
    for member, each in arrived.items():
        decode(each, held[member], holds=True)
    held[own] = row[0]
    if held.device != rows.device:
        rows.copy_(held)


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
    work, arrived = outer.exchange_coded(messages, layout, purpose, unit=unit, async_op=async_op)
    yield work
    received = host.new_empty(host.shape)
    received[own] = host[own]
    for member, each in arrived.items():
        decode(each, received[member], threes=threes)
    return received.to(rows.device)


def is_same_on_all_nodes(
    rows: Tensor, outer: RankGroup, purpose: str, unit: fsdp.Unit, *, async_op: bool
) -> Generator[dist.Work | None, None, bool]:
    """Return whether all ranks of the hop hold the same `rows` (N, P); each sends CHECK_BYTES."""
    words = rows.view(torch.int64).flatten()
    places = torch.arange(1, 2 * len(words), 2, device=words.device)  # odd: no change is lost
    own = (words * places).sum().view(1)  # modulo 2^64
    sums = own.new_empty(outer.size)
    yield outer.all_gather(sums, own, purpose, unit=unit, async_op=async_op)
    return bool((sums == own).all())


def threes_in(layout: RowLayout) -> Spans:
    """Return where a packed row has codes of three bits, as (first, end) of its bytes."""
    return [
        (each.data_at, each.data_at + each.size * each.bits // 8)
        for each in layout.segments
        if each.bits == 3
    ]
