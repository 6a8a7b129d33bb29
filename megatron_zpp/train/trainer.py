"""One training step: forward and backward of its micro-batches, and the optimizer's update."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.data.loader import Batch, Loader
from megatron_zpp.model.attention.sequences import PassRecord
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.tensor_parallel import sum_partial_gradients
from megatron_zpp.monitor.communication import CommunicationMeter
from megatron_zpp.monitor.memory import read_memory
from megatron_zpp.monitor.optimizer_norms import optimizer_norms
from megatron_zpp.parallel.heartbeat import MainThread
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.recipe.capability import Capability
from megatron_zpp.recipe.pipeline import Pipeline
from megatron_zpp.settings.config import Config
from megatron_zpp.settings.scheduled_values import Schedules, is_due
from megatron_zpp.train.pending_iteration import PendingIteration, StepLosses
from zeropp import LossScaler, Sharding, optimizer_step
from zeropp.optim import global_norm, local_part, sharded


@dataclass(kw_only=True)
class Counters:
    """The progress of a run, saved in checkpoints so that a resumed run computes the same digits.

    `scheduled_samples`, which the schedules follow, does not count the samples of skipped updates,
    as in Megatron.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    scheduled_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    saved_iteration: int = 0

    def advance(
        self, num_samples: int, seq_length: int, skipped: bool, scheduled: int | None = None
    ) -> None:
        """Count one iteration on `num_samples` samples of `seq_length` tokens.

        scheduled: as many samples as the schedules count, with other numbers of nodes than planned.
        """
        self.iteration += 1
        self.consumed_samples += num_samples
        self.consumed_tokens += num_samples * seq_length
        if skipped:
            self.skipped_iterations += 1
        else:
            self.scheduled_samples += num_samples if scheduled is None else scheduled

    def state(self) -> dict[str, int]:
        """Return what `load` takes, on another node."""
        return dataclasses.asdict(self)

    def load(self, state: dict[str, int]) -> None:
        """Go on where another node is; this one has saved nothing of it yet."""
        for name, value in state.items():
            setattr(self, name, value)
        self.saved_iteration = 0


# Counters that are fields of TrainingState.
STATE_COUNTERS = tuple(
    field.name
    for field in dataclasses.fields(Counters)
    if field.name not in ("scheduled_samples", "saved_iteration")
)


