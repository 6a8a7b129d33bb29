"""The passes of one root: what must hold before a pass begins, and what it leaves behind.

A pass without backward leaves the root's weights gathered, at stages 1 and 2 all of them, so that
evaluation and generation do not gather them again. FSDP2 leaves them in the modules, too. An
optimizer made then would hold weights that the next gather overwrites, and what is written to them
or frozen would be lost. So the modules get their shards back when such a pass ends.

A pass that failed is forgotten before the next one begins. One that failed in forward leaves no
gradients. One that failed in backward leaves those of some units: they must be cleared, and the
micro-batches of the step repeated. All ranks must have failed in the same pass.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.sharding.whole_weights import WholeWeights
from zeropp.wire.gradient_use import GradientUse
from zeropp.wire.gradients import Gradients
from zeropp.wire.kept_weights import Units
from zeropp.wire.scalar_gradients import ScalarGradients
from zeropp.wire.secondary_copies import SecondaryCopies
from zeropp.wire.shard_holders import ShardHolder, add_holder

INCOMPLETE = (
    "a backward pass ended with an exception, and the gradients of this step are incomplete: call "
    "the engine's zero_grad() or the sharding's discard_gradients(), and repeat all micro-batches "
    "of the step"
)


class Passes(ShardHolder):
    """The passes of a root: while none runs, modules hold their shards.

    Between a forward pass and its backward pass they hold what FSDP2 gives them: a step of an
    optimizer made there raises InputError. With `accumulates`, whole gradients stay until a step's
    last backward pass.
    """

    def __init__(
        self,
        model: fsdp.FSDPModule,
        whole: WholeWeights,
        *,
        accumulates: bool,
        calls_units: bool,
        use: GradientUse | None,
        copies: SecondaryCopies | None,
        scalars: ScalarGradients,
        gradients: Gradients,
    ) -> None:
        self._model, self._whole, self._use, self._copies = model, whole, use, copies
        self._scalars, self._gradients = scalars, gradients
        self._accumulates = accumulates
        self._units: list[fsdp.FSDPModule] = []
        self._incomplete = False
        self._depth = 0  # of calls of the model within its own forward
        self.has_called = False  # a method, whose output may get gradients
        self._uncalled = None if calls_units else fsdp.UncalledUnits(model)
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)  # after FSDP2's
        if self._uncalled:
            fsdp.call_methods_by(model, self._call)
        add_holder(self)

    def add(self, units: Units) -> None:
        """Include units of the model, between two passes."""
        self._units += units
        if self._uncalled:
            self._uncalled.add(units)
        for unit in units:
            fsdp.show_between_passes(unit)
            fsdp.use_whole_parameters(unit)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer of gathered weights; let shards take what was written to them."""
        held = (each for group in optimizer.param_groups for each in group["params"])
        self.require_shards(held, "the optimizer holds")
        self._whole.before_step(optimizer)

    def require_shards(self, parameters: Iterable[torch.Tensor], user: str) -> None:
        """Raise InputError if a `user` has weights of the model as they are gathered for a pass."""
        plain = [each for each in parameters if not isinstance(each, DTensor)]
        names: dict[nn.Parameter, str] = {}
        for unit in self._units if plain else ():
            names |= fsdp.gathered_names(unit)
        for parameter in plain:
            if parameter in names:
                raise InputError(
                    f"{user} {names[parameter]} as it was gathered for a pass, and changes of that "
                    "would be lost: take the model's parameters before the forward pass, or after "
                    "the backward pass, when they are its shards"
                )

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
            self._hide_whole()
            self.recover()
            if torch.is_grad_enabled():
                self.require_complete()
        if self._uncalled and not torch.compiler.is_compiling():  # which cannot gather in a pass
            self._uncalled.watch(True)

    def _leave(self, _: object, __: object, output: Any, *, with_root: bool = False) -> None:
        self._depth = max(0, self._depth - 1)  # a hook before `_enter` may have raised
        if self._depth == 0:
            if self._uncalled:
                self._uncalled.watch(False, with_root=with_root)
            for unit in () if _needs_backward(output) else self._units:
                fsdp.show_shards(unit)
            self._whole.show()

    def _hide_whole(self) -> None:
        """Begin a pass as one after an evaluation: weights are gathered, modules hold shards."""
        if not torch.compiler.is_compiling():
            self._whole.hide(takes=torch.is_grad_enabled())

    def _call(self, method: Callable, *arguments: Any, **options: Any) -> Any:
        """Call a method of the model, which may compute with it if it is given tensors."""
        given = any(isinstance(e, torch.Tensor) for e in pytree.tree_leaves((arguments, options)))
        if not given or self._depth or fsdp.backward_id() != -1 or torch.compiler.is_compiling():
            return method(*arguments, **options)
        self._depth = 1
        self._hide_whole()
        self.recover()
        self._uncalled.watch(True, with_root=True)
        output = None
        try:
            output = method(*arguments, **options)
            self.has_called = self.has_called or _needs_backward(output)
            return output
        finally:
            self._leave(None, None, output, with_root=True)

    def _has_gradients(self, unit: fsdp.FSDPModule) -> bool:
        """Whether a unit has gradients, maybe of micro-batches that succeeded."""
        has_means = any(self._gradients.of(shard) is not None for shard in fsdp.shards(unit))
        return has_means or self._accumulates and fsdp.accumulates(unit)


def _needs_backward(output: Any) -> bool:
    """Whether gradients are enabled, and what a pass returns may have some."""
    leaves = pytree.tree_leaves(output)
    return torch.is_grad_enabled() and any(getattr(e, "requires_grad", True) for e in leaves)
