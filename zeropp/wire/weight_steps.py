"""Weights that cross nodes as steps of their codes, where every node already holds the codes.

hpZ keeps all weights in each node as INT8 codes. After an optimizer's step few codes belong
elsewhere, and not far away. So the owner of a shard sends by how much each code moves, at most by
the unit's reach, and all nodes, its own included, move the codes that they hold. A code that would
have to move further catches up in later steps: the difference is always taken to the true weights.

    shard (C,), own row (1, P) of the copy -> message (1, S) -> of all nodes (N, S) -> copy (N, P)

How far codes may move follows the share of those that would have moved further in the last message,
summed over the nodes: the same number on every rank of the outer hop.

All nodes' copies are equal, as all start from the same bytes and move them by the same messages. To
make sure of it, `is_same_on_all_nodes` compares sums over them.
"""

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.quant.code_step_ops import apply_code_steps, code_steps
from zeropp.quant.code_step_reference import read_counts
from zeropp.quant.code_steps import COUNTED, REACHES, RESCALED, step_layout
from zeropp.quant.packing import RAW, RowLayout, num_blocks
from zeropp.wire.communicator import Communicator
from zeropp.wire.cross_stream import HostCopy
from zeropp.wire.in_flight import Hops

CHECK_BYTES = 8  # that a rank sends of a unit to compare its copies
CAPPED_SHARE = 0.003  # of a unit's codes: with more, they may move further in the next step


class StepCounts(NamedTuple):
    """What messages held: codes, those that moved, those that would have moved further; blocks of
    codes, those that changed their scale."""

    codes: int = 0
    moved: int = 0
    capped: int = 0
    blocks: int = 0
    rescaled: int = 0


@dataclass
class _Message:
    """What is remembered of a unit's last message."""

    reach: int
    counts: HostCopy  # int64 (COUNTS,), summed over the nodes; read a whole step later
    codes: int
    blocks: int


class WeightSteps:
    """How far each unit's codes may move, and what their last messages held.

    `reach` is 1, 2 or 4 codes, or None to follow what is needed. After every `check_interval` of a
    unit's messages its copies are to be compared; 0 for never.
    """

    def __init__(self, reach: int | None = None, check_interval: int = 0) -> None:
        self.fixed, self.check_interval = reach, check_interval
        self._last: dict[nn.Module, _Message] = {}
        self._messages: Counter[nn.Module] = Counter()

    def reach_of(self, unit: nn.Module) -> int:
        """Return how far the unit's codes may move in its next message."""
        if self.fixed is not None:
            return self.fixed
        last = self._last.get(unit)
        if last is None:
            return REACHES[-1]
        counts, limit = last.counts.tolist(), CAPPED_SHARE * last.codes
        fitting = (reach for reach in REACHES if counts[COUNTED.index(reach)] <= limit)
        return next(fitting, REACHES[-1])

    def hops(
        self,
        unit: nn.Module,
        shard: Tensor,
        rows: Tensor,
        layout: RowLayout,
        outer: Communicator,
        purpose: str,
        *,
        async_op: bool,
    ) -> Hops:
        """Move the codes of `rows` (N, P), one row of each node, towards the shards' values."""
        reach = self.reach_of(unit)
        steps = step_layout(layout, reach)
        message = code_steps(shard.view(1, -1), rows[outer.place : outer.place + 1], steps)
        arrived = message.new_empty(outer.size, steps.num_bytes)
        yield outer.all_gather(arrived, message, purpose, unit=unit, async_op=async_op)
        apply_code_steps(arrived, rows, steps)
        self._note(unit, reach, arrived, layout)
        self._messages[unit] += 1

    def check_is_due(self, unit: nn.Module) -> bool:
        """Return whether the unit's copies are to be compared now, after a message."""
        return self.check_interval > 0 and self._messages[unit] % self.check_interval == 0

    def last_counts(self) -> StepCounts:
        """Return what the last messages of all units held together, those of all nodes."""
        columns = zip(*map(_counts, self._last.values()), strict=True)
        return StepCounts(*map(sum, columns)) if self._last else StepCounts()

    def codes_by_levels(self) -> Counter[int]:
        """Return how many codes the last messages of all units held, by their number of levels."""
        codes: Counter[int] = Counter()
        for message in self._last.values():
            codes[2 * message.reach + 1] += message.codes
        return codes

    def state(self, unit: nn.Module) -> list[int]:
        """Return what the unit's next reach depends on; it may be empty."""
        last = self._last.get(unit)
        return [] if last is None else [last.reach, last.codes, last.blocks, *last.counts.tolist()]

    def restore(self, unit: nn.Module, state: list[int]) -> None:
        """Go on from what `state` returned."""
        self._last.pop(unit, None)
        if state:
            reach, codes, blocks, *counts = state
            self._last[unit] = _Message(reach, HostCopy(torch.tensor(counts)), codes, blocks)

    def _note(self, unit: nn.Module, reach: int, arrived: Tensor, layout: RowLayout) -> None:
        counts = read_counts(arrived).sum(0)  # int64: all nodes' together may exceed int32
        quantized = [each for each in layout.segments if each.bits != RAW]
        self._last[unit] = _Message(
            reach=reach,
            counts=HostCopy(counts),
            codes=len(arrived) * sum(each.size for each in quantized),
            blocks=len(arrived) * sum(num_blocks(each.size, each.bits) for each in quantized),
        )


def is_same_on_all_nodes(
    rows: Tensor, outer: Communicator, purpose: str, unit: nn.Module, *, async_op: bool
) -> Generator[dist.Work | None, None, bool]:
    """Return whether all ranks of the hop hold the same `rows` (N, P); each sends CHECK_BYTES."""
    words = rows.view(torch.int64).flatten()
    places = torch.arange(1, 2 * len(words), 2, device=words.device)  # odd: no change is lost
    own = (words * places).sum().view(1)  # modulo 2^64
    sums = own.new_empty(outer.size)
    yield outer.all_gather(sums, own, purpose, unit=unit, async_op=async_op)
    return bool((sums == own).all())


def _counts(message: _Message) -> StepCounts:
    counts = message.counts.tolist()
    capped = counts[COUNTED.index(message.reach)]
    return StepCounts(message.codes, counts[0], capped, message.blocks, counts[RESCALED])
