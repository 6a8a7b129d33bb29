"""Random legal calls of engines, reads and writes of parameters among them, against one process.

A sequence draws a ZeRO stage, a type and calls. At stage 3 parameters are used as programs do that
ask whether they are sharded, by `GatheredParameters`. In fp32 sums in another order differ by 1e-7
of themselves, and an Adam step, of 1e-2, by that times the largest ratio of a gradient's sum of
magnitudes to itself. In bf16 only losses are compared: numbers have 8 bits, and the reference
computes in fp32. Set RANDOM_SEQUENCES to run more sequences.
"""

import contextlib
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
from tests.zeropp.deepspeed.small_engine import CLIP, LR, SAMPLES, adamw, engine_of
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp.deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from zeropp.deepspeed.zero import GatheredParameters

SEQUENCES = int(os.environ.get("RANDOM_SEQUENCES", "4"))
LENGTH = 9
CALLS = (
    *("step", "step", "average", "write", "write", "write_back", "read", "evaluate", "alone"),
    *("save", "load", "load_state", "set_master", "discard", "freeze", "new"),
)
ZERO = (
    {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3},
    {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    {"stage": 3, "zero_hpz_partition_size": 2},
)  # fmt: skip


class Sequence(EngineSequence):
    """An engine, one process's model and optimizer, averages of both, and the calls so far."""

    def __init__(self, seed: int, dtype: str, folder: Path) -> None:
        self.draw, self.dtype, self.folder = random.Random(seed), dtype, folder
        self.micro_batches = self.draw.choice([1, 2])
        self.steps, self.calls, self.saved = 10 * seed, [], None
        self.reference = small_model()
        self.new()

    def new(self) -> None:
        """Another engine with the same weights, at another stage."""
        model = small_model()
        model.load_state_dict(self.reference.state_dict())
        settings = {
            "micro_batches": self.micro_batches,
            "zero_optimization": self.draw.choice(ZERO),
        }
        if self.dtype != "fp32":
            settings[self.dtype] = {"enabled": True}
        self.calls.append(str(settings))
        self.engine = engine_of(model, **settings)
        self.reference.requires_grad_(True)
        self.optimizer = adamw(self.reference.parameters())
        self.saved = None
        self.begin_averages()

    def begin_averages(self) -> None:
        self.averages = [
            [each.detach().clone().float() for each in model.parameters()]
            for model in (small_model(), small_model())
        ]

    def run(self) -> None:
        for _ in range(LENGTH):
            name = self.draw.choice(CALLS)
            self.calls.append(name)
            getattr(self, name)()
            self.require_plain()
        self.calls.append("step")
        self.step()
        self.read()

    def require_plain(self) -> None:
        if self.engine.sharding.stage < 3:
            assert all(type(each) is nn.Parameter for each in self.engine.module.parameters())

    def step(self) -> None:
        self.steps += 1
        own = tokens_of(self.steps, SAMPLES).chunk(2)
        parts = [part for rank in own for part in rank.chunk(self.micro_batches)]
        wanted = [loss_of(self.reference, tokens) for tokens in parts]
        self.learn(wanted, CLIP)
        first = dist.get_rank() * self.micro_batches
        for index in range(first, first + self.micro_batches):
            loss = loss_of(self.engine, parts[index])
            self.close(loss, wanted[index])
            self.engine.backward(loss)
            self.engine.step()

    def average(self) -> None:
        """A moving average of both models, and what it is of in the end."""
        own, wanted = self.averages
        for average, name in zip(own, self.names(), strict=True):
            with self.gathered(name) as weight:
                average.lerp_(weight.detach().float(), 0.5)
        for average, weight in zip(wanted, self.reference.parameters(), strict=True):
            average.lerp_(weight.detach(), 0.5)
        for average, other in zip(own, wanted, strict=True):
            self.near(average, other)

    def write(self) -> None:
        """Some rows of a parameter, in one of the ways in which programs write."""
        name = self.draw.choice(self.names())
        way, factor = self.draw.choice(["data", "copy", "lerp", "assign"]), self.draw.random() + 0.5
        rows = slice(self.draw.randint(0, 3), self.draw.randint(4, 9))
        with self.gathered(name, modifier_rank=1) as weight, torch.no_grad():
            value = weight.detach().clone()
            value[rows] = (value[rows].float() * factor + 0.01).to(value.dtype)
            if way == "data":
                weight.data.copy_(value)
            elif way == "copy":
                weight.copy_(value)
            elif way == "lerp":
                weight.lerp_(value, 1.0)
            else:
                weight.data = value
        target = self.reference.get_parameter(name).data
        target[rows] = target[rows] * factor + 0.01

    def write_back(self) -> None:
        """The averages, and then what was there: masters change by rounding at most."""
        if self.engine.sharding.stage == 3:
            return
        weights = [*self.engine.module.parameters()]
        kept = [each.detach().clone() for each in weights]
        before = [safe_get_full_fp32_param(each) for each in weights]
        for values in (self.averages[0], kept):
            for weight, value in zip(weights, values, strict=True):
                weight.data.copy_(value)
        for weight, value in zip(weights, before, strict=True):
            if weight.requires_grad:
                assert torch.equal(safe_get_full_fp32_param(weight), value)

    def read(self) -> None:
        for name, wanted in self.reference.named_parameters():
            with self.gathered(name) as weight:
                self.near(weight.detach().as_subclass(torch.Tensor).float(), wanted.detach())
            if wanted.requires_grad:
                self.near(safe_get_full_fp32_param(self.weight(name)), wanted.detach())

    def evaluate(self) -> None:
        self.engine.eval()
        with torch.no_grad():
            tokens = tokens_of(self.draw.randint(0, 9))
            self.close(loss_of(self.engine, tokens), loss_of(self.reference, tokens))
        self.engine.train()

    def alone(self) -> None:
        """What one rank does alone where all have whole weights."""
        if self.engine.sharding.stage < 3 and dist.get_rank() == self.draw.randint(0, 1):
            self.evaluate()
            state = self.engine.module.state_dict()
            plain = copy.deepcopy(self.engine.module)
            for name, weight in self.reference.named_parameters():
                self.near(state[name].float(), weight.detach())
                assert torch.equal(state[name], plain.get_parameter(name))
        else:
            self.draw.randint(0, 9)
        self.draw.seed(len(self.calls) + self.steps)

    def load_state(self) -> None:
        state = {name: value * 0.9 for name, value in self.reference.state_dict().items()}
        self.reference.load_state_dict(state)
        self.engine.module.load_state_dict(state)
        for name, weight in self.engine.module.named_parameters():
            if weight.requires_grad:
                assert torch.equal(safe_get_full_fp32_param(weight), state[name])

    def set_master(self) -> None:
        name = self.draw.choice(
            [n for n, p in self.reference.named_parameters() if p.requires_grad]
        )
        value = self.reference.get_parameter(name).detach() * 0.8
        safe_set_full_fp32_param(self.weight(name), value)
        self.reference.get_parameter(name).data.copy_(value)

    def discard(self) -> None:
        """A micro-batch whose gradients are thrown away."""
        self.engine.backward(loss_of(self.engine, tokens_of(1)))
        self.engine.zero_grad()

    def freeze(self) -> None:
        """A block, or train it again; offload refuses what was frozen at first."""
        block = self.draw.randint(0, 1)
        trains = self.draw.random() < 0.5
        for model in (self.engine.module, self.reference):
            model.blocks[block].requires_grad_(trains)

    def names(self) -> list[str]:
        return [name for name, _ in self.reference.named_parameters()]

    def weight(self, name: str) -> nn.Parameter:
        return self.engine.module.get_parameter(name)

    @contextlib.contextmanager
    def gathered(self, name: str, modifier_rank: int | None = None):
        weight = self.weight(name)
        if hasattr(weight, "ds_id"):
            with GatheredParameters([weight], modifier_rank=modifier_rank):
                yield weight
        else:
            yield weight

    def near(self, own: torch.Tensor, wanted: torch.Tensor) -> None:
        if self.dtype == "fp32":
            torch.testing.assert_close(own, wanted, rtol=0, atol=LR * 1e-2)

    def close(self, loss: torch.Tensor, wanted: torch.Tensor) -> None:
        tolerance = 1e-4 if self.dtype == "fp32" else 3e-2
        torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(SEQUENCES))
@ranks(2, timeout=120)
def test_calls_on_two_ranks(seed: int, dtype: str, tmp_path: Path) -> None:
    sequence = Sequence(seed, dtype, tmp_path)
    try:
        sequence.run()
    except BaseException:
        print(f"seed {seed}, {dtype}:", *sequence.calls, sep="\n  ")
        raise
