"""The passes of one root: what must hold before a pass begins, and what it leaves behind.

A pass without backward leaves the root's weights gathered, at stages 1 and 2 all of them, so that
evaluation and generation do not gather them again. FSDP2 leaves them in the modules, too. An
optimizer made then would hold weights that the next gather overwrites, and what is written to them
or frozen would be lost. So the modules get their shards back when such a pass ends.

A pass that failed is forgotten before the next one begins. One that failed in forward leaves no
gradients. One that failed in backward leaves those of some units: they must be cleared, and the
micro-batches of the step repeated. All ranks must have failed in the same pass.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.wire.gradient_use import GradientUse
from zeropp.wire.gradients import Gradients
from zeropp.wire.kept_weights import Notice, Units
from zeropp.wire.scalar_gradients import ScalarGradients
from zeropp.wire.secondary_copies import SecondaryCopies

INCOMPLETE = (
    "a backward pass ended with an exception, and the gradients of this step are incomplete: call "
    "the engine's zero_grad() or the sharding's discard_gradients(), and repeat all micro-batches "
    "of the step"
)


class Passes:
    """The passes of a root: while none runs, modules hold their shards.

    Between a forward pass and its backward pass they hold what FSDP2 gives them: a step of an
    optimizer made there raises InputError. With `accumulates`, whole gradients stay until a step's
    last backward pass.
    """

    def __init__(
        self,
        model: fsdp.FSDPModule,
        *,
        accumulates: bool,
        calls_units: bool,
        use: GradientUse | None,
        copies: SecondaryCopies | None,
        scalars: ScalarGradients,
        gradients: Gradients,
    ) -> None:
        self._model, self._use, self._copies = model, use, copies
        self._scalars, self._gradients = scalars, gradients
        self._accumulates = accumulates
        self._units: list[fsdp.FSDPModule] = []
        self._incomplete = False
        self._depth = 0  # of calls of the model within its own forward
        self._uncalled = None if calls_units else fsdp.UncalledUnits(model)
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)  # after FSDP2's
        if hasattr(model, "generate") and _is_wrapper(model):
            fsdp.use_as_pass(model, "generate", self._pass)

    def add(self, units: Units) -> None:
        """Include units of the model, between two passes."""
        self._units += units
        if self._uncalled:
            self._uncalled.add(units)
        for unit in units:
            fsdp.show_between_passes(unit)
            fsdp.use_whole_parameters(unit)
        references = tuple(weakref.ref(unit) for unit in units)
        require = partial(_require_shards, references)
        fsdp.around_steps(register_optimizer_step_pre_hook, self._model, require)

    def require_complete(self) -> None:
        """Raise InputError if the last backward pass failed and its gradients are still there."""
        self.recover()
        if not self._incomplete:
            return
        if any(map(self._has_gradients, self._units)):
            raise InputError(INCOMPLETE)
        self.discard()

    def discard(self) -> None:
        """Clear all gradients, after which the next pass starts clean."""
        self.recover()
        for unit in self._units:
            fsdp.discard_gradients(unit)
            for shard in fsdp.shards(unit):
                self._gradients.clear(shard)
        for scalar in self._scalars.parameters():
            scalar.grad = None
            self._gradients.clear(scalar)
        self._incomplete = False

    def recover(self) -> None:
        """Let FSDP2 forget a pass that did not end."""
        if self._depth > 1 or not fsdp.is_in_pass(self._model):
            return
        self._incomplete = self._incomplete or fsdp.awaits_end_of_backward(self._model)
        fsdp.abandon_pass(self._model)
        if self._use is not None:
            self._use.discard()
        if self._copies is not None:
            self._copies.drop()  # ranks may have brought different ones up to date

    def _enter(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1 and fsdp.backward_id() == -1:
            self.recover()
            if torch.is_grad_enabled():
                self.require_complete()
        if self._uncalled and not torch.compiler.is_compiling():  # which cannot gather in a pass
            self._uncalled.watch(True)

    def _leave(self, *_: object, shows_shards: bool = False) -> None:
        self._depth = max(0, self._depth - 1)  # a hook before `_enter` may have raised
        if self._depth == 0:
            if self._uncalled:
                self._uncalled.watch(False)
            for unit in self._units if shows_shards or not torch.is_grad_enabled() else ():
                fsdp.show_shards(unit)

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """Enclose a pass that needs no gradients."""
        self._depth += 1
        if self._uncalled:
            self._uncalled.watch(True)
        try:
            yield
        finally:
            self._leave(shows_shards=True)

    def _has_gradients(self, unit: fsdp.FSDPModule) -> bool:
        """Whether a unit has gradients, maybe of micro-batches that succeeded."""
        has_means = any(self._gradients.of(shard) is not None for shard in fsdp.shards(unit))
        return has_means or self._accumulates and fsdp.accumulates(unit)


def require_shards(parameters: Iterable[nn.Parameter]) -> None:
    """Raise InputError for parameters that are weights of some model, gathered for a pass."""
    if unique := dict.fromkeys(parameters):
        Notice(unique).step()


def _require_shards(references: Sequence[weakref.ref], optimizer: torch.optim.Optimizer) -> None:
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


def _is_wrapper(model: nn.Module) -> bool:
    """Whether a model only wraps another one, as PEFT's models do.

    Its methods may then call the inner model directly, past the hooks that gather the root's
    parameters.
    """
    return not any(True for _ in model.parameters(recurse=False)) and len([*model.children()]) == 1
