"""One training iteration: begun here, measured once its numbers have come from the device."""

import hashlib
import math
import time
from collections.abc import Mapping

import torch

from megatron_zpp.data.loader import Loader
from megatron_zpp.monitor.memory import read_memory
from megatron_zpp.monitor.metrics import Iteration
from megatron_zpp.monitor.optimizer_states import optimizer_states
from megatron_zpp.train.run import Run
from zeropp import InputError, StepResult, optimizer_step
from zeropp.checkpoint.state_tensors import masters_of
from zeropp.optim.host_values import HostValues
from zeropp.optim.step import global_norm, local_part


class Underway:
    """An iteration whose work is queued; a GPU may still be at it, or at the one before."""

    def __init__(
        self,
        run: Run,
        loss: HostValues,
        step: StepResult,
        known: Mapping[str, object],
        began: float,
        behind: "Underway | None",
    ) -> None:
        self._run, self._loss, self._step, self._known = run, loss, step, known
        self._began, self._behind = began, behind
        self.ended: float | None = None

    def measured(self) -> Iteration:
        """The iteration, once the device has its numbers; after that of the one before.

        Raises InputError for a loss or a norm that is not finite: the weights were left alone.
        """
        number, loss = self._known["iteration"], self._loss.values[0]
        require_finite(self._run, number, loss, "the loss")
        require_finite(self._run, number, self._step.grad_norm, "the norm of the gradients")
        self.ended = time.perf_counter()
        began = max(self._began, self._behind.ended) if self._behind else self._began
        self._behind = None
        return Iteration(
            **self._known,
            seconds=self.ended - began,
            loss=loss,
            grad_norm=self._step.grad_norm,
            num_zeros=self._step.num_zeros,
        )


def begin_iteration(run: Run, batches: Loader, behind: Underway | None = None) -> Underway:
    """One step on one global batch; `behind` is the iteration before, where it is not measured yet.

    NaN does not reach the weights: without a finite loss and norm the update is left out.
    """
    counters, schedules, config = run.counters, run.schedules, run.config
    began, waited = time.perf_counter(), batches.waited
    global_batch = schedules.batch_size(counters.consumed_samples)
    set_schedule(run, counters.scheduled_samples)
    scale = run.scaler.scale if run.scaler else 1.0
    loss = forward_backward(run, batches, global_batch, scale)
    evaluated = moment(run)
    step = optimizer_step(
        run.optimizer,
        run.sharding,
        clip_grad=config.optimizer.clip_grad,
        scaler=run.scaler,
        count_zeros=config.log.log_num_zeros_in_grad,
        loss=loss,
    )
    skipped = run.scaler is not None and step.skipped
    counters.iteration += 1
    counters.consumed_samples += global_batch
    counters.consumed_tokens += global_batch * config.model.seq_length
    counters.skipped_iterations += skipped
    counters.scheduled_samples += 0 if skipped else global_batch
    communicates = is_due(counters.iteration, config.log.log_interval)
    known = dict(
        iteration=counters.iteration,
        train_iters=schedules.length.iterations,
        consumed_samples=counters.consumed_samples,
        consumed_tokens=counters.consumed_tokens,
        learning_rate=schedules.learning_rate(counters.scheduled_samples),  # of the next, as MD
        global_batch_size=global_batch,
        seq_length=config.model.seq_length,
        loss_scale=scale,
        params_norm=parameters_norm(run) if config.log.log_params_norm else None,
        skipped=skipped,
        memory=read_memory(run.ranks.device),
        communication=run.account.take() if communicates else None,
        extra=extra_scalars(
            run, forward_backward=evaluated - began, batch_generator=batches.waited - waited
        ),
    )
    return Underway(run, HostValues(loss), step, known, began, behind)


def forward_backward(
    run: Run, batches: Loader, global_batch: int, scale: float
) -> torch.Tensor:
    """Gradients of the mean loss over `global_batch` samples, times `scale`.

    Returns that mean, over all ranks; fp64, 0-d.
    """
    sharding, ranks, micro = run.sharding, run.ranks, run.config.batch.micro_batch_size
    num_micro_batches = global_batch // (micro * ranks.num_ranks)
    total = torch.zeros((), device=ranks.device)
    run.account.begin_step()
    for index in range(num_micro_batches):
        first_sample = batches.consumed_samples + ranks.rank * micro
        batch = next(batches)
        seed_dropout(run.config.training.seed, first_sample)
        with sharding.micro_step(last=index == num_micro_batches - 1):
            loss = sharding.model(*batch.inputs())
            (loss * (scale / num_micro_batches)).backward()
        total += loss.detach()
    run.account.end_step(num_micro_batches)
    return ranks.summed(total) / (num_micro_batches * ranks.num_ranks)


def set_schedule(run: Run, scheduled_samples: int) -> None:
    """Give the optimizer this step's learning rate and weight decay."""
    learning_rate = run.schedules.learning_rate(scheduled_samples)
    weight_decay = run.schedules.weight_decay(scheduled_samples)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def seed_dropout(seed: int, first_sample: int) -> None:
    """Draw a micro-batch's dropout from what it is, not from what came before it.

    So a resumed run, and one on another number of ranks, drops the same elements.
    """
    digest = hashlib.blake2b(f"{seed}/{first_sample}".encode(), digest_size=4).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))  # mt19937 takes 32 bits


def require_finite(run: Run, iteration: int, value: float, what: str) -> None:
    """Raise InputError for NaN or infinity; with a loss scaler the step is skipped instead."""
    if math.isfinite(value) or run.scaler:
        return
    raise InputError(
        f"{what} is {value} at iteration {iteration}, and no update was made: "
        "lower --lr, lengthen --lr-warmup-iters, lower --clip-grad, or look at the data; then "
        "resume from the last checkpoint"
    )


def extra_scalars(run: Run, **seconds: float) -> dict[str, float]:
    """What TensorBoard gets beside the log's numbers, as the flags ask for; `seconds` by timer."""
    log, scalars = run.config.log, {}
    written = is_due(run.counters.iteration, log.tensorboard_log_interval)
    if log.log_timers_to_tensorboard:
        scalars |= {f"{timer.replace('_', '-')}-time": each for timer, each in seconds.items()}
    if log.log_optimizer_states_to_tensorboard and written:
        scalars |= optimizer_states(run.optimizer)
    return scalars


def parameters_norm(run: Run) -> float:
    """L2 norm of all parameters, in fp32 where the optimizer holds them so."""
    masters = masters_of(run.optimizer)
    parameters = (masters.get(one, one) for one in run.sharding.model.parameters())
    weights = [local_part(one.detach()) for one in parameters]
    return global_norm(weights, run.sharding).item()


def moment(run: Run) -> float:
    """Now; with timers in the log, when the device has done what was asked of it."""
    if run.config.log.log_timers_to_tensorboard and run.ranks.asynchronous:
        torch.accelerator.synchronize()
    return time.perf_counter()


def is_due(iteration: int, interval: int | None) -> bool:
    """Whether something done every `interval` iterations is to be done after this one."""
    return interval is not None and iteration % interval == 0
