"""A run of Lightning's Trainer with FSDP2, on the ranks of a test.

Lightning takes seconds to import, and only the ranks do.
"""

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from benchmarks.convergence.lightning_llama import LaunchedRanks
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp.integrations.lightning import ZeroppCallback

STEPS = 3


class Module(LightningModule):
    """A small model that its owner shards."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses = small_model(), []

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def losses(folder: str, accumulation: int, *callbacks: ZeroppCallback) -> list[float]:
    """The losses of this rank."""
    samples = torch.cat([tokens_of(number) for number in range(2 * STEPS * accumulation)])
    module = Module()
    Trainer(
        accelerator="cpu", devices=dist.get_world_size(), max_steps=STEPS, logger=False,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        plugins=[LaunchedRanks()], default_root_dir=folder, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks],
        accumulate_grad_batches=accumulation,
    ).fit(module, DataLoader(samples, batch_size=8))  # fmt: skip
    return module.losses
