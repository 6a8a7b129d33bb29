"""The training loop, top to bottom: step, log, evaluate, save, stop."""

import hashlib
import math
import time

import torch

from megatron_zpp.data.loader import Loader
from megatron_zpp.evaluate import evaluate
from megatron_zpp.memory import read_memory
from megatron_zpp.metrics import Iteration, Validation
from megatron_zpp.optimizer_states import optimizer_states
from megatron_zpp.resume import save
from megatron_zpp.run import Run
from zeropp import InputError, optimizer_step
from zeropp.optim.step import global_norm, local_part

TRAIN, VALIDATION, TEST = range(3)


def train(run: Run) -> bool:
    """Train from where `run.counters` stands; returns whether the last iteration was reached."""
    config, counters = run.config, run.counters
    if config.evaluation.eval_at_start and counters.iteration == 0:
        held_out(run, VALIDATION, "the start of training")
    with loader(run, TRAIN, counters.consumed_samples) as batches, run.console.live():
        while counters.iteration < run.schedules.length.iterations:
            run.metrics.iteration(train_iteration(run, batches))
            if is_due(counters.iteration, config.evaluation.eval_interval):
                held_out(run, VALIDATION, f"iteration {counters.iteration}")
            reason = run.stopping.reason(counters.iteration, run.ranks)
            if reason or is_due(counters.iteration, config.checkpoint.save_interval):
                save(run)
            if reason:
                run.console.line(f"stopping after iteration {counters.iteration}: {reason}")
                return False
    if counters.iteration != counters.saved_iteration:
        save(run)
    return True


def train_iteration(run: Run, batches: Loader) -> Iteration:
    """One step on one global batch, timed, with the numbers the log wants.

    The loss is known on the host before the optimizer's step: NaN must not reach the weights.
    """
    counters, schedules, started = run.counters, run.schedules, time.perf_counter()
    log_interval = run.config.log.log_interval
    global_batch, waited = schedules.batch_size(counters.consumed_samples), batches.waited
    set_schedule(run, counters.scheduled_samples)
    scale = run.scaler.scale if run.scaler else 1.0
    loss = forward_backward(run, batches, global_batch, scale)
    evaluated = time.perf_counter()
    require_finite(run, loss, "the loss")
    result = optimizer_step(
        run.optimizer,
        run.sharding,
        clip_grad=run.config.optimizer.clip_grad,
        scaler=run.scaler,
        count_zeros=run.config.log.log_num_zeros_in_grad,
    )
    require_finite(run, result.grad_norm, "the norm of the gradients")
    counters.iteration += 1
    counters.consumed_samples += global_batch
    counters.consumed_tokens += global_batch * run.config.model.seq_length
    counters.skipped_iterations += result.skipped
    counters.scheduled_samples += 0 if result.skipped else global_batch
    return Iteration(
        iteration=counters.iteration,
        train_iters=schedules.length.iterations,
        consumed_samples=counters.consumed_samples,
        consumed_tokens=counters.consumed_tokens,
        seconds=time.perf_counter() - started,
        learning_rate=schedules.learning_rate(counters.scheduled_samples),  # of the next, as MD
        global_batch_size=global_batch,
        seq_length=run.config.model.seq_length,
        loss=loss,
        loss_scale=scale,
        grad_norm=result.grad_norm,
        num_zeros=result.num_zeros,
        params_norm=parameters_norm(run) if run.config.log.log_params_norm else None,
        skipped=result.skipped,
        memory=read_memory(run.ranks.device),
        communication=run.account.take() if is_due(counters.iteration, log_interval) else None,
        extra=extra_scalars(
            run, forward_backward=evaluated - started, batch_generator=batches.waited - waited
        ),
    )


def forward_backward(run: Run, batches: Loader, global_batch: int, scale: float) -> float:
    """Gradients of the mean loss over `global_batch` samples, times `scale`; returns that mean."""
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
    (everywhere,) = ranks.sum(total.item())
    return everywhere / (num_micro_batches * ranks.num_ranks)


def held_out(run: Run, split: int, moment: str) -> None:
    """Measure and report the loss on the next `--eval-iters` global batches of a split."""
    config, counters = run.config, run.counters
    if run.datasets[split] is None or config.evaluation.eval_iters == 0:
        return
    samples = config.evaluation.eval_iters * run.schedules.batch_size(counters.consumed_samples)
    consumed = counters.consumed_valid_samples if split == VALIDATION else 0
    if consumed + samples > len(run.datasets[split]):
        consumed = 0  # a checkpoint's evaluations were more or larger than this run's
    per_step = config.batch.micro_batch_size * run.ranks.num_ranks
    with loader(run, split, consumed) as batches:
        loss = evaluate(run.sharding, run.ranks, batches, samples // per_step)
    if split == VALIDATION:
        counters.consumed_valid_samples = consumed + samples
    run.metrics.validation(
        Validation(
            iteration=counters.iteration,
            consumed_samples=counters.consumed_samples,
            consumed_tokens=counters.consumed_tokens,
            loss=loss,
            moment=moment,
            split="validation" if split == VALIDATION else "test",
        )
    )


def loader(run: Run, split: int, consumed_samples: int) -> Loader:
    """Micro-batches of this rank from a split, after `consumed_samples` of all ranks."""
    return Loader(
        run.datasets[split],
        run.config.data,
        consumed_samples=consumed_samples,
        micro_batch_size=run.config.batch.micro_batch_size,
        rank=run.ranks.rank,
        world=run.ranks.num_ranks,
        eod=run.tokenizer.eod,
        device=run.ranks.device,
    )


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


def require_finite(run: Run, value: float, what: str) -> None:
    """Raise InputError for NaN or infinity; with a loss scaler the step is skipped instead."""
    if math.isfinite(value) or run.scaler:
        return
    raise InputError(
        f"{what} is {value} at iteration {run.counters.iteration + 1}, and no update was made: "
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
    """L2 norm of all parameters."""
    weights = [local_part(p.detach()) for p in run.sharding.model.parameters()]
    return global_norm(weights, run.sharding)


def is_due(iteration: int, interval: int | None) -> bool:
    """Whether something done every `interval` iterations is to be done after this one."""
    return interval is not None and iteration % interval == 0
