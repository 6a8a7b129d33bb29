"""Between passes modules hold their shards, also where weights stay gathered for the next pass.

A pass without backward leaves the root's weights gathered, at stages 1 and 2 all of them, so that
evaluation and generation do not gather them again. FSDP2 leaves them in the modules, too. An
optimizer made then would hold weights that the next gather overwrites, and what is written to them
or frozen would be lost. So the modules get their shards back when such a pass ends.
"""

import weakref
from collections.abc import Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.sharding.weight_changes import Notice, Units


def hold_shards_between_passes(model: nn.Module, units: Units) -> "Passes":
    """Let the modules of `units` hold shards whenever no pass of `model` uses them.

    Between a forward pass and its backward pass they hold what FSDP2 gives them: a step of an
    optimizer made there raises InputError.
    """
    passes = Passes(units)
    model.register_forward_pre_hook(passes.enter, prepend=True)
    model.register_forward_hook(passes.leave, always_call=True)  # after FSDP2's
    for unit in units:
        fsdp.before_use(unit, partial(fsdp.show_gathered, unit))
        fsdp.use_whole_parameters(unit)
    references = tuple(weakref.ref(unit) for unit in units)
    handle = register_optimizer_step_pre_hook(partial(_require_shards, references))
    weakref.finalize(model, handle.remove)
    return passes


def require_shards(parameters: Iterable[nn.Parameter]) -> None:
    """Raise InputError for parameters that are weights of some model, gathered for a pass."""
    if unique := dict.fromkeys(parameters):
        Notice(unique).step()


class Passes:
    """The forward passes of a model that are running, one within another."""

    def __init__(self, units: Units) -> None:
        self._units, self._depth = units, 0

    def enter(self, *_: object) -> None:
        self._depth += 1

    def leave(self, *_: object) -> None:
        self._depth = max(0, self._depth - 1)  # a hook before `enter` may have raised
        if not torch.is_grad_enabled():
            self._show_shards()

    def include(self, model: nn.Module, name: str) -> None:
        """Take a method of the model, which needs no gradients, for a forward pass."""
        register_fsdp_forward_method(model, name)
        method = getattr(model, name)

        @wraps(method)
        def as_pass(*arguments: Any, **options: Any) -> Any:
            self._depth += 1
            try:
                return method(*arguments, **options)
            finally:
                self._depth -= 1
                self._show_shards()

        setattr(model, name, as_pass)

    def _show_shards(self) -> None:
        if self._depth == 0:
            for unit in self._units:
                fsdp.show_shards(unit)


def _require_shards(
    references: tuple[weakref.ref, ...], optimizer: torch.optim.Optimizer, *_: object
) -> None:
    """Raise InputError for an optimizer or a notice that holds gathered weights of these units."""
    plain = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not isinstance(parameter, DTensor)
    ]
    if not plain:
        return
    units = [unit for reference in references if (unit := reference()) is not None]
    names: dict[nn.Parameter, str] = {}
    for unit in units:
        names |= fsdp.gathered_names(unit)
    for parameter in plain:
        if parameter in names:
            user = "GatheredParameters was given"
            if not isinstance(optimizer, Notice):
                user = "the optimizer holds"
            raise InputError(
                f"{user} {names[parameter]} as it was gathered for a pass, and changes of that "
                "would be lost: take the model's parameters before the forward pass, or after the "
                "backward pass, when they are its shards"
            )
