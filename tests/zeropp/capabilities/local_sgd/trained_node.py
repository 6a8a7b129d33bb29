"""A node of `zeropp.local_steps` for tests: a small model, its optimizer, how they are trained."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zeropp
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp.capabilities.muon.matrix_step import MuonOptions

STEPS = 8
# Of 8 steps: what a sum of some hundred terms of fp32, 1e-7 each, changes in a gradient of 1e-2
# becomes in AdamW, with this epsilon, 1e-7 of a step of 1e-2.
AdamW = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-2)
CLOSE = 1e-6


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **AdamW)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return zeropp.FusedAdam(model.parameters(), **AdamW)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    options = MuonOptions(dtype=torch.float32)
    return zeropp.optim.Muon(model, lr=1e-2, adam_eps=1e-2, options=options)


class Node:
    """This rank's part of a node's model, optimizer and local steps, and how to train it."""

    def __init__(
        self,
        kind: str,
        build: Callable,
        zeropp_section: dict,
        mesh: DeviceMesh | None,
        prepare: Callable = lambda *_: None,
    ) -> None:
        self.model, self.mesh, self.prepare = model_with_buffers(), mesh, prepare
        self.micro_step = nullcontext
        inner = mesh["shard"] if mesh else None
        if kind.startswith("stage"):
            config = zeropp.ZeroConfig.from_json({"zero_optimization": {"stage": int(kind[-1])}})
            self.sharding = zeropp.shard(self.model, inner, config)
            self.micro_step = lambda: self.sharding.micro_step(last=True)
        elif kind != "alone":
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=inner, reshard_after_forward=kind != "kept")
        if kind == "attached":
            zero = {"stage": 3, "zero_hpz_partition_size": 2}
            zeropp.attach(self.model, {"zero_optimization": zero, "zeropp": {"ranks_per_node": 2}})
        self.optimizer = build(self.model)
        prepare(self.model, self.optimizer, 1)
        self.steps = zeropp.local_steps(
            self.model, self.optimizer, {"zeropp": zeropp_section}, mesh
        )

    @property
    def number(self) -> int:
        return self.steps.local.group.node

    def train(self, first: int, last: int) -> None:
        """Take the steps from the first to the last one."""
        nodes, place = self.steps.local.group.size, self.mesh.get_local_rank(1) if self.mesh else 0
        for step in range(first, last + 1):
            self.prepare(self.model, self.optimizer, step)
            own = tokens_of(step).chunk(nodes)[self.number]
            own = own.chunk(self.mesh.size(1))[place] if self.mesh else own
            count_tokens(self.model, own)
            with self.micro_step():
                loss_of(self.model, own).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """This node's whole weights."""
        return {
            name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
            for name, each in self.model.named_parameters()
        }

    def state(self) -> dict[str, torch.Tensor]:
        """This node's whole weights, and this rank's buffers."""
        return self.weights() | {name: each.clone() for name, each in self.model.named_buffers()}

    def save(self) -> dict:
        """What a checkpoint holds of this rank."""
        return {
            "model": {name: each.clone() for name, each in self.model.state_dict().items()},
            "optimizer": _cloned(self.optimizer.state_dict()),
            "steps": _cloned(self.steps.state_dict()),
        }

    def load(self, saved: dict) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.steps.load_state_dict(saved["steps"])


def model_with_buffers() -> nn.Module:
    """Return a model with statistics of the tokens that it has seen."""
    model = small_model()
    model.register_buffer("usual", torch.zeros(6))
    model.register_buffer("passes", torch.zeros((), dtype=torch.int64))
    return model


def count_tokens(model: nn.Module, tokens: torch.Tensor) -> None:
    """Update the statistics by tokens [samples, 6]."""
    model.usual.mul_(0.5).add_(tokens.float().mean(0))
    model.passes += 1


def _cloned(state: object) -> object:
    if isinstance(state, dict):
        return {key: _cloned(each) for key, each in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state
