"""Gathered weights are reused until the shards change, and then dropped.

Three things outlive a pass: hpZ's secondary copies, the full weights of units that it left
gathered, and the prefetched gather of a unit that was then not used. Notice of a change is given by
calls that every rank makes: an optimizer's step, loading a state, `weights_changed()`. Writes
without notice are seen by the versions of the shards, which PyTorch raises. Where a pass is about
to reuse something of an earlier one, the ranks first tell each other which units were written, as
they must gather the same ones: a byte per unit, in one collective. The same tells of steps of
optimizers that hold no shards, which ranks may make alone, as for a probe of their own: they change
no weights, unless they update copies of them.

No version tells of writes through `.data`, by fused optimizers outside torch.optim, and by
functions for lists of tensors (`torch._foreach_*`) that are given DTensors.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zeropp import fsdp_adapter as fsdp
from zeropp.ranks.groups import shared_group
from zeropp.ranks.waits import explained_waits
from zeropp.wire.cross_stream import refuse_capture
from zeropp.wire.scalar_gradients import ScalarGradients
from zeropp.wire.secondary_copies import OwnRow, SecondaryCopies

Units = Sequence[fsdp.Unit]

# What a rank tells of a unit; the largest note of any rank counts.
UNCHANGED, STEPPED, WRITTEN = range(3)


class Notice(torch.optim.Optimizer):
    """An optimizer that changes nothing: its step only runs the hooks around any step."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(list(parameters), {})

    def step(self, closure: None = None) -> None:
        """Call the hooks around a step."""


class _NoticeOfShards(Notice):
    def those_with_some(self, units: Iterable[fsdp.Unit]) -> Units:
        """Return the units that have a shard among the parameters."""
        ids = {id(each) for group in self.param_groups for each in group["params"]}
        return [unit for unit in units if any(id(each) in ids for each in fsdp.shards(unit))]


class WeightsWritten(_NoticeOfShards):
    """Tells that `parameters` were written by other means than an optimizer; see below."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        gathered: bool,
        where: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        super().__init__(parameters)
        self.gathered, self.where = gathered, where


class WeightsReplaced(_NoticeOfShards):
    """Tells that `parameters` will be, or no longer are, whole in the place of their shards."""


def notify_weights_written(
    parameters: Iterable[torch.Tensor],
    *,
    gathered: bool = False,
    where: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Tell everyone who holds copies that these shards were written without an optimizer.

    `gathered` says that what was gathered of them was written, too, and `where` (bool) which
    elements of a shard were, if not all.
    """
    WeightsWritten(parameters, gathered, where).step()


def notify_weights_replaced(parameters: Iterable[torch.Tensor]) -> None:
    """Tell everyone who holds gathered weights that these are, or were, whole meanwhile."""
    WeightsReplaced(parameters).step()


class ScalarsWritten(Notice):
    """Tells that the rank `source` may have written 0-d parameters, which all ranks then get."""

    def __init__(self, parameters: Iterable[torch.Tensor], source: int) -> None:
        super().__init__(parameters)
        self.source = source


