"""Random legal calls of engines whose experts are split: losses and weights equal one process's.

A sequence draws a model, a ZeRO stage, nodes, ranks that split experts, a type, and calls. In fp32
sums in another order differ by 1e-7 of themselves, and an Adam step, of 1e-2, by that times the
largest ratio of a gradient's sum of magnitudes to itself. In bf16 only losses are compared: numbers
have 8 bits, and the reference computes in fp32. Set RANDOM_SEQUENCES to run more sequences.
"""

import copy
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import ranks
from tests.zeropp.deepspeed.engine_sequence import EngineSequence
from tests.zeropp.deepspeed.expert_parallel.mixtures import (
    CLIP,
    DECAY,
    EPS,
    LR,
    engine_of,
    loss_of,
    mixture,
    parts_of,
    tokens_of,
)
from zeropp.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)

SEQUENCES = int(os.environ.get("RANDOM_SEQUENCES", "4"))
LENGTH = 7
CALLS = ("step", "step", "evaluate", "save", "load", "read", "write", "discard", "copy", "new")


class Sequence(EngineSequence):
    """An engine, one process's model and optimizer, and the calls so far."""

    def __init__(self, seed: int, dtype: str, folder: Path) -> None:
        self.draw, self.dtype, self.folder = random.Random(seed), dtype, folder
        self.world = dist.get_world_size()
        self.family = self.draw.choice(["mixtral", "qwen3_moe"])
        self.num_experts = self.draw.choice([self.world, 2 * self.world])
        self.micro_batches = self.draw.choice([1, 2])
        self.steps, self.calls, self.saved = 10 * seed, [], None
        self.reference = mixture(self.family, self.num_experts)
        self.optimizer = self.adamw(self.reference)
        self.new()

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=DECAY)

    def new(self) -> None:
        """Another engine with the same weights, at another stage and with other ranks."""
        model = mixture(self.family, self.num_experts)
        model.load_state_dict(self.reference.state_dict())
        settings = {
            "stage": self.draw.randint(0, 3),
            "zeropp": {"ranks_per_node": self.draw.choice([1, self.world])},
            "micro_batches": self.micro_batches,
        }
        if settings["stage"] == 3 and self.draw.random() < 0.5:
            settings["zero"] = {"zero_hpz_partition_size": settings["zeropp"]["ranks_per_node"]}
        if self.dtype != "fp32":
            settings[self.dtype] = {"enabled": True}
        size = self.draw.choice([each for each in (2, 4) if each <= self.world])
        self.calls.append(f"{size} {settings}")
        self.engine = engine_of(model, size, **settings)
        self.optimizer = self.adamw(self.reference)

    def run(self) -> None:
        for _ in range(LENGTH):
            name = self.draw.choice(CALLS)
            self.calls.append(name)
            getattr(self, name)()
        self.calls.append("step")
        self.step()
        self.compare()

    def step(self) -> None:
        self.steps += 1
        parts = parts_of(self.steps, self.micro_batches, self.world)
        batches = [each for rank in parts for each in rank]
        wanted = [loss_of(self.reference, tokens) for tokens in batches]
        self.learn(wanted, CLIP)
        first = dist.get_rank() * self.micro_batches
        for index, tokens in enumerate(parts[dist.get_rank()]):
            loss = loss_of(self.engine, tokens)
            self.close(loss.float(), wanted[first + index])
            self.engine.backward(loss)
            self.engine.step()

    def evaluate(self) -> None:
        tokens = tokens_of(self.draw.randint(0, 9))[: self.draw.randint(1, 3)]
        self.engine.eval()
        self.reference.eval()
        with torch.no_grad():
            self.close(loss_of(self.engine, tokens).float(), loss_of(self.reference, tokens))
        self.engine.train()
        self.reference.train()

    def read(self) -> None:
        """Weights and moments of a random layer's experts."""
        self.compare()
        own, other = self.experts()
        state = safe_get_full_optimizer_state(own, "exp_avg")
        wanted = self.optimizer.state.get(other, {}).get("exp_avg")
        assert (state is None) == (wanted is None)
        if state is not None and self.dtype == "fp32":
            torch.testing.assert_close(state, wanted, rtol=0, atol=1e-5)

    def write(self) -> None:
        own, other = self.experts()
        value = safe_get_full_fp32_param(own) * 0.5
        safe_set_full_fp32_param(own, value)
        other.data.copy_(value)

    def discard(self) -> None:
        """A micro-batch whose gradients are thrown away."""
        tokens = parts_of(self.steps, self.micro_batches, self.world)[dist.get_rank()][0]
        self.engine.backward(loss_of(self.engine, tokens))
        self.engine.zero_grad()

    def copy(self) -> None:
        plain = copy.deepcopy(self.engine.module)
        tokens = tokens_of(3)[:2]
        with torch.no_grad():
            self.close(loss_of(plain, tokens), loss_of(self.reference, tokens))

    def experts(self) -> tuple[nn.Parameter, nn.Parameter]:
        layer = self.draw.randint(0, 1)
        name = self.draw.choice(["gate_up_proj", "down_proj"])
        path = f"model.layers.{layer}.mlp.experts.{name}"
        return self.engine.module.get_parameter(path), self.reference.get_parameter(path)

    def compare(self) -> None:
        state = self.engine.module_state_dict()
        for name, weight in self.reference.state_dict().items():
            if self.dtype == "fp32":
                torch.testing.assert_close(state[name], weight, rtol=0, atol=2e-5, msg=name)

    def close(self, loss: torch.Tensor, wanted: torch.Tensor) -> None:
        tolerance = 1e-5 if self.dtype == "fp32" else 1e-2
        torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=tolerance, atol=0)


def check(seed: int, dtype: str, folder: Path) -> None:
    sequence = Sequence(seed, dtype, folder)
    try:
        sequence.run()
    except BaseException:
        print(f"seed {seed}, {dtype}:", *sequence.calls, sep="\n  ")
        raise


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(SEQUENCES))
@ranks(2, timeout=120)
def test_calls_on_two_ranks(seed: int, dtype: str, tmp_path: Path) -> None:
    check(seed, dtype, tmp_path)


@pytest.mark.parametrize("seed", range(SEQUENCES // 2))
@ranks(4, timeout=180)
def test_calls_on_four_ranks(seed: int, tmp_path: Path) -> None:
    check(100 + seed, "fp32", tmp_path)
