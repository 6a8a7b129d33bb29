"""The measurements of an iteration; the device may still be computing some of them."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_zpp.model.attention.sequences import PassRecord
from megatron_zpp.monitor.metrics import Iteration
from zeropp import StepResult
from zeropp.optim import HostValues


@dataclass(frozen=True, kw_only=True)
class StepLosses:
    """The losses of a step, on the device.

    `mean`: over all ranks (fp64, 0-d). `empty_share`: the share of all micro-batches that have no
    token with a loss (fp64, 0-d). `of_micro_batches`: this rank's, in order (0-d each); none on
    ranks that are not at the end of a pipeline. `records`: what layers have
    recorded of each micro-batch, if they do.
    """

    mean: torch.Tensor
    empty_share: torch.Tensor
    of_micro_batches: Sequence[torch.Tensor]
    records: Sequence[PassRecord] | None = None


class PendingIteration:
    """An iteration whose work is queued; a GPU may still be computing it or the one before.

    `known_fields` are the fields of `Iteration` that are available without the device, `started` is
    `time.perf_counter()` at its beginning, `previous` the iteration before if its result has not
    been read yet. `result` sets `ended`, the time when the host received the numbers. `samples` are
    those of the global batch, `others` further 0-d numbers on the device by their names.
    """

    def __init__(
        self,
        known_fields: Mapping[str, object],
        losses: StepLosses,
        update: StepResult,
        started: float,
        previous: "PendingIteration | None",
        others: Mapping[str, torch.Tensor],
        has_loss_scaler: bool,
    ) -> None:
        self.micro_batch_losses = losses.of_micro_batches
        end, size = known_fields["consumed_samples"], known_fields["global_batch_size"]
        self.samples = range(end - size, end)
        self._known_fields, self._update = known_fields, update
        self._names_of_others = tuple(others)
        self._numbers = HostValues(losses.mean, losses.empty_share, *others.values())
        self._has_loss_scaler = has_loss_scaler
        self._started, self._previous = started, previous
        self.ended: float | None = None

    def result(self) -> Iteration:
        """Wait for the device's numbers; call it after `result` of the previous iteration."""
        loss, empty_share, *others = self._numbers.values
        grad_norm = self._update.grad_norm
        self.ended = time.perf_counter()
        started = self._started
        if self._previous is not None:  # the device began this iteration after that one
            started = max(started, self._previous.ended)
            self._previous = None
        return Iteration(
            **self._known_fields,
            seconds=self.ended - started,
            loss=loss,
            empty_share=empty_share,
            grad_norm=grad_norm,
            num_zeros=self._update.num_zeros,
            others=dict(zip(self._names_of_others, others, strict=True)),
        )

    def problem(self) -> str | None:
        """Say which number is not finite, after `result`: the weights were not updated then.

        None with a loss scaler, which skips such a step.
        """
        if self._has_loss_scaler:
            return None
        numbers = {
            "the loss": self._numbers.values[0],
            "the norm of the gradients": self._update.grad_norm,
        }
        return next((f"{name} is {x}" for name, x in numbers.items() if not math.isfinite(x)), None)
