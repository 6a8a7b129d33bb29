"""One training step: forward and backward of its micro-batches, and the optimizer's update."""

import hashlib
import time
from collections.abc import Iterator, Sequence

import torch

from megatron_zpp.data.loader import Batch, Loader
from megatron_zpp.model.tensor_parallel import sum_partial_gradients
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.recipe.pipeline import Pipeline
from megatron_zpp.train.pending_iteration import (
    PendingIteration,
    StepLosses,
    host_fields,
    timer_now,
)
from megatron_zpp.train.run import Run
from zeropp import optimizer_step


def train_step(
    run: Run, batches: Loader, previous: PendingIteration | None = None
) -> PendingIteration:
    """Train on one global batch; on a GPU this queues the work and returns before it is done.

    `previous` is the iteration before if its numbers have not been read yet. The optimizer does not
    update the weights unless the loss and the norm of the gradients are finite.
    """
    started = time.perf_counter()
    waited_before = batches.waited
    config, counters = run.config, run.counters
    global_batch_size = run.schedules.batch_size(counters.consumed_samples)
    loss_scale = run.scaler.scale if run.scaler else 1.0
    set_schedule(run)
    losses = forward_backward(run, batches, global_batch_size, loss_scale)
    backward_ended = timer_now(run)
    update = optimizer_step(
        run.optimizer,
        run.sharding,
        clip_grad=config.optimizer.clip_grad,
        scaler=run.scaler,
        count_zeros=config.log.log_num_zeros_in_grad,
        loss=losses.mean,
    )
    skipped = run.scaler is not None and update.skipped
    counters.advance(global_batch_size, config.model.seq_length, skipped)
    fields = host_fields(
        run,
        global_batch_size,
        loss_scale,
        skipped,
        forward_backward_seconds=backward_ended - started,
        batch_generator_seconds=batches.waited - waited_before,
    )
    return PendingIteration(run, fields, losses, update, started, previous)


def forward_backward(
    run: Run, batches: Loader, global_batch_size: int, loss_scale: float
) -> StepLosses:
    """Add the gradients of the mean loss over a global batch, times `loss_scale`, to `.grad`.

    The mean is over micro-batches, of which those without any token that has a loss count as 0, or
    with `--calculate-per-token-loss` over tokens. What is returned is without the scale.
    """
    sharding, ranks = run.sharding, run.ranks
    micro_batch_size = run.config.batch.micro_batch_size
    num_micro_batches = global_batch_size // (micro_batch_size * ranks.num_replicas)
    num_empty = torch.zeros((), dtype=torch.float64, device=ranks.device)
    samples = (next_micro_batch(run, batches) for _ in range(num_micro_batches))
    samples = counting_empty(samples, num_empty)
    weights = [1.0] * num_micro_batches
    if run.config.training.calculate_per_token_loss:
        samples = list(samples)
        weights = shares_of_tokens([batch for _, batch in samples], ranks)
    scales = [loss_scale / num_micro_batches * weight for weight in weights]
    run.communication.begin_step()
    if isinstance(sharding.model, Pipeline):
        losses = pipeline_passes(run, iter(samples), scales)
    else:
        losses = []
        for (first_sample, batch), scale in zip(samples, scales, strict=True):
            ranks.main_thread.mark()
            seed_dropout(run.config.training.seed, first_sample, ranks.context_place)
            with sharding.micro_step(last=len(losses) == num_micro_batches - 1):
                loss = sharding.model(*batch.inputs())
                (loss * scale).backward()
            losses.append(loss.detach())
    if isinstance(sharding.model, Pipeline):
        sharding.model.sum_tied_gradients(run.optimizer)
    if ranks.tensor_size > 1:
        sum_partial_gradients(
            sharding.model, run.optimizer, ranks.tensor_peers, ranks.device,
            sequence_parallel=run.config.parallel.sequence_parallel,
        )  # fmt: skip
    run.communication.end_step(num_micro_batches)
    # `losses` is empty on ranks that do not hold the end of a pipeline.
    weighted = (loss * weight for loss, weight in zip(losses, weights, strict=False))
    total_loss = sum(weighted, start=torch.zeros((), device=ranks.device))
    loss, empty = ranks.sum_tensor(torch.stack((total_loss.double(), num_empty)))
    return StepLosses(
        mean=loss / (num_micro_batches * ranks.num_losses),
        empty_share=empty / (num_micro_batches * ranks.num_ranks),
        of_micro_batches=losses,
    )


def shares_of_tokens(batches: Sequence[Batch], ranks: Ranks) -> list[torch.Tensor]:
    """Return how many tokens of each of this rank's micro-batches have a loss, 0-d fp32 each.

    In units of the mean over the micro-batches of all replicas; a collective.
    """
    counts = torch.stack([batch.loss_mask.sum(dtype=torch.float64) for batch in batches])
    total = ranks.sum_tensor(counts.sum()) / (ranks.num_ranks // ranks.num_replicas)
    mean = total / (len(batches) * ranks.num_replicas)
    return list((counts / mean.clamp(min=torch.finfo(torch.float64).tiny)).float())


def pipeline_passes(
    run: Run, samples: Iterator[tuple[int, Batch]], scales: Sequence[float | torch.Tensor]
) -> list[torch.Tensor]:
    """Run the passes of a step through the stages of a pipeline; return the losses, if any here."""
    ranks, seed = run.ranks, run.config.training.seed
    splits_rows = run.config.parallel.sequence_parallel

    def seed_stage(first_sample: int, stage: int) -> None:
        own_rows = ranks.tensor_place if splits_rows and stage > 0 else 0
        seed_dropout(seed, first_sample, ranks.context_place, stage, own_rows)

    return run.sharding.model.forward_backward(samples, scales, seed_stage)


def next_micro_batch(run: Run, batches: Loader) -> tuple[int, Batch]:
    """Return the number of the first sample of this rank's next micro-batch, and the batch."""
    size = run.config.batch.micro_batch_size
    return batches.consumed_samples + run.ranks.replica * size, next(batches)


def counting_empty(
    samples: Iterator[tuple[int, Batch]], num_empty: torch.Tensor
) -> Iterator[tuple[int, Batch]]:
    """Yield `samples`, and add to `num_empty` (0-d) how many of them have no token with a loss."""
    for first_sample, batch in samples:
        num_empty += ~batch.loss_mask.any()
        yield first_sample, batch


def set_schedule(run: Run) -> None:
    """Set the optimizer's learning rate and weight decay for the next step."""
    scheduled_samples = run.counters.scheduled_samples
    learning_rate = run.schedules.learning_rate(scheduled_samples)
    ends = run.schedules.ends_learning_rate or run.schedules.learning_rate
    weight_decay = run.schedules.weight_decay(scheduled_samples)
    for group in run.optimizer.param_groups:
        group["lr"] = ends(scheduled_samples) if group["at_ends"] else learning_rate
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def seed_dropout(seed: int, first_sample: int, *part: int) -> None:
    """Seed dropout with the number of a micro-batch's first sample, and which part of it this is.

    A resumed run, and a run with another number of replicas, then drop the same elements.
    """
    text = "/".join(map(str, (seed, first_sample, *(part if any(part) else ()))))
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little")  # mt19937 takes 32 bits
    # `torch.manual_seed` notes where it was called for every kind of device (0.3 ms).
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
