"""After an exception in the middle of a pass, the next pass starts clean or says that it cannot."""

from collections.abc import Sequence

import torch

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.wire.gradient_use import GradientUse, clear_gradient, gradient_of
from zeropp.wire.scalar_gradients import ScalarGradients
from zeropp.wire.secondary_copies import SecondaryCopies

INCOMPLETE = (
    "a backward pass ended with an exception, and the gradients of this step are incomplete: call "
    "the engine's zero_grad() or the sharding's discard_gradients(), and repeat all micro-batches "
    "of the step"
)


class FailedPasses:
    """Notices that the last pass of a sharded model did not end, before the next one begins.

    A forward pass that failed leaves no gradients. One that failed in backward leaves those of some
    units: they must be cleared, and the micro-batches of the step repeated. All ranks must have
    failed in the same pass.
    """

    def __init__(
        self,
        model: fsdp.FSDPModule,
        units: Sequence[fsdp.FSDPModule],
        *,
        accumulates: bool,
        use: GradientUse | None,
        copies: SecondaryCopies | None,
        scalars: ScalarGradients,
    ) -> None:
        self._model, self._units, self._use, self._copies = model, units, use, copies
        self._scalars = scalars
        self._accumulates = accumulates  # whole gradients until the end of a step
        self.gradient_of, self.clear_gradient = gradient_of, clear_gradient
        self._incomplete = False
        self._depth = 0  # of calls of the model within its own forward
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.register_forward_hook(self._after_forward, always_call=True)

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
                self.clear_gradient(shard)
        for scalar in self._scalars.parameters():
            scalar.grad = None
            self.clear_gradient(scalar)
        self._incomplete = False

    def _before_forward(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1 and fsdp.backward_id() == -1:
            self.recover()
            if torch.is_grad_enabled():
                self.require_complete()

    def _after_forward(self, *_: object) -> None:
        self._depth -= 1

    def _has_gradients(self, unit: fsdp.FSDPModule) -> bool:
        """Whether a unit has gradients, maybe of micro-batches that succeeded."""
        has_means = any(self.gradient_of(shard) is not None for shard in fsdp.shards(unit))
        return has_means or self._accumulates and fsdp.accumulates(unit)

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
