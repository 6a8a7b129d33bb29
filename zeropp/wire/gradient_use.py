"""Which parameters had a gradient on some rank: what the ranks tell each other after a pass.

Ranks may use different parameters of a unit, as with layers that are dropped or that tokens choose.
Each then sends zeros for those it did not use, so that all reduce the same buffers, and the mean
counts the zeros. A parameter that no rank used must not be stepped: its `.grad` stays None, as in
one process. That takes one byte per parameter and pass, in one collective. The same collective
shows whether the ranks reduced the same units in the same order: if not, gradients were mixed up.

On a GPU the host goes on before the collective has run. So what it shows of the order is read a
pass later, or by whoever waits for the device anyway, at the same place on every rank.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.ranks.waits import explained_waits
from zeropp.wire.cross_stream import HostCopy, refuse_capture
from zeropp.wire.gradients import Gradients, ScalarGradients

DIGEST_BYTES = 4  # of a CRC-32
LAST_PASS = "the last pass (go back to a checkpoint if weights were stepped since)"


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """What the ranks' notes of a pass came to, byte by byte their maximum."""

    notes: HostCopy
    digests: bytes  # at the end of the notes if all ranks have reduced `order`
    order: tuple[fsdp.Unit, ...]

    def require_same_order(self, which: str) -> None:
        """Raise InputError, on all ranks, if they have reduced different units in `which` pass."""
        if not bytes(self.notes.tolist()).endswith(self.digests):
            raise InputError(
                f"the ranks averaged the gradients of different units in {which}, or in another "
                f"order; this rank: {', '.join(map(fsdp.name_of, self.order))}. All ranks must run "
                "the same units in the same order; they may use different parameters of a unit: "
                "give zeropp.shard units= that every rank runs"
            )


class GradientUse:
    """Notes each unit's reduction in a backward pass, and compares notes with the other ranks.

    These are, in turn, those of `groups`: the ranks that share units, and with HSDP their replicas.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        gradients: Gradients | None = None,
        scalars: ScalarGradients | None = None,
    ) -> None:
        self._groups, self._device, self._scalars = groups, device, scalars
        self._gradients = gradients or Gradients()
        self._begin: dict[fsdp.Unit, int] = {}  # of a unit's parameters among all
        self._used = bytearray()
        self._passes: set[int] = set()  # running backward passes at whose end ranks compare
        self._last: _Comparison | None = None  # of a pass that ended, not looked at yet
        self.discard()

    def add(self, unit: fsdp.Unit) -> None:
        """Include a unit, in the same order on every rank, between two passes."""
        self._begin[unit] = len(self._used)
        self._used += bytes(len(fsdp.own_specs(unit)))

    def discard(self) -> None:
        """Forget the notes of a pass that did not end."""
        self._used = bytearray(len(self._used))
        self._order: list[fsdp.Unit] = []
        self._unused: dict[int, nn.Parameter] = {}  # got zeros here, and had no gradient before
        self._passes.clear()

    def note(self, unit: fsdp.Unit, with_gradient: Sequence[int], reduced: Sequence[int]) -> None:
        """Note a reduction before it begins; see `zeropp.fsdp_adapter.before_reduction`."""
        refuse_capture(self._device, "which gradients no rank has used")
        if fsdp.backward_id() not in self._passes:
            self._passes.add(fsdp.backward_id())
            if self._scalars is not None:
                self._scalars.begin()
            fsdp.after_backward(self._compare_last, unit)
        self._order.append(unit)
        begin = self._begin[unit]
        for index in with_gradient:
            self._used[begin + index] = 1
            self._unused.pop(begin + index, None)
        if len(with_gradient) < len(reduced):
            shards = fsdp.shards(unit)
            for index in set(reduced).difference(with_gradient):
                place, shard = begin + index, shards[index]
                if not self._used[place] and self._gradients.of(shard) is None:
                    self._unused[place] = shard

    def _compare_last(self) -> None:
        """Compare after what else is to be done at the end of a pass: all reductions have ended."""
        if fsdp.backward_id() == -1:
            self._compare()  # a stage of a pipeline has reduced all of its gradients
        else:
            fsdp.after_backward(self._compare)

    def require_same_order(self) -> None:
        """Raise InputError if the ranks reduced different units in the last pass.

        All ranks call it at the same place. The host waits until that pass has ended on the device.
        """
        last, self._last = self._last, None
        if last is not None:
            last.require_same_order(LAST_PASS)

    def _compare(self) -> None:
        """Clear zeros that all ranks sent; raise InputError if they reduced different units.

        On a GPU it is raised for the pass before, whose notes have arrived long ago.
        """
        if not self._order:
            return
        unused = self._unused
        comparison = self._exchange_notes()
        is_at_hand = self._device.type == "cpu"
        if is_at_hand:
            comparison.require_same_order("this pass")
        if unused:  # only for these the host waits for the device
            values = comparison.notes.tolist()
            for place, shard in unused.items():
                if not values[place]:
                    self._gradients.clear(shard)
        if not is_at_hand:
            last, self._last = self._last, comparison
            if last is not None:
                last.require_same_order(LAST_PASS)

    def _exchange_notes(self) -> _Comparison:
        """Begin a collective about the pass that ends, and forget its notes."""
        used, order, unused = self._used, self._order, self._unused
        self.discard()
        for place, shard in unused.items():  # a penalty on the shards may have given it a gradient
            gradient = self._gradients.of(shard)
            if gradient is not None:
                own_part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                used[place] = bool(own_part.any())
        places = [self._begin[unit] for unit in order]
        digest = zlib.crc32(repr(places).encode()).to_bytes(DIGEST_BYTES, "little")
        digests = digest + bytes(255 - byte for byte in digest)
        notes = torch.frombuffer(used + digests, dtype=torch.uint8)
        if self._device.type != "cpu":  # from pageable memory, the host would wait for the device
            notes = notes.pin_memory().to(self._device, non_blocking=True)
        for group in self._groups:
            with explained_waits(group, lambda: "the comparison at the end of a backward pass"):
                dist.all_reduce(notes, op=dist.ReduceOp.MAX, group=group)
        return _Comparison(notes=HostCopy(notes), digests=digests, order=tuple(order))
