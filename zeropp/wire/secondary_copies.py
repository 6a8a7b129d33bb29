"""hpZ: what a node keeps of the weights it has gathered, until they change.

Source: ZeRO++ (Wang et al. 2023), section 3.2.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from zeropp import fsdp_adapter as fsdp
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire.cross_stream import CrossStreamTensor
from zeropp.wire.route import Route


class OwnRow(NamedTuple):
    """This rank's row of a unit's copy, as a checkpoint holds it."""

    row: Tensor  # uint8 (P,)
    is_outdated: bool  # whether weights have been stepped since


class SecondaryCopies:
    """hpZ's secondary copies: each unit's rows after the outer hop, until the weights change.

    The choice between a copy and a new gather follows from calls that every rank makes, never from
    a tensor's state: ranks that chose differently would wait for each other forever. With `updates`
    copies of weights that an optimizer may have stepped are brought up to date instead of dropped,
    and compared after every `check_interval` updates of a unit, or never if that is 0.
    """

    def __init__(
        self, *, in_evaluation: bool, updates: bool = False, check_interval: int = 0
    ) -> None:
        self.in_evaluation, self.updates = in_evaluation, updates
        self.version = 0
        self._check_interval = check_interval
        self._num_updates: Counter[fsdp.Unit] = Counter()
        self._rows: dict[fsdp.Unit, CrossStreamTensor] = {}
        self._outdated: set[fsdp.Unit] = set()
        self._trained: set[fsdp.Unit] = set()
        self._loaded: dict[fsdp.Unit, OwnRow] = {}

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
        """Whether rows of the unit are kept, maybe out of date, or from a checkpoint."""
        return unit in self._rows or unit in self._loaded

    def is_current(self, unit: fsdp.Unit) -> bool:
        """Whether the next gather will begin with rows that are kept."""
        return unit in self._rows and unit not in self._outdated

    def get(self, unit: fsdp.Unit) -> Tensor | None:
        """Return the unit's rows for use on the current stream, or None if there is no copy."""
        return self._on_current_stream(unit) if self.is_current(unit) else None

    def get_outdated(self, unit: fsdp.Unit) -> Tensor | None:
        """Return the unit's rows from before the last steps of optimizers; None if there are none.

        They are to be brought up to date in place, and kept again. The current stream waits for
        the gathers that read them.
        """
        return self._rows[unit].for_writing() if unit in self._outdated else None

    def note_read(self, unit: fsdp.Unit) -> None:
        """Take note that a gather of the unit, all of which is queued, reads rows that are kept."""
        if rows := self._rows.get(unit):
            rows.note_read()

    def get_loaded(self, unit: fsdp.Unit) -> OwnRow | None:
        """Return this rank's row from a checkpoint, until a copy is kept; None if there is none."""
        return self._loaded.get(unit)

    def keep(self, unit: fsdp.Unit, rows: Tensor, version: int) -> None:
        """Keep `rows`, gathered or brought up to date at `version`.

        If the weights have changed since, they are not kept, or are out of date again.
        """
        is_new = unit not in self._rows and unit not in self._loaded
        if is_new and (version != self.version or not (unit.training or self.in_evaluation)):
            return
        self._rows[unit] = CrossStreamTensor(rows)
        self._loaded.pop(unit, None)
        if version == self.version:
            self._outdated.discard(unit)
        else:
            self._outdated.add(unit)

    def drop(self, *, stepped_only: bool = False) -> None:
        """Drop the copies of all units, or only of those that an optimizer may have stepped."""
        if stepped_only:
            self.note_step({*self._rows, *self._loaded})
            return
        self.version += 1
        for each in (self._rows, self._outdated, self._loaded):
            each.clear()

    def note_step(self, units: Iterable[fsdp.Unit]) -> None:
        """Note that an optimizer may have stepped these units: drop their copies, or bring them up
        to date in the next gather."""
        self.version += 1
        for unit in units:
            if unit in self._loaded:
                self._loaded[unit] = self._loaded[unit]._replace(is_outdated=True)
            if unit not in self._trained or unit not in self._rows:
                continue
            if self.updates:
                self._outdated.add(unit)
            else:
                del self._rows[unit]

    def check_is_due(self, unit: fsdp.Unit) -> bool:
        """Note that the unit's copies were brought up to date, and return whether to compare them.

        They are brought up to date by the same calls on all ranks.
        """
        self._num_updates[unit] += 1
        return self._check_interval > 0 and self._num_updates[unit] % self._check_interval == 0

    def drop_of(self, unit: fsdp.Unit) -> None:
        """Drop the copy of one unit."""
        self.version += 1
        self._rows.pop(unit, None)
        self._loaded.pop(unit, None)
        self._outdated.discard(unit)

    def own_row(self, unit: fsdp.Unit, place: int) -> OwnRow | None:
        """Return this rank's row of a copy that steps bring up to date; it shares its memory.

        `place` is that of the row in the copy.
        """
        if unit in self._loaded or unit not in self._trained or unit not in self._rows:
            return self._loaded.get(unit)
        row = self._rows[unit].on_current_stream()[place]
        return OwnRow(row, is_outdated=unit in self._outdated)

    def restore(self, unit: fsdp.Unit, own: OwnRow) -> None:
        """Let the unit's next gather begin with what `own_row` returned when it was saved."""
        self._loaded[unit] = own

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(rows.tensor.nbytes for rows in self._rows.values())

    def _on_current_stream(self, unit: fsdp.Unit) -> Tensor | None:
        rows = self._rows.get(unit)
        return rows.on_current_stream() if rows else None


def copies_of(route: Route, config: ZeroConfig) -> SecondaryCopies | None:
    """Return what keeps the copies of weights that take this route; None if none are kept."""
    if not route.keeps:
        return None
    return SecondaryCopies(
        in_evaluation=config.zeropp.secondary_in_evaluation,
        updates=route.updates,
        check_interval=config.zeropp.weight_step_check_interval,
    )
