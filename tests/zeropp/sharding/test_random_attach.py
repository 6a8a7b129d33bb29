"""Random calls on random models that were attached: what is kept of weights changes no digit.

Attached, models compute what they do under plain FSDP2, with hpZ's copies and without. Each
sequence has every call, in an order of its own. Set RANDOM_ATTACH to draw more of them than the
suite does.
"""

import os
import random
from functools import partialmethod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zeropp
from tests.ranks import ranks
from tests.zeropp.sharding.foreign_experts import HAS_GROUPS, LAYOUTS, sharded_experts
from tests.zeropp.small_model import SmallModel, loss_of, tokens_of

SEQUENCES = int(os.environ.get("RANDOM_ATTACH", "2"))
PLAIN = {"stage": 3}
QWZ = PLAIN | {"zero_quantized_weights": True}
HPZ = {"zero_hpz_partition_size": 2}
BOTH = QWZ | HPZ
CALLS = (
    "train", "train", "evaluate", "step", "step", "skip", "load", "unshard", "write_weights",
    "write_shards", "write_state", "notify", "interrupt", "clip", "freeze",
)  # fmt: skip


class Drawn:
    """A model, how its owner shards it, and what then happens to it: the same for a seed."""

    calls = CALLS

    def __init__(self, seed: int, zero: dict | None) -> None:
        self.draw = draw = random.Random(seed)
        torch.manual_seed(seed)
        self.model = self.sharded_model(draw)
        self.attached = None
        if zero is not None:
            json = {"zero_optimization": zero, "zeropp": {"ranks_per_node": 2}}
            self.attached = zeropp.attach(self.model, json)
        self.weights = [*self.model.parameters()]
        kind = draw.choice(["fused", "foreach"])
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-2, **{kind: True})
        self.losses: list[float] = []

    def sharded_model(self, draw: random.Random) -> FSDPModule:
        self.model = SmallModel(draw.randint(1, 4))
        self.shard(draw.choice([(4,), (4,), (2, 2)]))
        return self.model

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model, tokens)

    def shard(self, sizes: tuple[int, ...]) -> None:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "shard")[-len(sizes) :])
        for block in self.model.blocks:
            kind = self.draw.choice(["whole", "whole", "parts", "none", "recomputed"])
            stays = self.draw.choice([True, True, False])
            if kind == "recomputed":
                block.forward = recomputed(block)
            if kind == "parts":
                self.unit([block.up, block.down], mesh, stays)
            if kind != "none":
                self.unit(block, mesh, stays)
        self.unit(self.model, mesh, self.draw.choice([True, False, None]))
        self.set_up()

    def set_up(self) -> None:
        """What owners set on their units: a factor, and which are gathered ahead."""
        factor, ahead = self.draw.choice([None, 1.0, 3.0]), self.draw.choice([0, 0, 1])
        units = [unit for unit in self.model.modules() if isinstance(unit, FSDPModule)]
        for unit in units if factor else ():
            unit.set_gradient_divide_factor(factor)
            unit.set_force_sum_reduction_for_comms(True)
        blocks = [block for block in self.model.blocks if isinstance(block, FSDPModule)]
        for block, following in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([following] * ahead)
            following.set_modules_to_backward_prefetch([block] * ahead)

    def unit(self, modules: object, mesh: DeviceMesh, reshards: bool | None) -> None:
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshards)

    def run(self) -> list[float]:
        self.send_what_is_told()
        for number, name in enumerate(self.draw.sample(self.calls, len(self.calls))):
            getattr(self, name)(number)
            assert all(isinstance(each, DTensor) for each in self.model.parameters())
        self.step(len(self.calls))
        self.evaluate(len(self.calls))
        return self.losses

    def send_what_is_told(self) -> None:
        """A step of some micro-batches, which reduces in each of them or once."""
        count, once = self.draw.randint(1, 3), self.draw.random() < 0.5
        for index in range(count):
            self.model.set_requires_gradient_sync(not once or index == count - 1)
            loss = self.loss(tokens_of(300 + index).chunk(4)[dist.get_rank()]) / count
            loss.backward()
            self.losses.append(loss.item())
        if self.attached is not None:
            expected = self.attached.expected_traffic(count, reduces_once=once)
            assert self.attached.traffic.take() == expected
        self.step(0)

    def train(self, number: int) -> None:
        syncs = self.draw.random() < 0.6
        self.model.set_requires_gradient_sync(syncs)
        tokens = tokens_of(100 + number).chunk(4)[dist.get_rank()]
        loss = self.loss(tokens)
        loss.backward()
        self.losses.append(loss.item())

    def interrupt(self, number: int) -> None:
        """Evaluate between a forward pass and its backward pass."""
        loss = self.loss(tokens_of(200 + number).chunk(4)[dist.get_rank()])
        self.evaluate(number)
        loss.backward()

    def clip(self, number: int) -> None:
        """Of several meshes each by itself, as PyTorch takes no others."""
        for mesh in dict.fromkeys(weight.device_mesh for weight in self.weights):
            own = [weight for weight in self.weights if weight.device_mesh == mesh]
            norm = torch.nn.utils.clip_grad_norm_(own, 0.1)
            self.losses.append(norm.full_tensor().item() if own[0].grad is not None else 0.0)

    def freeze(self, number: int) -> None:
        """Or train again what was frozen."""
        weight = self.draw.choice(self.weights)
        if weight.grad is None:
            weight.requires_grad_(not weight.requires_grad)

    def evaluate(self, number: int) -> None:
        """FSDP2 would use what a pass without backward leaves gathered after the next step too."""
        self.model.eval()
        with torch.no_grad():
            self.losses.append(self.loss(tokens_of(number)).item())
        self.model.train()
        for unit in self.model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def step(self, number: int) -> None:
        if any(weight.grad is not None for weight in self.model.parameters()):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def skip(self, number: int) -> None:
        """Discard the gradients that were reduced, as after an overflow."""
        self.optimizer.zero_grad()

    def notify(self, number: int) -> None:
        """Write into what no version tells of, and say so."""
        with torch.no_grad():
            for weight in self.weights:
                weight.to_local().data.mul_(0.99)
        if self.attached is not None:
            self.attached.weights_changed()

    def load(self, number: int, part: nn.Module | None = None) -> None:
        part = part or self.draw.choice([self.model, self.model.blocks[-1]])
        part.load_state_dict({name: 0.9 * each for name, each in part.state_dict().items()})

    def write(self, number: int, kind: str) -> None:
        """Write into some weights in place, without notice, maybe on one rank only."""
        self.evaluate(number)  # leaves something that may be kept
        writers = self.draw.choice([range(4), [self.draw.randrange(4)]])
        written = self.draw.sample(self.weights, 3)
        state = self.model.state_dict()  # which all ranks ask for
        with torch.no_grad():
            for weight in written:
                if kind == "weights":
                    weight.mul_(0.9)
                elif kind == "shards" and dist.get_rank() in writers:
                    weight.to_local().mul_(0.9)
            for tensor in state.values():
                if kind == "state":
                    tensor.to_local().mul_(0.9)
        self.after_write(number)
        self.evaluate(number)

    write_weights = partialmethod(write, kind="weights")
    write_shards = partialmethod(write, kind="shards")
    write_state = partialmethod(write, kind="state")

    def after_write(self, number: int) -> None:
        """A sharded model may be told of it, or be stepped."""

    def unshard(self, number: int) -> None:
        self.model.unshard()
        self.model.reshard()


class DrawnExperts(Drawn):
    """Experts on a mesh of their own, as other libraries shard them."""

    def sharded_model(self, draw: random.Random) -> FSDPModule:
        replicas = draw.choice([1, 2])
        self.model = sharded_experts(
            draw.choice(LAYOUTS),
            draw.choice([2, 2, 4 // replicas]),
            replicas=replicas,
            num_experts=draw.choice([4, 8]),
            num_blocks=draw.randint(1, 3),
            reshards=draw.choice([True, False, None]),
        )
        self.set_up()
        return self.model

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


KINDS = [Drawn, DrawnExperts] if HAS_GROUPS else [Drawn]


def recomputed(block: nn.Module):
    forward = type(block).forward.__get__(block)
    return lambda x: checkpoint(forward, x, use_reentrant=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(SEQUENCES))
@ranks(4, timeout=120)
def test_nothing_quantized_computes_the_same(seed, kind):
    expected = kind(seed, None).run()
    assert kind(seed, PLAIN).run() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(SEQUENCES))
@ranks(4, timeout=120)
def test_copies_change_no_bit(seed, kind):
    assert kind(seed, BOTH).run() == kind(seed, QWZ).run()
