"""hpZ: what a node keeps of the weights it has gathered, until they change.

Source: ZeRO++ (Wang et al. 2023), section 3.2.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch.distributed as dist
from torch import Tensor

from zeropp import fsdp_adapter as fsdp
from zeropp.quant.ops import quantize
from zeropp.quant.packing import RowLayout
from zeropp.settings.capabilities import CAPABILITIES, declared
from zeropp.settings.sections import Zeropp
from zeropp.wire.cross_stream import CrossStreamTensor
from zeropp.wire.rank_group import RankGroup
from zeropp.wire.route import Route


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


class OwnRow(NamedTuple):
    """This rank's row of a unit's copy, as a checkpoint holds it."""

    row: Tensor  # uint8 (P,)
    is_outdated: bool  # whether weights have been stepped since


class SecondaryCopies:
    """hpZ's secondary copies: each unit's rows after the outer hop, until the weights change.

    The choice between a copy and a new gather follows from calls that every rank makes, never from
    a tensor's state: ranks that chose differently would wait for each other forever.
    """

    updates: ClassVar[bool] = False  # copies of weights that were stepped, instead of dropping them

    def __init__(self, settings: Zeropp) -> None:
        self.in_evaluation = settings.secondary_in_evaluation
        self.version = 0
        self._rows: dict[fsdp.Unit, CrossStreamTensor] = {}
        self._trained: set[fsdp.Unit] = set()

    def note_use(self, unit: fsdp.Unit) -> None:
        """Note that the unit is about to be used, and whether that may train it.

        A unit that has been trainable in a pass may be changed by any later step, also once it is
        frozen: its gradients may be anywhere, and an update may be delayed.
        """
        if fsdp.is_trainable(unit):
            self.note_trained(unit)

    def note_trained(self, unit: fsdp.Unit) -> None:
        """Note that any later step of an optimizer may change the unit."""
        self._trained.add(unit)

    def has(self, unit: fsdp.Unit) -> bool:
        """Whether rows of the unit are kept."""
        return unit in self._rows

    def is_current(self, unit: fsdp.Unit) -> bool:
        """Whether the next gather will begin with rows that are kept."""
        return unit in self._rows

    def get(self, unit: fsdp.Unit) -> Tensor | None:
        """Return the unit's rows for use on the current stream, or None if there is no copy."""
        return self._rows[unit].on_current_stream() if self.is_current(unit) else None

    def note_read(self, unit: fsdp.Unit) -> None:
        """Take note that a gather of the unit, all of which is queued, reads rows that are kept."""
        if rows := self._rows.get(unit):
            rows.note_read()

    def gather(self, hop: OuterGather) -> Generator[dist.Work | None, None, Tensor]:
        """Return the rows (N, P) of the hop, and keep them."""
        version = self.version
        rows = yield from self._gathered(hop)
        self.keep(hop.unit, rows, version)
        return rows

    def keep(self, unit: fsdp.Unit, rows: Tensor, version: int) -> None:
        """Keep `rows`, gathered at `version`, unless the weights have changed since."""
        if version == self.version and (unit.training or self.in_evaluation):
            self._store(unit, rows)

    def drop(self) -> None:
        """Drop the copies of all units."""
        self.version += 1
        self._rows.clear()

    def drop_of(self, unit: fsdp.Unit) -> None:
        """Drop the copy of one unit."""
        self.version += 1
        self._rows.pop(unit, None)

    def note_step(self, units: Iterable[fsdp.Unit] | None = None) -> None:
        """Note that an optimizer may have stepped these units, or any: drop their copies."""
        self.version += 1
        for unit in [*self._rows] if units is None else units:
            if unit in self._trained:
                self._rows.pop(unit, None)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(rows.tensor.nbytes for rows in self._rows.values())

    def _store(self, unit: fsdp.Unit, rows: Tensor) -> None:
        self._rows[unit] = CrossStreamTensor(rows)

    def _gathered(self, hop: OuterGather) -> Generator[dist.Work | None, None, Tensor]:
        return hop.rows()


def copies_of(route: Route, settings: Zeropp) -> SecondaryCopies | None:
    """Return what keeps the copies of weights that take this route; None if none are kept."""
    if not route.keeps:
        return None
    kinds = [SecondaryCopies, *declared("COPIES", CAPABILITIES, part="copies")]
    return next(kind for kind in kinds if kind.updates == route.updates)(settings)
