"""Whole parameters between the passes of a root, under `zeropp.initialize` at stages 0 to 2.

Programs read and write them. What is written is found by contents: this rank's rows are compared
with its shards, rounded as they were sent. Where they differ, the shards take what was written.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from zeropp import fsdp_adapter as fsdp
from zeropp.wire.collectives import WeightGather
from zeropp.wire.gradients import Gradients
from zeropp.wire.kept_weights import KeptWeights
from zeropp.wire.shard_holders import notify_written

INTEGERS = {2: torch.int16, 4: torch.int32}  # by bytes of a floating-point number, to compare bits


class WholeWeights:
    """Keeps the weights of units of a root gathered between passes.

    `units` are all but those whose parameters are split over other axes, too.
    """

    def __init__(
        self,
        root: fsdp.FSDPModule,
        units: Sequence[fsdp.FSDPModule],
        gathers: Mapping[fsdp.Unit, WeightGather],
        kept: KeptWeights,
        gradients: Gradients,
    ) -> None:
        self._root, self._gathers, self._kept = root, gathers, kept
        self.units = [unit for unit in units if fsdp.keep_whole(unit)]
        if len(self.units) == len(units):
            fsdp.generate_alone(root)
        kept.trust(self.units, gradients.parameter_of)

    def gather(self) -> None:
        """Gather what is not gathered, and show it; all ranks call it, between two passes."""
        for unit in self.units:
            fsdp.gather_and_show(self._root, unit)

    def show(self) -> None:
        """Let modules hold the whole parameters of what is gathered."""
        for unit in self.units:
            fsdp.show_gathered(unit)

    def hide(self, *, takes: bool) -> None:
        """Let modules hold shards; with `takes`, these take what was written."""
        for unit in self.units:
            fsdp.adopt_whole(unit)
            fsdp.show_shards(unit)
        if takes:
            self.take()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take what was written, if a step changes the masters of what is gathered."""
        if self._kept.may_step(optimizer):
            self.take()

    @torch.no_grad()
    def take(self, only: nn.Parameter | None = None) -> None:
        """Let the shards, or `only` one of them, take what was written to gathered weights."""
        flags, units = [], []
        for unit in filter(fsdp.is_gathered, self.units):
            fsdp.adopt_whole(unit)
            if self._kept.was_written(unit):
                continue  # the shards are newer
            for rows, expected in self._expected(unit, only):
                flags.append(_differs(rows.gathered, expected).any())
                units.append(unit)
        if not flags:
            return
        written = [u for u, flag in zip(units, torch.stack(flags).tolist(), strict=True) if flag]
        for unit in dict.fromkeys(written):
            self._take_into(unit, only)

    def _take_into(self, unit: fsdp.FSDPModule, only: nn.Parameter | None) -> None:
        where: dict[torch.Tensor, torch.Tensor] = {}
        for rows, expected in self._expected(unit, only):
            shard = rows.local.to(rows.gathered.device)
            # With qwZ, these rows may be exact since they were written before.
            exact = _differs(rows.gathered, shard.to(expected.dtype))
            differs = _differs(rows.gathered, expected) & exact
            if differs.any():
                rows.local.copy_(torch.where(differs, rows.gathered.to(shard.dtype), shard))
                where[rows.shard] = differs
                rows.gathered.copy_(rows.local)  # the codes of what was not written change, too
        if where:
            notify_written([*where], where, gathered=True)

    def _expected(
        self, unit: fsdp.FSDPModule, only: nn.Parameter | None
    ) -> Iterator[tuple[fsdp.OwnRows, torch.Tensor]]:
        """Yield this rank's rows of each parameter, and what a gather makes of the shard."""
        gather = self._gathers.get(unit)
        every = [*fsdp.own_rows(unit)]
        sent: list[torch.Tensor] = []
        if gather is not None and gather.quantizes:
            flat = torch.cat([_as_sent(rows) for rows in every])
            sent = [*gather.rounded(flat).split([rows.padded.numel() for rows in every])]
        for index, rows in enumerate(every):
            if only is None or rows.shard is only:
                values = sent[index] if sent else _as_sent(rows)
                yield rows, values[: rows.local.numel()].view(rows.local.shape)


def _as_sent(rows: fsdp.OwnRows) -> torch.Tensor:
    return rows.padded.to(rows.gathered.device, rows.gathered.dtype)


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    integers = INTEGERS[one.element_size()]
    return one.view(integers) != other.view(integers)
