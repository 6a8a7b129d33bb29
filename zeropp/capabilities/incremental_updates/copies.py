"""Copies that are brought up to date by what has changed in their codes.

N members, rows of P bytes. After an optimizer's step most of the codes that hpZ keeps in each node
are what they were, as their blocks keep their scales (`requantize`), and the others have not moved
far. So a coded message says what has changed in a row that all nodes hold. Their copies are equal,
as they start from the same bytes and are changed by the same messages. To make sure of it,
`_is_same_on_all_nodes` compares sums.
"""

import logging
from collections import Counter
from collections.abc import Generator, Iterable
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp import fsdp_adapter as fsdp
from zeropp.quant.coded_message import decode, encode
from zeropp.quant.ops import requantize
from zeropp.settings.sections import Zeropp
from zeropp.wire.coded_collectives import OuterGather
from zeropp.wire.cross_stream import CrossStreamTensor, HostCopy
from zeropp.wire.in_flight import Hops
from zeropp.wire.kept_weights import KeptWeights

log = logging.getLogger("zeropp")


class OwnRow(NamedTuple):
    """This rank's row of a unit's copy, as a checkpoint holds it."""

    row: Tensor  # uint8 (P,)
    is_outdated: bool  # whether weights have been stepped since


class UpdatedCopies(KeptWeights):
    """Kept weights whose copies are brought up to date where an optimizer may have stepped weights.

    Coded ones are compared after every `weight_step_check_interval` updates of a unit, or never.
    """

    updates: ClassVar[bool] = True

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, settings: Zeropp) -> None:
        super().__init__(model, group, settings)
        self._check_interval = settings.weight_step_check_interval
        self._num_updates: Counter[fsdp.Unit] = Counter()  # the same on all ranks
        self._outdated: set[fsdp.Unit] = set()
        self._loaded: dict[fsdp.Unit, OwnRow] = {}
        # Messages before their gathers: coded at which version, and the lengths of all members'.
        self._ahead: dict[fsdp.Unit, tuple[int, Tensor, list[int]]] = {}

    def has_copy(self, unit: fsdp.Unit) -> bool:
        """Whether rows of the unit are kept, maybe out of date, or from a checkpoint."""
        return super().has_copy(unit) or unit in self._loaded

    def has_current_copy(self, unit: fsdp.Unit) -> bool:
        return super().has_current_copy(unit) and unit not in self._outdated

    def get_outdated(self, unit: fsdp.Unit) -> Tensor | None:
        """Return the unit's rows from before the last steps of optimizers; None if there are none.

        They are to be brought up to date in place, and kept again. The current stream waits for
        the gathers that read them.
        """
        return self._rows[unit].for_writing() if unit in self._outdated else None

    def keep_copy(self, unit: fsdp.Unit, rows: Tensor, version: int) -> None:
        """Keep `rows`, gathered or brought up to date at `version`.

        If the weights have changed since, they are not kept, or are out of date again.
        """
        if not self.has_copy(unit):
            super().keep_copy(unit, rows, version)
            return
        self._rows[unit] = CrossStreamTensor(rows)
        self._loaded.pop(unit, None)
        if version == self._version:
            self._outdated.discard(unit)
        else:
            self._outdated.add(unit)

    def drop_copies(self) -> None:
        super().drop_copies()
        self._outdated.clear()
        self._loaded.clear()

    def drop_copy_of(self, unit: fsdp.Unit) -> None:
        super().drop_copy_of(unit)
        self._loaded.pop(unit, None)
        self._outdated.discard(unit)

    def note_step(self, units: Iterable[fsdp.Unit] | None = None) -> None:
        """Note that an optimizer may have stepped these units, or any: their next gathers bring
        their copies up to date."""
        self._version += 1
        for unit in {*self._rows, *self._loaded} if units is None else units:
            if unit in self._loaded:
                self._loaded[unit] = self._loaded[unit]._replace(is_outdated=True)
            if unit in self._trained and unit in self._rows:
                self._outdated.add(unit)

    def own_row(self, unit: fsdp.Unit, place: int) -> OwnRow | None:
        """Return this rank's row of a copy, the one at `place` in it; it shares its memory."""
        if unit in self._loaded or unit not in self._trained or unit not in self._rows:
            return self._loaded.get(unit)
        row = self._rows[unit].on_current_stream()[place]
        return OwnRow(row, is_outdated=unit in self._outdated)

    def restore(self, unit: fsdp.Unit, row: Tensor, *, is_outdated: bool) -> None:
        """Let the unit's next gather begin with what `own_row` returned when it was saved."""
        self._loaded[unit] = OwnRow(row, is_outdated)

    def _gathered(self, hop: OuterGather) -> Generator[dist.Work | None, None, Tensor]:
        rows = self.get_outdated(hop.unit)
        if rows is not None:
            return (yield from self._updated(hop, rows))
        loaded = self._loaded.get(hop.unit) if hop.layout is not None else None
        if loaded is None:
            return (yield from hop.rows())
        rows = yield from hop.rows(loaded.row.to(hop.shard.device).view(1, -1))
        return (yield from self._updated(hop, rows)) if loaded.is_outdated else rows

    def _updated(self, hop: OuterGather, rows: Tensor) -> Generator[dist.Work | None, None, Tensor]:
        """Return `rows` (N, P), in place, with the codes that the members' shards have now."""
        outer, unit = hop.outer, hop.unit
        own = slice(outer.index, outer.index + 1)
        if not outer.coding.is_on:
            row = requantize(hop.shard.view(1, -1), rows[own], hop.layout)
            yield outer.all_gather(rows, row, hop.purpose, unit=unit, async_op=hop.async_op)
            return rows
        if outer.coding.sends_lengths:
            row, (_, message, lengths) = None, self._coded_ahead(hop, rows)
        else:
            (row, message), lengths = _changes(hop, rows), None
        yield from _gather_changes(hop, rows, row, message, lengths)
        self._num_updates[unit] += 1
        if not self._check_interval or self._num_updates[unit] % self._check_interval:
            return rows
        if (yield from _is_same_on_all_nodes(hop, rows)):
            return rows
        log.warning(
            "the copies of %s differ between nodes: whole codes are sent again", fsdp.name_of(unit)
        )
        return (yield from hop.rows(rows[own].clone()))

    def _coded_ahead(self, hop: OuterGather, rows: Tensor) -> tuple[int, Tensor, list[int]]:
        """Return the unit's entry of `_ahead`.

        The first gather since a step codes the messages of all units that will send one, and sends
        all lengths at once: the host waits for them once in a step.
        """
        if self._ahead.get(hop.unit, (None,))[0] != self._version:
            messages = {hop.unit: _changes(hop, rows)[1]}
            for unit in (each for each in self._states if each in self._outdated):
                gather = fsdp.collectives_of(unit).all_gather
                if unit is hop.unit or gather.outer is not hop.outer or fsdp.is_gathered(unit):
                    continue
                other = gather.outer_gather(fsdp.gather_input(unit), hop.purpose, async_op=False)
                messages[unit] = _changes(other, self.get_outdated(unit))[1]
            own = torch.tensor([*map(len, messages.values())], device=rows.device)
            lengths = own.new_empty(hop.outer.size * len(own))
            hop.outer.all_gather(lengths, own, hop.purpose, unit=hop.unit)
            by_unit = HostCopy(lengths.view(hop.outer.size, -1).t()).tolist()
            pairs = zip(messages.items(), by_unit, strict=True)
            self._ahead = {unit: (self._version, each, of) for (unit, each), of in pairs}
        return self._ahead.pop(hop.unit)


