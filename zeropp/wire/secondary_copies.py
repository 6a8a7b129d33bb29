"""hpZ: what a node keeps of the weights it has gathered, until they change.

Source: ZeRO++ (Wang et al. 2023), section 3.2.
"""

import torch
from torch import nn

from zeropp import fsdp_adapter as fsdp
from zeropp.wire.cross_stream import CrossStreamTensor


class SecondaryCopies:
    """hpZ's secondary copies: each unit's rows after the outer hop, until the weights change.

    The choice between a copy and a new gather follows from calls that every rank makes, never from
    a tensor's state: ranks that chose differently would wait for each other forever.
    """

    def __init__(self, *, in_evaluation: bool) -> None:
        self.in_evaluation = in_evaluation
        self.version = 0
        self._rows: dict[nn.Module, CrossStreamTensor] = {}
        self._trained: set[nn.Module] = set()

    def note_use(self, unit: nn.Module) -> None:
        """Note that the unit is about to be used, and whether that may train it.

        A unit that has been trainable in a pass may be changed by any later step, also once it is
        frozen: its gradients may be anywhere, and an update may be delayed.
        """
        if fsdp.is_trainable(unit):
            self._trained.add(unit)

    def get(self, unit: nn.Module) -> torch.Tensor | None:
        """Return the unit's rows for use on the current stream, or None if there is no copy."""
        rows = self._rows.get(unit)
        return rows.on_current_stream() if rows else None

    def keep(self, unit: nn.Module, rows: torch.Tensor, version: int) -> None:
        """Keep `rows`, gathered at `version`, unless the weights have changed since."""
        if version == self.version and (unit.training or self.in_evaluation):
            self._rows[unit] = CrossStreamTensor(rows)

    def drop(self, *, stepped_only: bool = False) -> None:
        """Drop the copies of all units, or only of those that an optimizer may have stepped."""
        self.version += 1
        for unit in tuple(self._rows):
            if not stepped_only or unit in self._trained:
                del self._rows[unit]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(rows.tensor.nbytes for rows in self._rows.values())
