"""The measurements of an iteration, some of which the device is still computing."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_zpp.monitor.memory import read_memory
from megatron_zpp.monitor.metrics import Iteration
from megatron_zpp.monitor.optimizer_norms import optimizer_norms
from megatron_zpp.train.run import Run, is_due
from zeropp import StepResult
from zeropp.checkpoint.state_tensors import masters_of
from zeropp.optim.host_values import HostValues
from zeropp.optim.step import global_norm, local_part


@dataclass(frozen=True, kw_only=True)
class StepLosses:
    """The losses of a step, on the device.

    `mean`: over all ranks (fp64, 0-d). `empty_share`: of all micro-batches, how many have no token
    with a loss (fp64, 0-d). `of_micro_batches`: this rank's, in their order (0-d each); none on
    ranks that are not at the end of a pipeline.
    """

    mean: torch.Tensor
    empty_share: torch.Tensor
    of_micro_batches: Sequence[torch.Tensor]


class PendingIteration:
    """An iteration whose work is queued; a GPU may still be computing it or the one before.

    `host_fields` are the fields of `Iteration` that are available without the device (see
    `host_fields`), `started` is `time.perf_counter()` at its beginning, `previous` the iteration
    before if its result has not been read yet. `result` sets `ended`, the time when the host
    received the numbers. `samples` are those of the global batch.
    """

    def __init__(
        self,
        run: Run,
        host_fields: Mapping[str, object],
        losses: StepLosses,
        update: StepResult,
        started: float,
        previous: "PendingIteration | None",
    ) -> None:
        self.micro_batch_losses = losses.of_micro_batches
        end, size = host_fields["consumed_samples"], host_fields["global_batch_size"]
        self.samples = range(end - size, end)
        self._host_fields, self._update = host_fields, update
        self._losses = HostValues(losses.mean, losses.empty_share)
        self._has_loss_scaler = run.scaler is not None
        self._started, self._previous = started, previous
        self.ended: float | None = None

    def result(self) -> Iteration:
        """Wait for the device's numbers; call it after `result` of the previous iteration."""
        loss, empty_share = self._losses.values
        grad_norm = self._update.grad_norm
        self.ended = time.perf_counter()
        started = self._started
        if self._previous is not None:  # the device began this iteration after that one
            started = max(started, self._previous.ended)
            self._previous = None
        return Iteration(
            **self._host_fields,
            seconds=self.ended - started,
            loss=loss,
            empty_share=empty_share,
            grad_norm=grad_norm,
            num_zeros=self._update.num_zeros,
        )

    def problem(self) -> str | None:
        """Say which number is not finite, after `result`: the weights were not updated then.

        None with a loss scaler, which skips such a step.
        """
        if self._has_loss_scaler:
            return None
        numbers = {
            "the loss": self._losses.values[0],
            "the norm of the gradients": self._update.grad_norm,
        }
        return next((f"{name} is {x}" for name, x in numbers.items() if not math.isfinite(x)), None)


def host_fields(
    run: Run, global_batch_size: int, loss_scale: float, skipped: bool, **seconds: float
) -> dict[str, object]:
    """Fields of `Iteration` for the step just counted, without waiting for the device.

    `seconds` are the fields of the timers. All ranks call it: the norms of parameters and optimizer
    states, if the flags ask for them, take collectives and wait for the device.
    """
    config, counters, log = run.config, run.counters, run.config.log
    writes_norms = log.log_optimizer_states_to_tensorboard and is_due(
        counters.iteration, log.tensorboard_log_interval
    )
    return dict(
        iteration=counters.iteration,
        train_iters=run.schedules.length.iterations,
        consumed_samples=counters.consumed_samples,
        consumed_tokens=counters.consumed_tokens,
        # Of the next iteration, as in Megatron-DeepSpeed.
        learning_rate=run.schedules.learning_rate(counters.scheduled_samples),
        global_batch_size=global_batch_size,
        seq_length=config.model.seq_length,
        loss_scale=loss_scale,
        params_norm=parameters_norm(run) if log.log_params_norm else None,
        skipped=skipped,
        memory=read_memory(run.ranks.device),
        communication=(
            run.communication.take() if is_due(counters.iteration, log.log_interval) else None
        ),
        optimizer_norms=(
            optimizer_norms(run.optimizer, run.ranks.pipeline_size) if writes_norms else {}
        ),
        **(seconds if log.log_timers_to_tensorboard else {}),
    )


def parameters_norm(run: Run) -> float:
    """L2 norm of all parameters, of the optimizer's fp32 copies where it has them."""
    masters = masters_of(run.optimizer)
    weights = [
        (parameter, local_part(masters.get(parameter, parameter).detach()))
        for parameter in run.sharding.model.parameters()
    ]
    return global_norm(weights, run.sharding).item()


def timer_now(run: Run) -> float:
    """`time.perf_counter()`; with timers in the log, after the device has finished its work."""
    if run.config.log.log_timers_to_tensorboard and run.ranks.asynchronous:
        torch.accelerator.synchronize()
    return time.perf_counter()