COPIES = (UpdatedCopies,)


def _changes(hop: OuterGather, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's row (1, P) of `rows` (N, P) as its shard is now, and what has changed."""
    own = rows[hop.outer.index : hop.outer.index + 1]
    row = requantize(hop.shard.view(1, -1), own, hop.layout)
    return row, encode(row[0].cpu(), held=own[0].cpu())


def _gather_changes(
    hop: OuterGather,
    rows: Tensor,
    row: Tensor | None,
    message: Tensor,
    lengths: list[int] | None,
) -> Hops:
    """`message` of each member -> their `rows` (N, P), in place; all members hold the same rows.

    `row` (1, P) is what this rank's message makes of its own, if it is at hand.
    """
    outer, held = hop.outer, rows.cpu()
    own = outer.index
    messages = [message if member != own else message[:0] for member in range(outer.size)]
    work, arrived = outer.exchange_coded(
        messages, hop.layout, hop.purpose, unit=hop.unit, async_op=hop.async_op, rooms=lengths
    )
    yield work
    for member, each in arrived.items():
        decode(each.cpu(), held[member], holds=True)
    if row is None:
        decode(message, held[own], holds=True)
    else:
        held[own] = row[0]
    if held.device != rows.device:
        rows.copy_(held)


def _is_same_on_all_nodes(
    hop: OuterGather, rows: Tensor
) -> Generator[dist.Work | None, None, bool]:
    """Return whether all ranks of the hop hold the same `rows` (N, P); each sends 8 bytes."""
    words = rows.view(torch.int64).flatten()
    places = torch.arange(1, 2 * len(words), 2, device=words.device)  # odd: no change is lost
    own = (words * places).sum().view(1)  # modulo 2^64
    sums = own.new_empty(hop.outer.size)
    yield hop.outer.all_gather(sums, own, hop.purpose, unit=hop.unit, async_op=hop.async_op)
    return bool((sums == own).all())
