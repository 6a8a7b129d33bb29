"""Random legal calls of engines, reads and writes of parameters among them, against one process.

A sequence has a model and a type, and takes one ZeRO setting after another, with random calls. At
stage 3 parameters are used as by programs that ask whether they are sharded. In fp32 sums in other
orders differ by 1e-7 of themselves, and an Adam step, of 1e-2, by that times the largest ratio of a
gradient's sum of magnitudes to itself. In 16 bit only losses are compared: numbers have 8 or 11
bits, and the reference computes in fp32. Set RANDOM_SEQUENCES to run more sequences.
"""

import contextlib
import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.ranks import ranks
from tests.zeropp.deepspeed.families import FAMILIES
from tests.zeropp.deepspeed.small_engine import CLIP, LR, SAMPLES, engine_of
from tests.zeropp.prescribed_gradients import ALL_THREE
from zeropp.deepspeed import utils
from zeropp.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zeropp.deepspeed.zero import GatheredParameters

SEQUENCES = int(os.environ.get("RANDOM_SEQUENCES", "2"))  # two have all settings of each model
ENGINES, LENGTH, STATES = 4, 4, ("exp_avg", "exp_avg_sq")
ADAMW = {"lr": LR, "eps": 1e-4, "weight_decay": 0.01}
CALLS = (
    *("step", "step", "step", "average", "write", "write", "write_back", "read", "evaluate"),
    *("alone", "copy", "save", "save", "load", "load_state", "set_values", "discard", "freeze"),
)
HOST = {"offload_optimizer": {"device": "cpu"}}
ZERO = (
    *({"stage": stage} for stage in range(4)), {"stage": 1} | HOST, {"stage": 2} | HOST,
    {"stage": 3, "offload_param": {"device": "cpu"}} | HOST,
    {"stage": 3, "zero_hpz_partition_size": 2},
)  # fmt: skip
FORMATS = {
    "fp32": {}, "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}  # fmt: skip
CASES = [(family, "fp32") for family in FAMILIES] + [
    ("small", "bf16"), ("named", "bf16"), ("small", "fp16"), ("mixtral", "bf16")
]  # fmt: skip


class Sequence:
    """An engine, one process's model and optimizer, averages of both, and the calls so far."""

    def __init__(self, seed: int, family: str, dtype: str, folder: Path) -> None:
        self.draw = random.Random(f"{seed} {family} {dtype}")
        self.dtype, self.folder = dtype, folder
        self.family, self.world = FAMILIES[family], dist.get_world_size()
        self.micro_batches = self.draw.choice([1, 2])
        self.steps, self.calls, self.saved = 10 * seed, [], None
        quantizes = dtype == "bf16" and not self.family.has_experts
        settings = [*ZERO, ALL_THREE] if quantizes else [*ZERO]
        first = ENGINES * seed + list(FAMILIES).index(family)
        self.settings = [settings[(first + each) % len(settings)] for each in range(ENGINES)]
        self.reference = self.family.build()

    def begin(self, zero: dict) -> None:
        """Another engine with the same weights, which loads what the one before it has saved."""
        model = self.family.build()
        model.load_state_dict(self.reference.state_dict())
        per_node = self.draw.choice([1, self.world])
        if "zero_hpz_partition_size" in zero:
            zero = zero | {"zero_hpz_partition_size": per_node}
        size = self.draw.choice([2, self.world]) if self.family.has_experts else 1
        self.calls.append(f"begin {size} {zero} {per_node=} {self.micro_batches=}")
        self.engine = engine_of(
            model,
            micro_batches=self.micro_batches,
            zero_optimization=zero,
            zeropp={"ranks_per_node": per_node},
            expert_parallel={"enabled": size > 1, "autoep_size": size},
            optimizer={"type": "AdamW", "params": ADAMW | {"torch_adam": True}},
            **FORMATS[self.dtype],
        )
        self.reference.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.reference.parameters(), fused=True, **ADAMW)
        self.averages = [
            [each.detach().clone().float() for each in self.family.build().parameters()]
            for _ in range(2)
        ]

    def run(self) -> None:
        for zero in self.settings:
            self.begin(zero)
            for name in (*self.draw.choices(CALLS, k=LENGTH), "step", "read"):
                self.calls.append(name)
                getattr(self, name)()
                if zero["stage"] < 3 and not self.family.has_experts:
                    weights = self.engine.module.parameters()
                    assert all(type(each) is nn.Parameter for each in weights)

    def parts_of(self, step: int) -> list[torch.Tensor]:
        """The data of a step's micro-batches, rank by rank."""
        of_ranks = self.family.inputs(step, SAMPLES).chunk(self.world)
        return [part for rank in of_ranks for part in rank.chunk(self.micro_batches)]

    def step(self) -> None:
        """By any way to a pass; between micro-batches, a program may save and evaluate."""
        self.steps += 1
        parts, before, counts = self.parts_of(self.steps), self.states(), self.counts()
        wanted = [self.family.loss(self.reference, part) for part in parts]
        (sum(wanted) / len(wanted)).backward()
        first = dist.get_rank() * self.micro_batches
        announces = self.draw.random() < 0.2
        for index in range(first, first + self.micro_batches):
            is_last = index == first + self.micro_batches - 1
            if announces:
                self.engine.set_gradient_accumulation_boundary(is_last)
            self.pass_of(parts[index], wanted[index])
            if is_last and self.dtype == "fp32":
                self.set_gradients()
            if is_last or not announces:
                self.engine.step()
            if not is_last and self.draw.random() < 0.3:
                self.evaluate()
                self.save(before)
        if announces:  # else it waits for others
            self.engine._is_gradient_accumulation_boundary = None
        norm = nn.utils.clip_grad_norm_(self.reference.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert self.engine.was_step_applied()
        self.near(torch.tensor(self.engine.get_global_grad_norm()), norm)
        more = (1, self.micro_batches, SAMPLES)
        assert self.counts() == tuple(a + b for a, b in zip(counts, more, strict=True))

    def counts(self) -> tuple[int, int, int]:
        engine = self.engine
        return engine.global_steps, engine.micro_steps, engine.global_samples

    def pass_of(self, part: torch.Tensor, wanted: torch.Tensor) -> None:
        """Forward and backward, through the engine or through its module."""
        directly = self.draw.random() < 0.4
        loss = self.family.loss(self.engine.module if directly else self.engine, part)
        self.close(loss, wanted)
        if self.draw.random() < 0.2:
            self.evaluate()
        if not directly:
            self.engine.backward(loss)
        elif self.dtype == "fp16":
            self.engine.scale(loss).backward()
        else:
            loss.backward()

    def set_gradients(self) -> None:
        """Read some gradients, which are means by now, and set others."""
        for name in self.draw.sample(self.names(), self.draw.randrange(2)):
            own, other = self.weight(name), self.reference.get_parameter(name)
            if other.requires_grad:
                self.near(utils.safe_get_full_grad(own), other.grad)
                other.grad.mul_(0.5).add_(0.01)
                utils.safe_set_full_grad(own, other.grad)
                assert torch.equal(utils.safe_get_full_grad(own), other.grad)

    def average(self) -> None:
        """A moving average of both models, and what it is of in the end."""
        own, wanted = self.averages
        for average, name in zip(own, self.names(), strict=True):
            with self.gathered(name) as weight:
                average.lerp_(weight.detach().as_subclass(torch.Tensor).float(), 0.5)
        for average, weight in zip(wanted, self.reference.parameters(), strict=True):
            average.lerp_(weight.detach(), 0.5)
        for average, other in zip(own, wanted, strict=True):
            self.near(average, other)

    def write(self) -> None:
        """Some elements of a parameter, in one of the ways in which programs write."""
        name = self.draw.choice(self.names())
        way, factor = self.draw.choice(["data", "copy", "lerp", "assign"]), self.draw.random() + 0.5
        some = slice(self.draw.randint(0, 30), self.draw.randint(31, 100))
        before = utils.safe_get_full_fp32_param(self.weight(name))
        with self.gathered(name, modifier_rank=self.world - 1) as weight, torch.no_grad():
            value = weight.detach().as_subclass(torch.Tensor).clone().flatten()
            value[some] = (value[some].float() * factor + 0.01).to(value.dtype)
            value = value.view(weight.shape)
            if way == "data":
                weight.data.copy_(value)
            elif way == "copy":
                weight.copy_(value)
            elif way == "lerp":
                weight.lerp_(value, 1.0)
            else:
                weight.data = value
        target = self.reference.get_parameter(name).data.view(-1)
        target[some] = target[some] * factor + 0.01
        if before is not None and type(self.weight(name)) is nn.Parameter:
            now = utils.safe_get_full_fp32_param(self.weight(name)).flatten()
            kept = torch.ones_like(now, dtype=torch.bool)
            kept[some] = False
            assert torch.equal(now[kept], before.flatten()[kept])  # not rounded to 16 bit

    def write_back(self) -> None:
        """The averages, and then what was there: masters change by rounding at most."""
        if self.engine.sharding.stage == 3 or self.family.has_experts:
            return
        weights = [*self.engine.module.parameters()]
        kept = [each.detach().clone() for each in weights]
        before = [utils.safe_get_full_fp32_param(each) for each in weights]
        for values in (self.averages[0], kept):
            for weight, value in zip(weights, values, strict=True):
                weight.data.copy_(value)
        for weight, value in zip(weights, before, strict=True):
            if weight.requires_grad:
                assert torch.equal(utils.safe_get_full_fp32_param(weight), value)

    def read(self) -> None:
        """Weights as they are held and as fp32 masters, and the optimizer's states."""
        state = self.engine.module_state_dict()
        for name, wanted in self.reference.named_parameters():
            self.near(state[name].float(), wanted.detach())
            with self.gathered(name) as weight:
                self.near(weight.detach().as_subclass(torch.Tensor).float(), wanted.detach())
            if wanted.requires_grad:
                own = self.weight(name)
                self.near(utils.safe_get_full_fp32_param(own), wanted.detach())
                assert utils.safe_get_full_grad(own) is None
                for key in STATES:
                    held = utils.safe_get_full_optimizer_state(own, key)
                    other = self.optimizer.state.get(wanted, {}).get(key)
                    assert (held is None) == (other is None) or not wanted.numel()
                    if held is not None:
                        self.near(held, other)

    def evaluate(self) -> None:
        self.engine.eval()
        self.reference.eval()
        with torch.no_grad():
            part = self.family.inputs(self.draw.randint(0, 9), SAMPLES)
            self.close(self.family.loss(self.engine, part), self.family.loss(self.reference, part))
        self.engine.train()
        self.reference.train()

    def alone(self) -> None:
        """What one rank does alone where all have whole weights."""
        is_whole = self.engine.sharding.stage < 3 and not self.family.has_experts
        chosen, seed = self.draw.randrange(self.world), self.draw.random()
        if is_whole and dist.get_rank() == chosen:
            self.evaluate()
            self.copy()
        self.draw.seed(seed)

    def copy(self) -> None:
        """A deep copy is a plain model; on one rank alone where that is allowed."""
        plain, state = copy.deepcopy(self.engine.module), self.engine.module.state_dict()
        for name, weight in self.reference.named_parameters():
            self.near(state[name].float(), weight.detach())
            assert torch.equal(state[name], plain.get_parameter(name))
        if self.dtype == "fp32":
            part = self.family.inputs(3, 2)
            with torch.no_grad():
                self.close(self.family.loss(plain, part), self.family.loss(self.reference, part))

    def states(self) -> tuple[dict, dict]:
        return copy.deepcopy((self.reference.state_dict(), self.optimizer.state_dict()))

    def save(self, states: tuple[dict, dict] | None = None) -> None:
        """Save a checkpoint, of the beginning of the step; maybe read it as another program."""
        masters = {name: utils.safe_get_full_fp32_param(self.weight(name)) for name in self.names()}
        counts = self.counts() if states is None else None
        path = self.engine.save_checkpoint(self.folder, tag=f"at_{len(self.calls)}_{self.steps}")
        if any(not each.requires_grad for each in self.reference.parameters()):
            self.saved = None  # other engines would not load it
            return
        self.saved = masters, *(states or self.states()), counts
        self.engine.save_16bit_model(self.folder, "model.bin")
        for name, weight in torch.load(self.folder / "model.bin").items():
            dtype = torch.float16 if self.dtype == "fp16" else torch.bfloat16
            assert name not in masters or torch.equal(weight, masters[name].to(dtype))
        if self.draw.random() < 0.3:
            read = get_fp32_state_dict_from_zero_checkpoint(self.folder, tag=path.name)
            assert read.keys() == self.reference.state_dict().keys()
            for name, master in masters.items():
                assert master is None or torch.equal(read[name], master)

    def load(self) -> None:
        if self.saved is None:
            return
        if self.micro_batches == 2 and self.draw.random() < 0.5:
            self.half_a_step()
        self.engine.load_checkpoint(self.folder)
        masters, model, optimizer, counts = self.saved
        assert counts in (None, self.counts())
        self.reference.load_state_dict(model)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        for name, master in masters.items():
            own = utils.safe_get_full_fp32_param(self.weight(name))
            assert own is None or master is None or torch.equal(own, master)

    def load_state(self) -> None:
        state = {name: value * 0.9 for name, value in self.reference.state_dict().items()}
        self.reference.load_state_dict(state)
        self.engine.module.load_state_dict(state)
        for name, weight in self.engine.module.named_parameters():
            if weight.requires_grad:
                assert torch.equal(utils.safe_get_full_fp32_param(weight), state[name])

    def set_values(self) -> None:
        """Set a master, by all ranks or each its rows, or a state of the optimizer."""
        trained = [name for name, each in self.reference.named_parameters() if each.requires_grad]
        name = self.draw.choice(trained)
        own, other = self.weight(name), self.reference.get_parameter(name)
        way = self.draw.choice(["whole", "rows", "state"])
        if way == "whole":
            utils.safe_set_full_fp32_param(own, other.detach() * 0.8)
        elif way == "rows":
            utils.safe_set_local_fp32_param(own, utils.safe_get_local_fp32_param(own) * 0.8)
        elif other in self.optimizer.state:
            key = self.draw.choice(STATES)
            self.optimizer.state[other][key].mul_(0.5)
            utils.safe_set_full_optimizer_state(own, self.optimizer.state[other][key], key)
            rows = utils.safe_get_local_optimizer_state(own, key)
            utils.safe_set_local_optimizer_state(own, rows, key)
        if way != "state":
            other.data.mul_(0.8)

    def discard(self) -> None:
        """Gradients far larger than others, which are thrown away."""
        if self.micro_batches == 2 and self.draw.random() < 0.5:
            self.half_a_step()
            self.engine.zero_grad(self.draw.choice([True, False]))
            self.engine.micro_steps -= 1
        else:
            self.engine.backward(100.0 * self.family.loss(self.engine, self.parts_of(1)[0]))
            self.engine.zero_grad()

    def half_a_step(self) -> None:
        self.engine.backward(100.0 * self.family.loss(self.engine, self.parts_of(1)[0]))
        self.engine.step()

    def freeze(self) -> None:
        """Some parameters, or train them again; offload refuses what was frozen at first."""
        chosen = self.draw.sample(self.names(), len(self.names()) // 2)
        trains = self.draw.random() < 0.5
        for model in (self.engine.module, self.reference):
            model.requires_grad_(True)
            for name in chosen:
                model.get_parameter(name).requires_grad_(trains)

    def names(self) -> list[str]:
        return [name for name, _ in self.reference.named_parameters()]

    def weight(self, name: str) -> nn.Parameter:
        return self.engine.module.get_parameter(name)

    @contextlib.contextmanager
    def gathered(self, name: str, modifier_rank: int | None = None) -> Iterator[nn.Parameter]:
        weight = self.weight(name)
        if hasattr(weight, "ds_id") or isinstance(weight, DTensor):
            with GatheredParameters([weight], modifier_rank=modifier_rank):
                yield weight
        else:
            yield weight

    def near(self, own: torch.Tensor, wanted: torch.Tensor) -> None:
        if self.dtype == "fp32":
            torch.testing.assert_close(own, wanted, rtol=0, atol=LR * 1e-2)

    def close(self, loss: torch.Tensor, wanted: torch.Tensor) -> None:
        tolerance = 1e-4 if self.dtype == "fp32" else 3e-2
        near = {"rtol": tolerance, "atol": tolerance / 10}
        torch.testing.assert_close(loss.detach().float(), wanted.detach(), **near)


def check(seed: int, family: str, dtype: str, folder: Path) -> None:
    sequence = Sequence(seed, family, dtype, folder)
    try:
        sequence.run()
    except BaseException:
        print(f"seed {seed}, {family}, {dtype}:", *sequence.calls, sep="\n  ")
        raise


@pytest.mark.parametrize(("family", "dtype"), CASES)
@pytest.mark.parametrize("seed", range(SEQUENCES))
@ranks(2, timeout=180)
def test_calls_on_two_ranks(seed: int, family: str, dtype: str, tmp_path: Path) -> None:
    check(seed, family, dtype, tmp_path)


@pytest.mark.parametrize("family", ["small", "mixtral"])
@ranks(4, timeout=240)
def test_calls_on_four_ranks(family: str, tmp_path: Path) -> None:
    check(100, family, "fp32", tmp_path)


@pytest.mark.parametrize("family", ["small", "named"])
@ranks(1)
def test_calls_on_one_rank(family: str, tmp_path: Path) -> None:
    check(200, family, "fp32", tmp_path)