class KeptWeights:
    """What is kept of a model's units after a pass; dropped when their shards change.

    `copies` are the units' secondary copies, `group` the ranks that share the units: None where
    each rank gathers alone, as at stage 0. All ranks make it, and use it, in the same places.
    """

    def __init__(
        self,
        model: nn.Module,
        copies: SecondaryCopies | None,
        group: dist.ProcessGroup | None,
        scalars: ScalarGradients | None = None,
    ) -> None:
        self.copies, self._scalars, self._data_group = copies, scalars, group
        self._ranks = dist.get_process_group_ranks(group) if group is not None else []
        self._units: list[fsdp.Unit] = []
        self._hooked: set[nn.Module] = set()
        self._versions: dict[fsdp.Unit, fsdp.Versions] = {}  # of what is kept
        self._written: set[fsdp.Unit] = set()  # and stepped since, so that no version tells
        self._stepped: set[fsdp.Unit] = set()  # maybe, by optimizers that hold no shards
        self._trusted: set[fsdp.Unit] = set()
        self._parameter_of: Callable[[nn.Parameter], nn.Parameter] = lambda master: master
        self._undo = ExitStack()
        for register, method in (
            (register_optimizer_step_pre_hook, self._before_step),
            (register_optimizer_step_post_hook, self._after_step),
        ):
            handle = fsdp.around_steps(
                register, model, partial(_call_if_alive, weakref.WeakMethod(method))
            )
            self._undo.callback(handle.remove)
        self._undo.callback(fsdp.before_pass(model, self._before_pass))

    def add(self, model: nn.Module, units: Units) -> None:
        """Include `units` of the model, between two passes."""
        self._units += units

        def after_load(module: nn.Module, _: object) -> None:  # a method would be copied with it
            held = [*module.parameters()]
            is_whole = any(isinstance(each, fsdp.WholeParameter) for each in held)
            if not is_whole and (not self._trusted or any(isinstance(e, DTensor) for e in held)):
                self.drop()  # else the shards have not changed yet

        for module in model.modules():
            if module in self._hooked:
                continue
            self._hooked.add(module)
            for hook in (
                module.register_load_state_dict_post_hook(after_load),
                module.register_state_dict_post_hook(_share_versions),
            ):
                self._undo.callback(hook.remove)
        for unit in units:
            self._undo.callback(fsdp.before_use(unit, partial(self._before_use, unit)))

    def trust(self, units: Units, parameter_of: Callable[[nn.Parameter], nn.Parameter]) -> None:
        """Reuse what is gathered of these units without comparing anything between ranks.

        Only steps of their own optimizers drop it, which hold shards or masters of them.
        """
        self._trusted.update(units)
        self._parameter_of = parameter_of

    def may_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer holds shards or masters of trusted units that are gathered."""
        gathered = [unit for unit in self._trusted if fsdp.is_gathered(unit)]
        ids = {id(shard) for unit in gathered for shard in fsdp.shards(unit)}
        groups = optimizer.param_groups if ids else ()
        return any(id(self._parameter_of(each)) in ids for g in groups for each in g["params"])

    def was_written(self, unit: fsdp.Unit) -> bool:
        """Whether the unit's shards were written since it was gathered, as far as versions tell."""
        return unit in self._written or self._versions.get(unit) != fsdp.versions(unit)

    def note(self, unit: fsdp.Unit) -> None:
        """Note that what will be kept of a unit is that of its shards now."""
        self._versions[unit] = fsdp.versions(unit)
        self._written.discard(unit)
        self._stepped.discard(unit)

    def close(self) -> None:
        """Take no more notice of changes."""
        self._undo.close()

    def drop(self, *, stepped_only: bool = False, trusted: bool = True) -> None:
        """Drop the gathered weights of all units and the secondary copies.

        With `stepped_only`, copies of units that have never been trainable are kept; without
        `trusted`, the gathered weights of those units are. During a
        backward pass, as when each gradient steps its optimizer at once, full weights stay: they
        may be in use, and FSDP2 frees them at its end.
        """
        if self.copies:
            self.copies.drop(stepped_only=stepped_only)
        _free([each for each in self._units if trusted or each not in self._trusted])

    def drop_written(self) -> None:
        """Drop what is kept of units that were written without notice; all ranks call it."""
        self._drop_written(self._units)

    def restore(self, unit: fsdp.Unit, own: OwnRow) -> None:
        """Let the unit's next gather begin with this rank's row, as a checkpoint holds it."""
        self.copies.restore(unit, own)
        self.note(unit)

    def _before_step(self, *_: object) -> None:
        """Remember the units that were written before this step, which raises versions, too.

        Frozen weights may have been given gradients, and are stepped then.
        """
        self._written.update(filter(self.was_written, filter(self._is_kept, self._units)))
        if self.copies:
            for unit in filter(self.copies.is_current, self._units):
                if any(shard.grad is not None for shard in fsdp.shards(unit)):
                    self.copies.note_trained(unit)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if isinstance(optimizer, WeightsReplaced):
            _free(optimizer.those_with_some(self._units))
        elif isinstance(optimizer, WeightsWritten):
            units = optimizer.those_with_some(self._units)
            if units and self._trusted.issuperset(units):
                for unit in units:
                    self.note(unit) if optimizer.gathered else fsdp.free_gathered(unit)
            elif units:
                self.drop()
        elif isinstance(optimizer, ScalarsWritten):
            if self._scalars is not None:
                self._scalars.send(optimizer.source, optimizer.param_groups[0]["params"])
        elif not isinstance(optimizer, Notice):
            if not _holds_shards(optimizer):
                self._stepped.update(self._units)
                return
            self.drop(stepped_only=True, trusted=self.may_step(optimizer))
            self._stepped.clear()
            for unit in filter(self._is_kept, self._units):
                is_frozen = self.copies is not None and self.copies.is_current(unit)
                if is_frozen and self.was_written(unit):  # by the step itself
                    self._written.add(unit)
                self._versions[unit] = fsdp.versions(unit)  # but `_written` stays

    def _before_pass(self, inside: Container[nn.Module]) -> None:
        self._drop_written([unit for unit in self._units if fsdp.module_of(unit) in inside])

    def _before_use(self, unit: fsdp.Unit) -> None:
        """Note what the unit is gathered from, unless something that is kept will be used."""
        if not fsdp.is_in_pass(unit) and fsdp.backward_id() == -1:  # somebody called `unshard()`
            self._drop_written([unit])
        if self.copies:
            self.copies.note_use(unit)
        has_copy = self.copies is not None and self.copies.is_current(unit)
        if not (has_copy or fsdp.is_gathered(unit) or fsdp.has_whole_parameters(unit)):
            self.note(unit)

    def _drop_written(self, units: Units) -> None:
        """Drop what is kept of units that were written or stepped on any rank, on all ranks.

        Units with whole parameters are left out: one rank may use them alone.
        """
        units = [unit for unit in units if unit not in self._trusted]
        units = [unit for unit in units if not fsdp.has_whole_parameters(unit)]
        kept = [*filter(self._is_kept, units)]
        if not kept:
            return
        notes = [self._note_of(unit) if unit in kept else UNCHANGED for unit in units]
        for unit, note in zip(units, self._of_any_rank(notes), strict=True):
            if note == UNCHANGED:
                continue
            if self.copies and note == STEPPED:
                self.copies.note_step([unit])
            elif self.copies:
                self.copies.drop_of(unit)
            fsdp.free_gathered(unit)
        self._stepped.difference_update(units)

    def _note_of(self, unit: fsdp.Unit) -> int:
        if self.was_written(unit):
            return WRITTEN
        return STEPPED if unit in self._stepped else UNCHANGED

    def _is_kept(self, unit: fsdp.Unit) -> bool:
        has_copy = self.copies is not None and self.copies.has(unit)
        return has_copy or fsdp.is_gathered(unit)

    def _of_any_rank(self, own: Sequence[int]) -> Sequence[int]:
        """Return for each note of this rank the largest of any rank.

        On GPUs the collective has a stream and a communicator of its own, so that the host does not
        wait for what is being computed.
        """
        if len(self._ranks) < 2:
            return own
        notes = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        device = fsdp.device_of(self._units[0])
        refuse_capture(device, "whether weights were written since they were gathered")
        if device.type == "cpu":
            with explained_waits(self._data_group, lambda: "a comparison of the weights' versions"):
                dist.all_reduce(notes, op=dist.ReduceOp.MAX, group=self._group)
            return notes.tolist()
        with torch.cuda.stream(self._stream):
            notes = notes.pin_memory().to(device, non_blocking=True)
            dist.all_reduce(notes, op=dist.ReduceOp.MAX, group=self._group)
            return notes.tolist()

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        return shared_group("changes", self._ranks, self._ranks)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(fsdp.device_of(self._units[0]))


def _free(units: Units) -> None:
    if fsdp.backward_id() == -1:
        for unit in units:
            fsdp.free_gathered(unit)


def _holds_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all ranks step it together, as it holds parts of some model's weights."""
    return any(
        isinstance(parameter, DTensor)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _call_if_alive(method: weakref.WeakMethod, *arguments: object) -> None:
    if (alive := method()) is not None:
        alive(*arguments)


def _share_versions(module: nn.Module, state: dict[str, object], prefix: str, _: object) -> None:
    """Let writes into the tensors of a state dict raise the versions of the shards."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        fsdp.share_version(state.get(prefix + name), parameter)