@dataclass(kw_only=True)
class Trainer:
    """What takes steps: they change weights, the optimizer's state, the loss scale, the progress.

    `config` is the complete configuration, and `ranks` are those that train. `passes` runs forward
    and backward passes: those of a pipeline, or of a model that is whole.
    """

    config: Config
    ranks: Ranks
    sharding: Sharding
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    capabilities: Sequence[Capability]
    passes: "OneStage | Pipeline"
    schedules: Schedules
    counters: Counters
    communication: CommunicationMeter

    def step(self, batches: Loader, previous: PendingIteration | None = None) -> PendingIteration:
        """Train on one global batch; on a GPU this queues the work and returns before it is done.

        `previous` is the iteration before if its numbers have not been read yet. The optimizer does
        not update the weights unless the loss and the norm of the gradients are finite.
        """
        started = time.perf_counter()
        waited_before = batches.waited
        config, counters = self.config, self.counters
        replicas, follows = self.ranks.replicas, counters.consumed_samples
        if replicas.joins_and_leaves:  # the size of a batch follows their number
            follows = counters.scheduled_samples
        planned = self.schedules.batch_size(follows)
        global_batch_size = planned * self.ranks.num_parts // self.ranks.planned_parts
        loss_scale = self.scaler.scale if self.scaler else 1.0

        self._set_schedule()
        losses = self.forward_backward(batches, global_batch_size, loss_scale)
        numbers = {}
        for each in self.capabilities:
            numbers |= each.after_passes(counters.iteration + 1, losses.records)
        backward_ended = self._timer_now()
        replicas.before_update(counters.iteration + 1)
        for each in self.capabilities:
            each.before_update(counters.iteration + 1)
        update = optimizer_step(
            self.optimizer,
            self.sharding,
            clip_grad=config.optimizer.clip_grad,
            scaler=self.scaler,
            count_zeros=config.log.log_num_zeros_in_grad,
            loss=losses.mean,
        )
        is_last = counters.iteration + 1 == self.schedules.length.iterations
        for each in self.capabilities:
            each.after_update(counters.iteration + 1, last=is_last)
        num_micro_batches = self._num_micro_batches(global_batch_size)
        self.communication.end_step(num_micro_batches, counters.iteration + 1)
        skipped = self.scaler is not None and update.skipped
        counters.advance(global_batch_size, config.model.seq_length, skipped, planned)
        self.end_step()

        fields = self._known_fields(global_batch_size, loss_scale, skipped)
        if config.log.log_timers_to_tensorboard:
            fields["forward_backward_seconds"] = backward_ended - started
            fields["batch_generator_seconds"] = batches.waited - waited_before
        return PendingIteration(
            fields, losses, update, started, previous, numbers, self.scaler is not None
        )

    def leave_out(self) -> range:
        """Count an iteration without an update; return its samples, which `--skip-samples` has."""
        counters = self.counters
        first = counters.consumed_samples
        size = self.schedules.batch_size(first)
        counters.advance(size, self.config.model.seq_length, skipped=True)
        self.end_step()
        return range(first, first + size)

    @torch.no_grad()
    def evaluate(self, batches: Loader, num_micro_batches: int) -> tuple[float, float]:
        """Evaluate the next `num_micro_batches` micro-batches of every rank, with dropout off.

        Returns the sum of the losses of tokens, in nats, and how many tokens have one, the same on
        all ranks. Replicas that train independently evaluate the weights that each has; those
        that join and leave sum nothing with others here.
        """
        model, ranks = self.sharding.model, self.ranks
        model.eval()
        total, num_tokens = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        for _ in range(num_micro_batches):
            batch = next(batches)
            ranks.main_thread.mark()
            count = batch.loss_mask.sum(dtype=torch.float64)
            total += model(*batch.inputs()) * count
            num_tokens += count
        model.train()
        self.sharding.release()
        sum_of_losses, sum_of_tokens = ranks.sum_over_replicas(total.item(), num_tokens.item())
        # All ranks count tokens; those that are not at the end of a pipeline have no loss.
        return sum_of_losses, sum_of_tokens * ranks.num_losses / ranks.num_ranks

    def end_step(self) -> None:
        """Take the outer step of replicas that train independently, if it is due."""
        iteration = self.counters.iteration
        last = iteration == self.schedules.length.iterations
        self.ranks.replicas.after_update(iteration, last=last)

    def forward_backward(
        self, batches: Loader, global_batch_size: int, loss_scale: float
    ) -> StepLosses:
        """Add the gradients of the mean loss over a global batch, times `loss_scale`, to `.grad`.

        The mean is over micro-batches (one without any token that has a loss counts as 0), or with
        `--calculate-per-token-loss` over tokens. The returned losses are without the scale.
        """
        ranks, config = self.ranks, self.config
        num_micro_batches = self._num_micro_batches(global_batch_size)
        num_empty = torch.zeros((), dtype=torch.float64, device=ranks.device)
        samples = self._micro_batches(batches, num_micro_batches, num_empty)
        weights, weight_of_all = [1.0] * num_micro_batches, 1.0
        if config.training.calculate_per_token_loss:
            read = list(samples)
            weights, weight_of_all = shares_of_tokens([batch for _, batch in read], ranks)
            samples = iter(read)
        scales = [loss_scale / num_micro_batches * weight for weight in weights]
        scale = loss_scale / num_micro_batches * weight_of_all
        kept = (each.records(num_micro_batches, scale) for each in self.capabilities)
        records = next((each for each in kept if each is not None), None)

        self.communication.begin_step()
        losses = self.passes.forward_backward(samples, scales, self.seed_dropout, records)
        self.passes.sum_tied_gradients(self.optimizer)
        if ranks.tensor_size > 1:
            model = self.sharding.model
            sum_partial_gradients(model, self.optimizer, ranks.tensor_group, ranks.device)

        # `losses` is empty on ranks that do not hold the end of a pipeline.
        weighted = (loss * weight for loss, weight in zip(losses, weights, strict=False))
        total_loss = sum(weighted, start=torch.zeros((), device=ranks.device))
        loss, empty = ranks.sum_tensor(torch.stack((total_loss.double(), num_empty)))
        return StepLosses(
            mean=loss / (num_micro_batches * ranks.num_losses),
            empty_share=empty / (num_micro_batches * ranks.num_ranks),
            of_micro_batches=losses,
            records=records,
        )

    def seed_dropout(self, first_sample: int, *stage: int) -> None:
        """Seed dropout with the number of a micro-batch's first sample, and a pipeline's stage.

        Ranks that compute parts of the same activations draw for their parts. A resumed run, and a
        run with another number of replicas, then drop the same elements.
        """
        ranks, splits_rows = self.ranks, self.config.parallel.sequence_parallel
        rows = tuple(ranks.tensor_rank if splits_rows and each > 0 else 0 for each in stage)
        part = (ranks.context_rank, *stage, *rows)
        sample = (self.config.training.seed, first_sample)
        text = "/".join(map(str, (*sample, *(part if any(part) else ()))))
        digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
        number = int.from_bytes(digest, "little")  # mt19937 takes 32 bits
        # `torch.manual_seed` notes where it was called for every kind of device (0.3 ms).
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(number)

    def _num_micro_batches(self, global_batch_size: int) -> int:
        """Return how many micro-batches of a global batch a replica has."""
        return global_batch_size // (self.config.batch.micro_batch_size * self.ranks.num_parts)

    def _micro_batches(
        self, batches: Loader, count: int, num_empty: Tensor
    ) -> Iterator[tuple[int, Batch]]:
        """Yield this rank's next micro-batches, each after the number of its first sample.

        Adds to `num_empty` (0-d) how many of them have no token with a loss.
        """
        place = self.ranks.part * self.config.batch.micro_batch_size
        for _ in range(count):
            first_sample, batch = batches.consumed_samples + place, next(batches)
            num_empty += ~batch.loss_mask.any()
            yield first_sample, batch

    def _set_schedule(self) -> None:
        """Set the optimizer's learning rate and weight decay for the next step."""
        scheduled_samples, schedules = self.counters.scheduled_samples, self.schedules
        learning_rate = schedules.learning_rate(scheduled_samples)
        ends = schedules.ends_learning_rate or schedules.learning_rate
        weight_decay = schedules.weight_decay(scheduled_samples)
        for group in self.optimizer.param_groups:
            group["lr"] = ends(scheduled_samples) if group["at_ends"] else learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0

    def _known_fields(
        self, global_batch_size: int, loss_scale: float, skipped: bool
    ) -> dict[str, object]:
        """Fields of `Iteration` for the step just counted, without waiting for the device.

        All ranks call it: the norms of parameters and optimizer states, if the flags ask for them,
        take collectives and wait for the device.
        """
        counters, log = self.counters, self.config.log
        writes_norms = log.log_optimizer_states_to_tensorboard and is_due(
            counters.iteration, log.tensorboard_log_interval
        )
        logs_bytes = is_due(counters.iteration, log.log_interval)
        return dict(
            iteration=counters.iteration,
            train_iters=self.schedules.length.iterations,
            consumed_samples=counters.consumed_samples,
            consumed_tokens=counters.consumed_tokens,
            # Of the next iteration, as in Megatron-DeepSpeed.
            learning_rate=self.schedules.learning_rate(counters.scheduled_samples),
            global_batch_size=global_batch_size,
            seq_length=self.config.model.seq_length,
            loss_scale=loss_scale,
            params_norm=self._parameters_norm() if log.log_params_norm else None,
            skipped=skipped,
            memory=read_memory(self.ranks.device),
            communication=self.communication.take() if logs_bytes else None,
            optimizer_norms=self._optimizer_norms() if writes_norms else {},
        )

    def _optimizer_norms(self) -> dict[tuple[str, str], float]:
        size, num_stages = self.ranks.pipeline_size, self.sharding.num_stages
        return optimizer_norms(self.optimizer, size, num_stages)

    def _parameters_norm(self) -> float:
        """L2 norm of all parameters, of the optimizer's fp32 copies where it has them."""
        masters = sharded(self.optimizer).masters
        weights = [
            (parameter, local_part(masters.get(parameter, parameter).detach()))
            for parameter in self.sharding.model.parameters()
        ]
        return global_norm(weights, self.sharding).item()

    def _timer_now(self) -> float:
        """`time.perf_counter()`; with timers in the log, after the device has finished its work."""
        if self.config.log.log_timers_to_tensorboard and self.ranks.asynchronous:
            torch.accelerator.synchronize()
        return time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class OneStage:
    """Runs a step with the interface of `Pipeline`, one micro-batch after another."""

    sharding: Sharding
    main_thread: MainThread

    @property
    def roots(self) -> tuple[GPT, ...]:
        """The models that are called one by one: only the whole one."""
        return (self.sharding.model,)

    def forward_backward(
        self,
        samples: Iterator[tuple[int, Batch]],
        scales: Sequence[float | Tensor],
        seed_dropout: Callable[[int], None],
        routing: Sequence[PassRecord] | None = None,
    ) -> list[Tensor]:
        """Run all passes of a step; return the losses, unscaled, 0-d.

        `samples` yields the number of each micro-batch's first sample, and the micro-batch.
        Gradients are those of the sum of the losses, each times its scale. `routing` has a record
        for each micro-batch, if layers record anything.
        """
        losses: list[Tensor] = []
        for (first_sample, batch), scale in zip(samples, scales, strict=True):
            self.main_thread.mark()
            seed_dropout(first_sample)
            with self.sharding.micro_step(last=len(losses) == len(scales) - 1):
                record = None if routing is None else routing[len(losses)]
                loss = self.sharding.model(*batch.inputs(), routing=record)
                (loss * scale).backward()
            if record is not None:
                record.forget_tokens(self.sharding.model.part.layers)
            losses.append(loss.detach())
        return losses

    def sum_tied_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the ends of the model are on the same rank."""


def shares_of_tokens(batches: Sequence[Batch], ranks: Ranks) -> tuple[list[Tensor], Tensor]:
    """Return how many tokens of each of this rank's micro-batches have a loss, 0-d fp32 each.

    And how many tokens a micro-batch has in all. The unit is the mean of those with a loss over the
    micro-batches of all replicas; a collective.
    """
    counts = torch.stack([batch.loss_mask.sum(dtype=torch.float64) for batch in batches])
    total = ranks.sum_tensor(counts.sum()) / (ranks.num_ranks // ranks.data_parallel_size)
    mean = total / (len(batches) * ranks.data_parallel_size)
    mean = mean.clamp(min=torch.finfo(torch.float64).tiny)
    return list((counts / mean).float()), (batches[0].loss_mask.numel() / mean).float()
