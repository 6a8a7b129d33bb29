"""Lightning's Trainer with FSDP2 on CPUs, with and without ZeRO++."""

import os

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.ranks import ranks
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp.integrations.lightning import ZeroppCallback

PLAIN = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 1}}
ZERO = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
STEPS = 5


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


class Launched(LightningEnvironment):
    """Ranks that run already."""

    creates_processes_externally = True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()


def losses(folder: str, accumulation: int, *callbacks: ZeroppCallback) -> list[float]:
    """The losses of this rank."""
    samples = torch.cat([tokens_of(number) for number in range(2 * STEPS * accumulation)])
    module = Module()
    Trainer(
        accelerator="cpu", devices=dist.get_world_size(), max_steps=STEPS, logger=False,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        plugins=[Launched()], default_root_dir=folder, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks],
        accumulate_grad_batches=accumulation,
    ).fit(module, DataLoader(samples, batch_size=8))  # fmt: skip
    return module.losses


@pytest.mark.parametrize("accumulation", [1, 2])
@ranks(2, timeout=120)
def test_unquantized_it_learns_the_same_and_with_zeropp_it_sends_less(accumulation, tmp_path):
    os.chdir(tmp_path)
    expected = losses(tmp_path, accumulation)
    plain, quantized = ZeroppCallback(PLAIN), ZeroppCallback(PLAIN | {"zero_optimization": ZERO})
    assert losses(tmp_path, accumulation, plain) == pytest.approx(expected, rel=1e-6)
    assert losses(tmp_path, accumulation, quantized)[0] == pytest.approx(expected[0], rel=5e-3)
    sent = [sum(each.attached.traffic.sent.values()) for each in (quantized, plain)]
    assert 2 * sent[0] < sent[1]


@ranks(2, ranks_per_node=1, timeout=120)
def test_a_node_has_the_trainers_devices_unless_the_json_says_otherwise(tmp_path):
    os.chdir(tmp_path)
    for config, nodes in ((PLAIN, "2 of 1 ranks"), ({"zero_optimization": ZERO}, "1 of 2 ranks")):
        callback = ZeroppCallback(config)
        losses(tmp_path, 1, callback)
        assert dict(callback.attached.describe(1))["nodes"].startswith(nodes)
