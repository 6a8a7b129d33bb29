"""A training run: everything it is made of, and how far it is."""

from dataclasses import dataclass

import torch

from megatron_zpp.monitor.communication import Account
from megatron_zpp.monitor.console import Console
from megatron_zpp.monitor.metrics import Metrics
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import Config
from megatron_zpp.settings.schedule import Schedules
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.train.stop import Stopping
from zeropp import LossScaler, Sharding


@dataclass(kw_only=True)
class Counters:
    """How far a run is; a checkpoint holds them, so that it goes on to the last digit.

    `scheduled_samples` leaves out those of skipped updates, as Megatron's schedule does.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    scheduled_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    saved_iteration: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What does not change while training; `assemble` makes it, `counters` and `account` move."""

    config: Config
    ranks: Ranks
    console: Console
    tokenizer: Tokenizer
    datasets: tuple  # training, validation, test; None where there is none
    sharding: Sharding
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    schedules: Schedules
    metrics: Metrics
    stopping: Stopping
    counters: Counters
    account: Account
