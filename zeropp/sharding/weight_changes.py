"""Gathered weights are reused until the shards change, and then dropped.

Three things outlive one use: hpZ's secondary copies, the full weights of units that a pass without
backward left gathered, and the prefetched gather of a unit that was then not used. Tensor versions
cannot tell when these are stale, because fused optimizers and writes through `.data` do not raise
them. So notice is given by calls that every rank makes: each optimizer's step, and loading a state.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeropp import fsdp_adapter as fsdp
from zeropp.wire.secondary_copies import SecondaryCopies

Units = Sequence[fsdp.FSDPModule]


class Notice(torch.optim.Optimizer):
    """An optimizer that changes nothing: its step only runs the hooks around any step."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(list(parameters), {})

    def step(self, closure: None = None) -> None:
        """Call the hooks around a step."""


class _NoticeOfShards(Notice):
    def those_with_some(self, units: Iterable[fsdp.FSDPModule]) -> Units:
        """Return the units that have a shard among the parameters."""
        ids = {id(each) for group in self.param_groups for each in group["params"]}
        return [unit for unit in units if any(id(each) in ids for each in fsdp.shards(unit))]


class WeightsWritten(_NoticeOfShards):
    """Tells that `parameters` were written by other means than an optimizer."""


class WeightsReplaced(_NoticeOfShards):
    """Tells that `parameters` will be, or no longer are, whole in the place of their shards."""


def notify_weights_written(parameters: Iterable[torch.Tensor]) -> None:
    """Tell everyone who holds copies that these shards were written without an optimizer."""
    WeightsWritten(parameters).step()


def notify_weights_replaced(parameters: Iterable[torch.Tensor]) -> None:
    """Tell everyone who holds gathered weights that these are, or were, whole meanwhile."""
    WeightsReplaced(parameters).step()


def drop_when_weights_change(
    model: nn.Module, units: Units, copies: SecondaryCopies | None
) -> Callable[[], None]:
    """Drop gathered weights after any optimizer's step and when a state dict is loaded.

    After a step, copies of units that have been frozen since they were first used are kept.
    Returns what ends this.
    """
    unit_references = tuple(weakref.ref(unit) for unit in units)
    copies_reference = weakref.ref(copies) if copies else lambda: None

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        alive = [unit for reference in unit_references if (unit := reference()) is not None]
        if isinstance(optimizer, WeightsReplaced):
            drop_gathered(optimizer.those_with_some(alive), None)
        elif isinstance(optimizer, WeightsWritten):
            if optimizer.those_with_some(alive):
                drop_gathered(alive, copies_reference())
        elif not isinstance(optimizer, Notice):
            drop_gathered(alive, copies_reference(), stepped_only=True)

    handle = register_optimizer_step_post_hook(after_step)
    weakref.finalize(model, handle.remove)
    undo = ExitStack()
    undo.callback(handle.remove)

    def after_load(module: nn.Module, _: object) -> None:
        if not any(isinstance(each, fsdp.WholeParameter) for each in module.parameters()):
            drop_gathered(units, copies)  # else the shards have not changed yet

    for module in model.modules():
        hook = module.register_load_state_dict_post_hook(after_load)
        undo.callback(hook.remove)
    for unit in units if copies else ():
        undo.callback(fsdp.before_use(unit, partial(copies.note_use, unit)))
    return undo.close


def drop_gathered(
    units: Units, copies: SecondaryCopies | None, *, stepped_only: bool = False
) -> None:
    """Drop the gathered weights of `units` and the secondary copies.

    With `stepped_only`, copies of units that have never been trainable are kept. During a
    backward pass, as when each gradient steps its optimizer at once, full weights stay: they may be
    in use, and FSDP2 frees them at its end.
    """
    if copies:
        copies.drop(stepped_only=stepped_only)
    if fsdp.backward_id() == -1:
        for unit in units:
            fsdp.free_gathered(unit)
