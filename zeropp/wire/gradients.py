"""Where a sharded model's averaged gradients are, those of 0-d parameters, and which ranks had one.

Ranks may use different parameters of a unit, as with layers that are dropped or that tokens choose.
Each then sends zeros for those it did not use, so that all reduce the same buffers, and the mean
counts the zeros. A parameter that no rank used must not be stepped: its `.grad` stays None, as in
one process. That takes one byte per parameter and pass, in one collective. The same collective
shows whether the ranks reduced the same units in the same order: if not, gradients were mixed up.

On a GPU the host goes on before the collective has run. So what it shows of the order is read a
pass later, or by whoever waits for the device anyway, at the same place on every rank.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.ranks.groups import explained_waits
from zeropp.wire.cross_stream import HostCopy, refuse_capture
from zeropp.wire.shard_holders import add_holder

DIGEST_BYTES = 4  # of a CRC-32
LAST_PASS = "the last pass (go back to a checkpoint if weights were stepped since)"


class Gradients:
    """The averaged gradients of a model: its parameters hold them, or their masters do."""

    def __init__(self) -> None:
        self._masters: Mapping[nn.Parameter, nn.Parameter] = {}
        self._parameters: Mapping[nn.Parameter, nn.Parameter] = {}  # of masters

    def use_masters(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Look for the gradients of these parameters in their masters."""
        self._masters = masters
        self._parameters = {master: parameter for parameter, master in masters.items()}

    @property
    def has_masters(self) -> bool:
        return bool(self._masters)

    def parameter_of(self, holder: nn.Parameter) -> nn.Parameter:
        """Return the parameter whose master this is, or the parameter itself."""
        return self._parameters.get(holder, holder)

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the gradient of a parameter."""
        return self._masters.get(parameter, parameter).grad

    def clear(self, parameter: nn.Parameter) -> None:
        """Drop the gradient of a parameter."""
        self._masters.get(parameter, parameter).grad = None


class ScalarGradients:
    """The gradients of a model's 0-d parameters; `group` are its data ranks.

    FSDP2 cannot shard these: they stay whole on every rank, in fp32. Each rank adds up its own
    gradients until a step's last backward pass. At the end of that they are averaged, all in one
    all-reduce: their sums, and how many ranks had one. A parameter that no rank used keeps `.grad`
    None.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._places: list[tuple[nn.Module, str]] = []  # parameters may be replaced
        self._passes: set[int] = set()  # running backward passes at whose end means are taken
        self.is_due = True  # at the end of the next backward pass
        self._trained: set[nn.Parameter] = set()  # in this step; some may be frozen since
        self._note = partial(_note_gradient, ref(self))
        self._take: WeakMethod[Callable[[nn.Parameter, torch.Tensor], None]] | None = None
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.ndim:
                    self._places.append((module, name))
        if self._places:
            model.register_forward_hook(self._after_forward)
            add_holder(self)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, tied ones once."""
        return list(dict.fromkeys(getattr(module, name) for module, name in self._places))

    def give_to(self, take: WeakMethod[Callable[[nn.Parameter, torch.Tensor], None]]) -> None:
        """Pass each mean to `take`, and leave no `.grad`."""
        self._take = take

    def move_to_device(self) -> None:
        """Move the parameters to where the model computes."""
        for parameter in self.parameters():
            if not parameter.is_meta and parameter.device != self._device:
                parameter.data = parameter.data.to(self._device)

    @torch.no_grad()
    def send(self, source: int, parameters: list[nn.Parameter]) -> None:
        """Give those of these parameters that are the model's the values of the rank `source`."""
        ids = {id(parameter) for parameter in parameters}
        for parameter in self.parameters():
            if id(parameter) in ids:
                dist.broadcast(parameter.data, src=source, group=self._group)

    def _after_forward(self, module: nn.Module, _: object, output: object) -> None:
        """Note the backward pass of this forward pass when it begins, as all ranks' passes do."""
        if torch.is_grad_enabled():
            self._trained.update(each for each in self.parameters() if each.requires_grad)
            for parameter in self._trained:
                fsdp.hook_gradient(parameter, self._note)
            for each in pytree.tree_leaves(output):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(self.begin)

    def begin(self, *_: torch.Tensor) -> None:
        """Take the means at the end of the running backward pass, after its reductions.

        Passes through the graph of another one's gradients may run past all outputs. Units that
        are reduced begin those on all ranks, and what a rank adds to its gradients elsewhere.
        """
        if self._places and self.is_due and fsdp.backward_id() not in self._passes:
            self._passes.add(fsdp.backward_id())
            fsdp.after_backward(partial(fsdp.after_backward, self._average))

    @torch.no_grad()
    def _average(self) -> None:
        self._passes.clear()
        trained = [parameter for parameter in self.parameters() if parameter in self._trained]
        self._trained = {parameter for parameter in trained if parameter.requires_grad}
        if not trained:
            return
        sums = torch.zeros(2, len(trained), device=self._device)
        for index, parameter in enumerate(trained):
            if parameter.grad is not None:
                sums[0, index], sums[1, index] = parameter.grad, 1
        if self._group.size() > 1:
            dist.all_reduce(sums, group=self._group)
        means = sums[0] / self._group.size()
        is_used = [True] * len(trained)
        if any(parameter.grad is None for parameter in trained):  # the host waits for the others
            is_used = sums[1].bool().tolist()
        for parameter, mean, used in zip(trained, means, is_used, strict=True):
            if used and self._take is not None:
                parameter.grad = None
                self._take()(parameter, mean)
            elif used:
                parameter.grad = mean.to(parameter.dtype)


def _note_gradient(scalars: ref[ScalarGradients], _: torch.Tensor) -> None:
    if (alive := scalars()) is not None and fsdp.adds_gradient():
        alive.begin()


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
        self.at_end: list[Callable[[], None]] = []  # called when a pass has ended on all ranks
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
        for each in self.at_end:
            each()

    def _exchange_notes(self) -> _Comparison:
        """Begin a collective about the pass that ends, and forget its notes."""
        used, order, unused = self._used, self._order, self._unused
        self.discard()
        for place, shard in unused.items():  # a penalty on the shards may have given it a gradient
            gradient = self._gradients.of(shard)
            if gradient is not None:
                used[place] = bool(fsdp.local_part(gradient).any())
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
