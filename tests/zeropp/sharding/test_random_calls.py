"""Random legal calls on random small models: each gradient and weight equals one process's.

The one process runs the micro-batches of all ranks in turn, with each rank's own buffers. In 16 bit
it computes with weights and inputs rounded where the units round theirs, so that gradients differ
only by how their sums are rounded; the ranks then step with its gradients. Set RANDOM_SEQUENCES to
run more sequences than the suite does.
"""

import copy
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.sharding.near import (
    NEAR,
    assert_near,
    copy_shards,
    distribute,
    largest,
    momenta_of,
)
from tests.zeropp.sharding.one_process import OneProcess
from tests.zeropp.sharding.random_models import Batch, RandomModel
from tests.zeropp.small_model import whole
from zeropp import Sharding, shard
from zeropp.checkpoint import engine_checkpoint

SEQUENCES = int(os.environ.get("RANDOM_SEQUENCES", "12"))
PER_TEST = 3
LENGTH = 8  # calls in a sequence
LR = 0.05
TYPES = {
    torch.float32: {},
    torch.bfloat16: {"bf16": {"enabled": True}},
    torch.float16: {"fp16": {"enabled": True}},
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Of the first sequence, by ranks and type: with these, each type meets every stage and hpZ.
FIRST_SEED = {
    (2, torch.float32): 0,
    (2, torch.bfloat16): 8,
    (4, torch.float32): 10_001,
    (4, torch.bfloat16): 20_000,
}
CHUNKS = pytest.mark.parametrize("first", range(0, SEQUENCES // 4, PER_TEST))


class Interrupted(Exception):
    """Raised by a hook in the middle of a pass."""


class Sequence:
    """A random model on both sides, and the calls."""

    def __init__(self, seed: int, dtype: torch.dtype, folder: Path) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.reference = OneProcess(RandomModel(seed), self.world, dtype)
        self.calls: list[str] = []
        self.sharding = self.shard_model(RandomModel(seed))
        self.momentum = self.draw.choice([0.0, 0.9])
        self.optimizers = [self.sgd(self.model), self.sgd(self.reference.model)]
        self.first_weights = copy.deepcopy(self.reference.weights)
        self.folder = folder / str(seed)
        dcp.save(self.sharded_state(), checkpoint_id=self.folder)
        self.batches = 100 * seed

    def shard_model(self, model: RandomModel) -> Sharding:
        """Shard it on other nodes and at another stage each time."""
        self.stage = self.draw.randint(0, 3)
        zero = {"stage": self.stage}
        per_node = self.draw.choice([size for size in (1, 2, 4) if self.world % size == 0])
        if self.stage == 3 and per_node > 1 and self.draw.random() < 0.5:
            zero["zero_hpz_partition_size"] = per_node
        self.once = self.draw.random() < 0.3
        zeropp = {"reduce_gradients_once": self.once}
        config = zero_config(zero, per_node, zeropp=zeropp, **TYPES[self.dtype])
        units = None
        if model.head.weight is not model.stem.weight and self.draw.random() < 0.3:
            units = model.chosen_units()
        self.calls.append(
            f"{self.dtype}, {zero | zeropp}, {per_node} per node, order {model.order}, {units}"
        )
        return shard(model, data_mesh(), config, units=units)

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        options = {"lr": LR, "momentum": self.momentum, "weight_decay": 0.01}
        return torch.optim.SGD(model.parameters(), **options)

    @property
    def dtype(self) -> torch.dtype:
        return self.reference.dtype

    @property
    def model(self) -> nn.Module:
        return self.sharding.model

    def run(self) -> None:
        names = ("step", "step", "accumulate", "evaluate", "freeze", "load", "write", "discard",
                 "interrupt_forward", "interrupt_backward", "penalize", "save", "write_in_place",
                 "load_in_place", "resume")  # fmt: skip
        for _ in range(LENGTH):
            name = self.draw.choice(names)
            self.calls.append(name)
            getattr(self, name)()
            self.compare()
        self.calls.append("step")
        self.step()
        self.compare()

    def micro_batches(self, count: int, *, ends: bool = True, penalty: float = 0.0) -> None:
        """Forward and backward of micro-batches on both sides."""
        for index in range(count):
            self.batches += 1
            with self.sharding.micro_step(last=ends and index == count - 1):
                extra = penalty * self.penalty_of_shards() if penalty else 0.0
                loss = Batch.of(self.batches, self.rank).loss(self.model) / count
                (loss + extra).backward()
            for rank in range(self.world):
                batch = Batch.of(self.batches, rank)
                self.reference.add_gradients(batch, rank, count)
            if penalty:
                for weight in self.reference.weights.values():
                    if weight.requires_grad:
                        (penalty * (weight.square() + weight).sum()).backward()

    def penalty_of_shards(self) -> torch.Tensor:
        """Of this rank's shards: this is called before the forward pass."""
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        return sum((weight.to_local().square() + weight.to_local()).sum() for weight in trained)

    def step(self) -> None:
        self.micro_batches(self.draw.randint(1, 3))
        self.update()

    def accumulate(self) -> None:
        """Two complete sums before one update."""
        if self.dtype == torch.float32 and len(self.calls) % 2:
            self.two_at_once()
        self.micro_batches(1)
        self.micro_batches(self.draw.randint(1, 2))
        self.update()

    def two_at_once(self) -> None:
        """Two forward passes before one backward pass."""
        self.batches += 2
        seeds = (self.batches - 1, self.batches)
        with self.sharding.micro_step(last=True):
            sum(Batch.of(seed, self.rank).loss(self.model) for seed in seeds).backward()
        for seed, rank in itertools.product(seeds, range(self.world)):
            self.reference.add_gradients(Batch.of(seed, rank), rank, 1)

    def penalize(self) -> None:
        self.sharding.release()
        self.micro_batches(1, penalty=0.1)
        self.update()

    def update(self) -> None:
        self.compare()
        if self.dtype != torch.float32:
            self.take_over_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        self.optimizers[0].zero_grad()
        self.reference.zero_grad()

    def take_over_gradients(self) -> None:
        """Step with the reference's gradients: the next rounded weights must not differ."""
        others = self.reference.weights.values()
        for mine, other in zip(self.model.parameters(), others, strict=True):
            if mine.grad is not None:
                mine.grad.to_local().copy_(distribute(other.grad, mine.grad).to_local())

    def evaluate(self) -> None:
        batch = Batch.of(self.batches, self.rank)
        losses = []

        def evaluate(model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
            model.eval()
            with torch.no_grad():
                losses.append(loss().item())
            model.train()

        evaluate(self.model, lambda: batch.loss(self.model))
        if self.draw.random() < 0.5:
            self.sharding.release()
        reference = self.reference
        reference.pass_of(
            self.rank, lambda: evaluate(reference.model, lambda: reference.loss(batch))
        )
        assert abs(losses[0] - losses[1]) <= NEAR * max(1, abs(losses[1])), (self.calls, losses)

    def freeze(self) -> None:
        """Freeze a block, or train it again."""
        index, trains = self.draw.randrange(len(self.model.blocks)), self.draw.random() < 0.5
        for model in (self.model, self.reference.model):
            model.blocks[index].requires_grad_(trains)

    def values_of(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(self.calls))
        shape = self.reference.weights[name].shape
        return 0.3 * torch.randn(shape, generator=generator)

    def load(self) -> None:
        """Load another state; buffers keep their values."""
        state = self.model.state_dict()
        other = self.reference.model.state_dict()
        aliases = {}  # a tied weight has several names and one value
        for name, weight in self.reference.model.named_parameters(remove_duplicate=False):
            value = self.values_of(aliases.setdefault(weight, name))
            other[name] = value
            state[name] = distribute(value, state[name])
        self.model.load_state_dict(state)
        self.reference.model.load_state_dict(other)

    def save(self) -> None:
        """Save, change everything, load what was saved."""
        state = {name: copy.deepcopy(value) for name, value in self.model.state_dict().items()}
        self.write()
        self.model.load_state_dict(state)
        self.reference.model.load_state_dict({name: whole(each) for name, each in state.items()})

    def resume(self) -> None:
        """Save, and go on with another model: on other nodes, at another stage, in another type."""
        folder = self.folder.with_name(f"{self.seed}-{len(self.calls)}")
        state = {"optimizer_saved": True}
        engine_checkpoint.save(folder, "saved", self.model, self.optimizers[0], state)
        self.reference.dtype = self.draw.choice([*TYPES][self.world == 1 :])
        model = RandomModel(self.seed)
        for weight, other in zip(model.parameters(), self.reference.weights.values(), strict=True):
            weight.detach().zero_()
            weight.requires_grad_(other.requires_grad)
        self.sharding = self.shard_model(model)
        self.optimizers[0] = self.sgd(model)
        engine_checkpoint.load(folder, None, model, self.optimizers[0])
        self.compare()
        if self.dtype != torch.float32:
            self.take_over_state()

    def take_over_state(self) -> None:
        """Go on from what the reference has, after comparing it: as for `take_over_gradients`."""
        models = self.model, self.reference.model
        momenta, others = map(momenta_of, models, self.optimizers)
        assert momenta.keys() == others.keys()
        for name, other in others.items():
            assert_near(momenta[name], other, NEAR * largest(other), (name, self.calls))
        copy_shards(momenta, others)
        copy_shards(dict(self.model.named_parameters()), self.reference.weights)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.reference.buffers[self.rank][name])
        self.sharding.weights_changed()

    def write(self) -> None:
        """Write into the shards of one weight."""
        name = self.draw.choice(list(self.reference.weights))
        self.sharding.release()
        value = self.values_of(name)
        with torch.no_grad():
            weight = dict(self.model.named_parameters())[name]
            weight.to_local().copy_(distribute(value, weight).to_local())
            self.reference.weights[name].copy_(value)
        self.sharding.weights_changed()

    def write_in_place(self) -> None:
        """Write into one weight without notice, on all ranks or on one, between two passes."""
        self.evaluate()
        name = self.draw.choice(list(self.reference.weights))
        weight, whole = dict(self.model.named_parameters())[name], self.reference.weights[name]
        value, kind = self.values_of(name), self.draw.choice(["lerp", "scale", "local", "one rank"])
        with torch.no_grad():
            if kind == "lerp":
                weight.lerp_(distribute(value, weight), 0.3)
                whole.lerp_(value, 0.3)
            elif kind == "scale":
                weight.mul_(0.5)
                whole.mul_(0.5)
            elif kind == "local" or self.stage == 0:  # there all ranks hold the same
                weight.to_local().copy_(distribute(value, weight).to_local())
                whole.copy_(value)
            else:
                writer = self.draw.randrange(self.world)
                if self.rank == writer:
                    weight.to_local().copy_(distribute(value, weight).to_local())
                rows = zip(whole.chunk(self.world), value.chunk(self.world), strict=True)
                for row, new in [*rows][writer : writer + 1]:  # it may have none
                    row.copy_(new)
        self.calls.append((kind, name))
        self.evaluate()

    def load_in_place(self) -> None:
        """Read the first weights back into a state dict, without notice, between two passes."""
        self.evaluate()
        dcp.load(self.sharded_state(), checkpoint_id=self.folder)
        with torch.no_grad():
            for name, weight in self.reference.weights.items():
                weight.copy_(self.first_weights[name])
        self.evaluate()

    def sharded_state(self) -> dict[str, DTensor]:
        """The model's state dict without its buffers, which differ between ranks."""
        state = self.model.state_dict().items()
        return {name: value for name, value in state if isinstance(value, DTensor)}

    def discard(self) -> None:
        """Give a step up in its middle."""
        self.micro_batches(1, ends=self.draw.random() < 0.5)
        self.give_up()

    def give_up(self) -> None:
        if self.stage > 1 and not self.once and len(self.calls) % 2:
            self.optimizers[0].zero_grad()  # enough where all gradients are sharded
        else:
            self.sharding.discard_gradients()
        self.reference.zero_grad()

    def interrupt_forward(self) -> None:
        """Fail in a forward pass after a micro-batch, and repeat it."""
        count = self.draw.randint(0, 1)
        self.micro_batches(count, ends=False)
        hook = self.model.head.register_forward_pre_hook(interrupt)
        with pytest.raises(Interrupted):
            Batch.of(0, self.rank).loss(self.model)
        hook.remove()
        for rank in range(self.world):  # its buffers have changed
            self.repeat_forward(rank)
        if count:
            self.micro_batches(1)
            self.update()

    def interrupt_backward(self) -> None:
        """Fail in a backward pass, discard the step and go on."""
        batch = Batch.of(0, self.rank)
        with self.sharding.micro_step(last=self.draw.random() < 0.5):
            hidden = []
            hook = self.model.stem.register_forward_hook(lambda *all: hidden.append(all[-1]))
            loss = batch.loss(self.model)
            hook.remove()
            if hidden[0].requires_grad:
                hidden[0].register_hook(interrupt)
                with pytest.raises(Interrupted):
                    loss.backward()
        for rank in range(self.world):
            self.repeat_forward(rank)
        self.give_up()

    def repeat_forward(self, rank: int) -> None:
        """Change a rank's buffers as a pass that failed did."""
        self.reference.pass_of(rank, lambda: self.reference.loss(Batch.of(0, rank)))

    def compare(self) -> None:
        """Compare all weights, gradients and this rank's buffers."""
        expected = self.reference.weights
        self.sharding.release()
        for name, weight in self.model.named_parameters():
            where = (name, self.calls)
            assert_near(weight, expected[name], NEAR * largest(expected[name]), where)
            gradient = expected[name].grad
            assert (weight.grad is None) == (gradient is None), where
            if gradient is not None:
                assert_near(weight.grad, gradient, self.reference.near(name), where)
        for name, buffer in self.model.named_buffers():
            own = self.reference.buffers[self.rank][name]
            torch.testing.assert_close(
                buffer, own, rtol=NEAR, atol=NEAR, msg=str((name, self.calls))
            )


def interrupt(*_: object) -> None:
    raise Interrupted


@CHUNKS
@DTYPES
@ranks(2, timeout=120)
def test_two_ranks(first: int, dtype: torch.dtype, tmp_path: Path):
    run_sequences(first, dtype, tmp_path)


@CHUNKS
@DTYPES
@ranks(4, timeout=120)
def test_four_ranks(first: int, dtype: torch.dtype, tmp_path: Path):
    run_sequences(first, dtype, tmp_path)


def run_sequences(first: int, dtype: torch.dtype, folder: Path) -> None:
    first += FIRST_SEED.get((dist.get_world_size(), dtype), 0)
    for seed in range(first, first + PER_TEST):
        Sequence(seed, dtype, folder).run()
