"""A Llama under Lightning's Trainer, on ranks that run already."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.shared.training_setup import mean_of_ranks
from zeropp import Attached
from zeropp.integrations.lightning import ZeroppCallback


class LlamaModule(LightningModule):
    """The Llama, sharded by its owner."""

    def __init__(self, model: nn.Module, shard: Callable[[nn.Module, Any], None], lr: float):
        super().__init__()
        self.model, self.shard, self.lr = model, shard, lr
        self.losses: list[float] = []  # means of all ranks

    def configure_model(self) -> None:
        """Shard it."""
        self.shard(self.model, self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(mean_of_ranks(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class LaunchedRanks(LightningEnvironment):
    """Ranks that run already."""

    creates_processes_externally = True

    def teardown(self) -> None:
        """Leave the environment as it is: the ranks train again."""

    def world_size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size()

    def global_rank(self) -> int:
        """This rank's number."""
        return dist.get_rank()

    def local_rank(self) -> int:
        """This rank's number on this machine."""
        return dist.get_rank()


def train(
    module: LlamaModule, tokens: torch.Tensor, config: dict | None, folder: Path
) -> Attached | None:
    """Train on `tokens` (steps, ranks, samples, length); return what was attached."""
    ranks = dist.get_world_size()
    callbacks = [] if config is None else [ZeroppCallback(config)]
    Trainer(
        accelerator="cpu", devices=ranks, max_steps=len(tokens), logger=False,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        plugins=[LaunchedRanks()], default_root_dir=str(folder), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        use_distributed_sampler=False,
    ).fit(module, DataLoader(tokens[:, dist.get_rank()], batch_size=None))  # fmt: skip
    return callbacks[0].attached if callbacks else None
