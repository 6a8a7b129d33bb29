"""The parts of a training run, and the counters of its progress."""

from dataclasses import dataclass, field

import torch

from megatron_zpp.monitor.communication import CommunicationMeter
from megatron_zpp.monitor.console import Console
from megatron_zpp.monitor.expected_step import StepWatch
from megatron_zpp.monitor.loss_watch import LossWatch
from megatron_zpp.monitor.metrics import Metrics
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import Config
from megatron_zpp.settings.schedule import Schedules
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.train.stop import Stopping
from zeropp import LossScaler, Sharding
from zeropp.checkpoint.async_save import AsyncWriter
from zeropp.checkpoint.folder_lock import FolderLock


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

    def advance(self, num_samples: int, seq_length: int, skipped: bool) -> None:
        """Count one iteration on `num_samples` samples of `seq_length` tokens."""
        self.iteration += 1
        self.consumed_samples += num_samples
        self.consumed_tokens += num_samples * seq_length
        if skipped:
            self.skipped_iterations += 1
        else:
            self.scheduled_samples += num_samples


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run, built by `build_run`; training changes only the state of its members."""

    config: Config
    ranks: Ranks
    console: Console
    tokenizer: Tokenizer
    datasets: tuple  # training, validation, test; None for a split without data
    sharding: Sharding
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    schedules: Schedules
    metrics: Metrics
    stopping: Stopping
    counters: Counters
    communication: CommunicationMeter
    async_writer: AsyncWriter | None  # with --async-save
    save_lock: FolderLock | None  # of the folder that --save names
    loss_watch: LossWatch = field(default_factory=LossWatch)
    step_watch: StepWatch | None = None  # with --plan-file


def is_due(iteration: int, interval: int | None) -> bool:
    """Whether to do after `iteration` what is done every `interval` iterations; None: never."""
    return interval is not None and iteration % interval == 0
