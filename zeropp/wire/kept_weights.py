"""Gathered weights are reused until the shards change, and then dropped.

Three things outlive a pass: hpZ's secondary copies (ZeRO++, Wang et al. 2023, section 3.2), the
full weights of units that it left gathered, and the prefetched gather of a unit that was then not
used. Notice of a change is given by calls that every rank makes: an optimizer's step, loading a
state, `weights_changed()`. Writes without notice are seen by the versions of the shards, which
PyTorch raises. Where a pass is about to reuse something of an earlier one, the ranks first tell
each other which units were written, as they must gather the same ones: a byte per unit, in one
collective. The same tells of steps of optimizers that hold no shards, which ranks may make alone,
as for a probe of their own: they change no weights, unless they update copies of them.

No version tells of writes through `.data`, by fused optimizers outside torch.optim, and by
functions for lists of tensors (`torch._foreach_*`) that are given DTensors.
"""

from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.exports import CAPABILITIES, declared
from zeropp.ranks.groups import explained_waits, shared_group
from zeropp.settings.sections import Zeropp
from zeropp.wire.coded_collectives import OuterGather
from zeropp.wire.cross_stream import CrossStreamTensor, refuse_capture
from zeropp.wire.route import Route
from zeropp.wire.shard_holders import ShardHolder, add_holder, remove_holder

Units = Sequence[fsdp.Unit]


class Change(IntEnum):
    """What a rank tells of a unit's shards; the largest of any rank counts."""

    NONE = 0
    STEPPED = 1  # maybe, by an optimizer that holds no shards
    WRITTEN = 2


@dataclass
class _State:
    """A unit's shards, compared with those that what is kept of it was made of.

    versions: of the shards then. change: what these do not tell, as steps have raised them since.
    """

    versions: fsdp.Versions | None = None
    change: Change = Change.NONE
    is_trusted: bool = False

    def forget_steps(self) -> None:
        if self.change is Change.STEPPED:
            self.change = Change.NONE


