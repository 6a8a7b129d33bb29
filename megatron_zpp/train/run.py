"""A training run: its parts, the checkpoints that it saves, and what replicas that join it get."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.iteration_folders import Retention
from megatron_zpp.checkpoint.training_state import TrainingState, architecture
from megatron_zpp.monitor.console import Console
from megatron_zpp.monitor.expected_step import StepWatch
from megatron_zpp.monitor.metrics import Metrics
from megatron_zpp.monitor.writers import open_writers
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.recipe.capability import states_of
from megatron_zpp.settings.config import Config
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.train.inputs import Batches, data_bytes
from megatron_zpp.train.stop import Stopping
from megatron_zpp.train.trainer import STATE_COUNTERS, Trainer
from zeropp.checkpoint import AsyncWriter, CheckpointFolder


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run, built by `build_run`; training changes only the state of its members."""

    console: Console
    tokenizer: Tokenizer
    batches: Batches
    trainer: Trainer
    metrics: Metrics
    stopping: Stopping
    checkpoints: CheckpointFolder | None  # that `--save` names
    writer: AsyncWriter | None  # with --async-save
    step_watch: StepWatch | None  # with --plan-file

    @property
    def config(self) -> Config:
        return self.trainer.config

    @property
    def ranks(self) -> Ranks:
        return self.trainer.ranks

    def state(self) -> dict[str, Any]:
        """Return what determines the next steps beside weights, and the losses up to now.

        A replica that joins `load`s what another one returns.
        """
        scaler = self.trainer.scaler
        return {
            "counters": self.trainer.counters.state(),
            "scaler": scaler.state_dict() if scaler else {},
            "schedules": self.trainer.schedules,
            "history": self.metrics.history.state_dict(),
            "earlier_sizes": self.batches.earlier_sizes,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where another replica is."""
        self.trainer.counters.load(state["counters"])
        self.trainer.schedules = state["schedules"]
        self.metrics.history.load_state_dict(state["history"])
        self.batches.go_behind(state["earlier_sizes"])
        if self.trainer.scaler:
            self.trainer.scaler.load_state_dict(state["scaler"])

    def open_writers(self) -> None:
        """Let the first rank write curves, which go on behind the run's counters."""
        counters, ranks = self.trainer.counters, self.ranks
        sections = self.config.to_dict().values()
        self.metrics.writers = open_writers(
            self.config.log,
            rank=ranks.global_rank,
            world_size=ranks.num_ranks,
            resumed_at=counters if counters.iteration else None,
            settings={name: value for each in sections for name, value in each.items()},
        )

    def save(self) -> None:
        """Save a checkpoint in the folder that `--save` names, if any; all ranks call it.

        With `--async-save` it is complete after `finish_saving`, or when the next one is saved.
        """
        trainer = self.trainer
        options, counters = self.config.checkpoint, trainer.counters
        if self.checkpoints is None:
            return
        self.ranks.main_thread.mark()
        self.metrics.flush()
        trainer.sharding.require_same_order()
        counters.saved_iteration = counters.iteration
        path = checkpoint.save(
            self.checkpoints,
            trainer.sharding.model,
            trainer.optimizer,
            self._training_state(),
            keep=self._keep(),
            save_optimizer=not options.no_save_optim,
            writer=self.writer,
            others={**self.ranks.replicas.state(), **states_of(trainer.capabilities)},
        )
        if self.writer is None:
            self.console.line(f"saved checkpoint {path}")

    def _keep(self) -> Retention:
        """Return which checkpoints stay."""
        options = self.config.checkpoint
        newest, interval = options.keep_checkpoints, options.save_retain_interval
        if (newest, interval) != (None, None):
            newest = self.ranks.replicas.kept(newest, beside=self.writer is not None)
        return Retention(newest=newest, interval=interval)

    def next_save(self, iteration: int) -> int | None:
        """When the first checkpoint after `iteration` is due; None without `--save`."""
        options, last = self.config.checkpoint, self.trainer.schedules.length.iterations
        if options.save is None:
            return None
        interval = options.save_interval or last
        return min(last, (iteration // interval + 1) * interval)

    def log_saving(self) -> None:
        """Log a checkpoint that has become complete beside training."""
        if self.writer is not None:
            self.writer.log_progress()

    def finish_saving(self) -> None:
        """Save if it has not been done yet, and wait until that is complete; all ranks call it.

        Raises InputError if it failed.
        """
        if self.trainer.counters.iteration != self.trainer.counters.saved_iteration:
            self.save()
        if self.writer is not None:
            self.writer.finish()

    def _training_state(self) -> TrainingState:
        trainer, replicas = self.trainer, self.ranks.replicas
        config, counters = self.config, trainer.counters
        return TrainingState(
            **{name: getattr(counters, name) for name in STATE_COUNTERS},
            seed=config.training.seed,
            world_size=self.ranks.num_ranks,
            stage=trainer.sharding.stage,
            num_worlds=replicas.count,
            node=replicas.index,
            launch=replicas.launch,
            sample_sizes=[*self.batches.earlier_sizes, config.sample_sizes],
            data_bytes=data_bytes(config.data),
            tokenizer=self.tokenizer.fingerprint,
            loss_scaler=trainer.scaler.state_dict() if trainer.scaler else {},
            schedule={"scheduled_samples": counters.scheduled_samples, **trainer.schedules.state()},
            history=self.metrics.history.state_dict(),
            architecture=architecture(config.model, self.tokenizer.vocab_size),
            configuration=config.to_dict(),
        )
