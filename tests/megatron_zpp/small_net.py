"""A small model of awkward sizes, its optimizer, and checkpoints of it, for several test files."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.iteration_folders import Retention, checkpoint_folder
from megatron_zpp.checkpoint.training_state import TrainingState
from tests.ranks import ranks

ARCHITECTURE = {"hidden_size": 7, "num_layers": 2}


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 5)
        self.down = nn.Linear(5, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Sizes that no number of ranks divides, a dimension of 1, a tied weight and a buffer."""

    def __init__(self, size: int = 7, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Linear(size, size, bias=False)
        self.blocks = nn.ModuleList(Block(size) for _ in range(num_layers))
        self.head = nn.Linear(size, 1)
        self.tied = nn.Linear(size, size, bias=False)
        self.tied.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.tied(x))


def build(stage: int, seed: int, size: int = 7, num_layers: int = 2) -> tuple[nn.Module, object]:
    """Return a model sharded over the ranks there are, and an AdamW with two groups."""
    torch.manual_seed(seed)
    model = Net(size, num_layers)
    if dist.is_initialized() and dist.get_world_size() > 1:
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        if stage == 0:
            mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replica", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=stage == 3)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        for module in (*model.blocks, model):
            module.set_reshard_after_backward(stage == 3, recurse=False)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.count += 1


def contents(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict:
    """Return everything that must survive, whole and copied."""
    state = model.state_dict()
    tensors = {f"model.{name}": whole(value) for name, value in state.items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = whole(value)
    return tensors


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def equal(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def state_at(iteration: int, **other: object) -> TrainingState:
    facts = {
        "iteration": iteration,
        "consumed_samples": 4 * iteration,
        "consumed_tokens": 28 * iteration,
        "seed": 1234,
        "world_size": 4,
        "stage": 3,
        "tokenizer": "abc",
        "architecture": ARCHITECTURE,
        "loss_scaler": {"scale": 2.0**16, "hysteresis": 1},
        "configuration": {"lr": 0.1 + 0.2},
    }
    return TrainingState(**(facts | other))


def save_in(folder: Path, *arguments: object, **options: object) -> Path:
    """Save a checkpoint in a folder that nobody else uses."""
    return checkpoint.save(checkpoint_folder(folder), *arguments, **options)


@ranks(4)
def save_on_four(folder: Path, stage: int, iterations: tuple[int, ...], keep: int | None) -> None:
    model, optimizer = build(stage, seed=1)
    for iteration in iterations:
        train(model, optimizer, 2)
        state = state_at(iteration, stage=stage)
        save_in(folder, model, optimizer, state, keep=Retention(newest=keep))
        expected = contents(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(expected, folder / f"expected_{iteration}.pt")


def load_here(folder: Path, stage: int, iteration: int) -> None:
    model, optimizer = build(stage, seed=2)
    train(model, optimizer, 1 if stage else 0)  # into an optimizer that has state, or has none
    state = checkpoint.load(folder, model, optimizer, architecture=ARCHITECTURE, tokenizer="abc")
    assert state.iteration == iteration
    expected = torch.load(folder / f"expected_{iteration}.pt")
    assert equal(contents(model, optimizer), expected)
    train(model, optimizer, 1)  # what was loaded is what trains on
    assert not equal(contents(model, optimizer), expected)
    steps = {whole(s["step"]).item() for s in optimizer.state.values()}
    assert steps == {expected["optimizer.head.weight.step"].item() + 1}


@ranks(2)
def load_on_two(folder: Path, stage: int, iteration: int) -> None:
    load_here(folder, stage, iteration)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "iter_" in path.name)