class KeptWeights(ShardHolder):
    """What is kept of a model's units after a pass; dropped when their shards change.

    Secondary copies are the rows of units after the outer hop, where a `WeightGather` keeps them.
    `group` are the ranks that share the units: None where each rank gathers alone, as at stage 0.
    All ranks make it, and use it, in the same places: the choice between a copy and a new gather
    follows from calls that every rank makes, never from a tensor's state. Ranks that chose
    differently would wait for each other forever.
    """

    updates: ClassVar[bool] = False  # copies of weights that were stepped, instead of dropping them

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, settings: Zeropp) -> None:
        self._copies_in_evaluation = settings.secondary_in_evaluation
        self._version = 0  # of all weights
        self._rows: dict[fsdp.Unit, CrossStreamTensor] = {}
        self._trained: set[fsdp.Unit] = set()  # any later step may change them
        self._data_group = group
        self._ranks = dist.get_process_group_ranks(group) if group is not None else []
        self._states: dict[fsdp.Unit, _State] = {}
        self._hooked: set[nn.Module] = set()
        self._parameter_of: Callable[[nn.Parameter], nn.Parameter] = lambda master: master
        self.at_begin: list[Callable[[], None]] = []  # called when a forward pass begins
        self._undo = ExitStack()
        self._undo.callback(fsdp.before_pass(model, self._before_pass))
        add_holder(self)

    def add(self, model: nn.Module, units: Units) -> None:
        """Include `units` of the model, between two passes."""
        self._states |= {unit: _State() for unit in units}

        def after_load(module: nn.Module, _: object) -> None:  # a method would be copied with it
            held = [*module.parameters()]
            is_whole = any(isinstance(each, fsdp.WholeParameter) for each in held)
            trusts = any(state.is_trusted for state in self._states.values())
            if not is_whole and (not trusts or any(isinstance(e, DTensor) for e in held)):
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
        for unit in units:
            self._states[unit].is_trusted = True
        self._parameter_of = parameter_of

    def may_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer holds shards or masters of trusted units that are gathered."""
        trusted = (unit for unit, state in self._states.items() if state.is_trusted)
        gathered = [*filter(fsdp.is_gathered, trusted)]
        ids = {id(shard) for unit in gathered for shard in fsdp.shards(unit)}
        groups = optimizer.param_groups if ids else ()
        return any(id(self._parameter_of(each)) in ids for g in groups for each in g["params"])

    def was_written(self, unit: fsdp.Unit) -> bool:
        """Whether the unit's shards were written since it was gathered, as far as versions tell."""
        state = self._states[unit]
        return state.change is Change.WRITTEN or state.versions != fsdp.versions(unit)

    def note(self, unit: fsdp.Unit) -> None:
        """Note that what will be kept of a unit is that of its shards now."""
        state = self._states[unit]
        state.versions, state.change = fsdp.versions(unit), Change.NONE

    def close(self) -> None:
        """Take no more notice of changes."""
        remove_holder(self)
        self._undo.close()

    def drop(self, *, stepped_only: bool = False, trusted: bool = True) -> None:
        """Drop the gathered weights of all units and the secondary copies.

        With `stepped_only`, copies of units that have never been trainable are kept; without
        `trusted`, the gathered weights of those units are. During a
        backward pass, as when each gradient steps its optimizer at once, full weights stay: they
        may be in use, and FSDP2 frees them at its end.
        """
        self.note_step() if stepped_only else self.drop_copies()
        _free(unit for unit, state in self._states.items() if trusted or not state.is_trusted)

    def drop_written(self) -> None:
        """Drop what is kept of units that were written without notice; all ranks call it."""
        self._drop_written([*self._states])

    def free(self, shards: Iterable[torch.Tensor]) -> None:
        """Free gathered weights, as these shards will be, or no longer are, whole in place."""
        _free(self._units_with(shards))

    def note_written(
        self, parameters: Iterable[torch.Tensor], where: Mapping, *, gathered: bool
    ) -> None:
        """Keep what was gathered of trusted units, if it was written too; drop all else."""
        units = self._units_with(parameters)
        if not all(self._states[unit].is_trusted for unit in units):
            self.drop()
            return
        for unit in units:
            self.note(unit) if gathered else fsdp.free_gathered(unit)

    def before_step(self, _: torch.optim.Optimizer) -> None:
        """Remember the units that were written before this step, which raises versions, too.

        Frozen weights may have been given gradients, and are stepped then.
        """
        for unit, state in self._states.items():
            if self._is_kept(unit) and self.was_written(unit):
                state.change = Change.WRITTEN
            is_current = self.has_current_copy(unit)
            if is_current and any(shard.grad is not None for shard in fsdp.shards(unit)):
                self._trained.add(unit)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop what a step of shards, or of masters of them, may have changed."""
        if not holds_shards(optimizer):
            for state in self._states.values():
                state.change = max(state.change, Change.STEPPED)
            return
        self.drop(stepped_only=True, trusted=self.may_step(optimizer))
        for unit, state in self._states.items():
            state.forget_steps()
            if self._is_kept(unit):
                is_frozen = self.has_current_copy(unit)
                if is_frozen and self.was_written(unit):  # by the step itself
                    state.change = Change.WRITTEN
                state.versions = fsdp.versions(unit)  # but what was written before stays noted

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that this rank holds."""
        return sum(rows.tensor.nbytes for rows in self._rows.values())

    def has_copy(self, unit: fsdp.Unit) -> bool:
        """Whether rows of the unit are kept."""
        return unit in self._rows

    def has_current_copy(self, unit: fsdp.Unit) -> bool:
        """Whether the next gather will begin with rows that are kept."""
        return unit in self._rows

    def copy_of(self, unit: fsdp.Unit) -> Tensor | None:
        """Return the unit's rows for use on the current stream, or None if there is no copy."""
        return self._rows[unit].on_current_stream() if self.has_current_copy(unit) else None

    def note_read(self, unit: fsdp.Unit) -> None:
        """Take note that a gather of the unit, all of which is queued, reads rows that are kept."""
        if rows := self._rows.get(unit):
            rows.note_read()

    def gather(self, hop: OuterGather) -> Generator[dist.Work | None, None, Tensor]:
        """Return the rows (N, P) of the hop, and keep them."""
        version = self._version
        rows = yield from self._gathered(hop)
        self.keep_copy(hop.unit, rows, version)
        return rows

    def keep_copy(self, unit: fsdp.Unit, rows: Tensor, version: int) -> None:
        """Keep `rows`, gathered at `version`, unless the weights have changed since."""
        if version == self._version and (unit.training or self._copies_in_evaluation):
            self._rows[unit] = CrossStreamTensor(rows)

    def drop_copies(self) -> None:
        """Drop the copies of all units."""
        self._version += 1
        self._rows.clear()

    def drop_copy_of(self, unit: fsdp.Unit) -> None:
        """Drop the copy of one unit."""
        self._version += 1
        self._rows.pop(unit, None)

    def note_step(self, units: Iterable[fsdp.Unit] | None = None) -> None:
        """Note that an optimizer may have stepped these units, or any: drop their copies."""
        self._version += 1
        for unit in [*self._rows] if units is None else units:
            if unit in self._trained:
                self._rows.pop(unit, None)

    def _gathered(self, hop: OuterGather) -> Generator[dist.Work | None, None, Tensor]:
        return hop.rows()

    def _before_pass(self, inside: Container[nn.Module]) -> None:
        for each in self.at_begin:
            each()
        self._drop_written([unit for unit in self._states if fsdp.module_of(unit) in inside])

    def _before_use(self, unit: fsdp.Unit) -> None:
        """Note what the unit is gathered from, unless something that is kept will be used."""
        if not fsdp.is_in_pass(unit) and fsdp.backward_id() == -1:  # somebody called `unshard()`
            self._drop_written([unit])
        if fsdp.is_trainable(unit):  # once it is frozen, too: an update may be delayed
            self._trained.add(unit)
        is_there = self.has_current_copy(unit) or fsdp.is_gathered(unit)
        if not is_there and not fsdp.has_whole_parameters(unit):
            self.note(unit)

    def _drop_written(self, units: Units) -> None:
        """Drop what is kept of units that were written or stepped on any rank, on all ranks.

        Units with whole parameters are left out: one rank may use them alone.
        """
        units = [unit for unit in units if not self._states[unit].is_trusted]
        units = [unit for unit in units if not fsdp.has_whole_parameters(unit)]
        kept = [*filter(self._is_kept, units)]
        if not kept:
            return
        own = [self._change_of(unit) if unit in kept else Change.NONE for unit in units]
        for unit, change in zip(units, self._of_any_rank(own), strict=True):
            self._states[unit].forget_steps()
            if change == Change.NONE:
                continue
            if change == Change.STEPPED:
                self.note_step([unit])
            else:
                self.drop_copy_of(unit)
            fsdp.free_gathered(unit)

    def _change_of(self, unit: fsdp.Unit) -> Change:
        return Change.WRITTEN if self.was_written(unit) else self._states[unit].change

    def _units_with(self, shards: Iterable[torch.Tensor]) -> Units:
        """Return the units that have one of these shards."""
        ids = {*map(id, shards)}
        return [u for u in self._states if any(id(each) in ids for each in fsdp.shards(u))]

    def _is_kept(self, unit: fsdp.Unit) -> bool:
        return self.has_copy(unit) or fsdp.is_gathered(unit)

    def _of_any_rank(self, own: Sequence[int]) -> Sequence[int]:
        """Return for each change that this rank knows of the largest of any rank.

        On GPUs the collective has a stream and a communicator of its own, so that the host does not
        wait for what is being computed.
        """
        if len(self._ranks) < 2:
            return own
        notes = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        device = fsdp.device_of(next(iter(self._states)))
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
        return torch.cuda.Stream(fsdp.device_of(next(iter(self._states))))


def kept_weights(
    model: nn.Module, group: dist.ProcessGroup | None, route: Route, settings: Zeropp
) -> KeptWeights:
    """Return what is kept of a model whose weights take this route."""
    kind = KeptWeights
    if route.updates:
        (kind,) = declared("COPIES", CAPABILITIES, part="copies")
    return kind(model, group, settings)


def _free(units: Iterable[fsdp.Unit]) -> None:
    if fsdp.backward_id() == -1:
        for unit in units:
            fsdp.free_gathered(unit)


def holds_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all ranks step it together, as it holds parts of some model's weights."""
    return any(
        isinstance(parameter, DTensor)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _share_versions(module: nn.Module, state: dict[str, object], prefix: str, _: object) -> None:
    """Let writes into the tensors of a state dict raise the versions of the shards."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        fsdp.share_version(state.get(prefix + name), parameter)
