"""Random calls on models that `zeropp.shard` has sharded: what is kept of weights changes no digit.

They compute the same with hpZ's copies as without them, whether writes are told or not, and whether
what an evaluation has gathered is released. Each sequence has every call, in an order of its own.
Set RANDOM_ATTACH to draw more sequences than the suite does.
"""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import zeropp
from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.sharded_training import ALL, random_like, two_machines
from tests.zeropp.sharding.test_random_attach import (
    BOTH,
    CALLS,
    HPZ,
    PLAIN,
    QWZ,
    SEQUENCES,
    Drawn,
    recomputed,
)
from tests.zeropp.small_model import SmallModel, tokens_of

UNCODED = {"weight_steps": True, "code_messages": False}


class Halving(torch.optim.Optimizer):
    """A user's optimizer, whose writes do not change tensor versions."""

    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.to_local().data.mul_(0.9)


class DrawnShard(Drawn):
    """A model that `zeropp.shard` has sharded; some blocks may be left out of a pass, or repeated.

    With `told`, writes are told; with `releases`, an evaluation leaves nothing gathered; with
    `within`, each gradient steps its weight in the backward pass.
    """

    calls = (
        *CALLS, "evolve", "leave_out", "leave_out", "take_turns", "step_alone", "step_masters",
        "step_one_by_one", "make_optimizer",
    )  # fmt: skip

    def __init__(
        self,
        seed: int,
        zero: dict,
        *,
        told: bool = False,
        releases: bool = False,
        within: bool = False,
        **keys: object,
    ) -> None:
        self.config = zero_config(zero, 2, zeropp=keys)
        self.told, self.releases, self.within = told, releases, within
        super().__init__(seed, None)
        if self.draw.random() < 0.3:
            self.optimizer = Halving(self.weights, {})
        self.swarm = torch.optim.AdamW(self.weights, lr=0.1, fused=True)  # raises no version
        self.other = zeropp.shard(SmallModel(), data_mesh(), self.config)
        self.of_other = torch.optim.SGD(self.other.model.parameters(), lr=0.3)

    def sharded_model(self, draw: random.Random) -> FSDPModule:
        model = SmallModel(draw.randint(2, 4))
        for block in model.blocks:
            if draw.random() < 0.3:
                block.forward = recomputed(block)
        model.blocks[-1].requires_grad_(draw.random() < 0.5)
        self.sharding = zeropp.shard(model, data_mesh(), self.config)
        return model

    def send_what_is_told(self) -> None:
        """Other tests compare what is sent."""

    def train(self, number: int) -> None:
        self.pass_over(100 + number, last=self.draw.random() < 0.6)

    def pass_over(self, number: int, *, last: bool = True) -> None:
        with self.sharding.micro_step(last=last):
            loss = self.loss(tokens_of(number).chunk(4)[dist.get_rank()])
            loss.backward()
        self.losses.append(loss.item())

    def evaluate(self, number: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self.losses.append(self.loss(tokens_of(number)).item())
        self.model.train()
        if self.draw.random() < 0.5 or self.releases:
            self.sharding.release()

    def leave_out(self, number: int) -> None:
        """What was gathered ahead for a block that is not used is older than the next pass."""
        self.evolve(number)  # so that there are no copies
        drawn = self.draw.choices(range(len(self.model.blocks)), k=self.draw.randint(1, 4))
        self.model.order = self.draw.choice([(0,), (0, 1, 0), tuple(drawn)])
        with torch.no_grad():
            self.losses.append(self.loss(tokens_of(number)).item())
            self.model.order = None
            if self.releases:
                self.loss(tokens_of(number))  # uses all that was gathered ahead
                self.sharding.release()
        if self.draw.random() < 0.5:
            self.load(number, self.model)
        else:
            self.evolve(number, len(self.weights))
        self.evaluate(number)

    def take_turns(self, number: int) -> None:
        """Another model learns from this one, and steps before this one's backward pass."""
        tokens = tokens_of(400 + number).chunk(4)[dist.get_rank()]
        with torch.no_grad():
            target = self.model(tokens).float().softmax(-1)
        with self.sharding.micro_step(last=True):
            loss = self.loss(tokens)
            with self.other.micro_step(last=True):
                of_other = (self.other.model(tokens).float() * (1 - target)).mean()
                of_other.backward()
            self.of_other.step()
            self.of_other.zero_grad()
            loss.backward()
        self.losses += [loss.item(), of_other.item()]

    def freeze(self, number: int) -> None:
        """Also where there are gradients, with which a weight is stepped."""
        weight = self.draw.choice(self.weights)
        weight.requires_grad_(not weight.requires_grad)

    def evolve(self, number: int, count: int = 2) -> None:
        """Step weights, frozen ones too, by gradients that are written."""
        self.optimizer.zero_grad()
        for weight in self.draw.sample(self.weights, count):
            weight.grad = random_like(weight, number)
        self.swarm.step()
        self.swarm.zero_grad()

    def step_alone(self, number: int) -> None:
        """A rank fits a model of its own, sharded over no ranks, while others do not."""
        self.evaluate(number)
        probe = nn.Linear(2, 1)
        if dist.get_rank() == 1:
            probe(torch.ones(2)).sum().backward()
            torch.optim.SGD(probe.parameters(), lr=0.5).step()
        self.evaluate(number)

    def step_masters(self, number: int) -> None:
        """Step copies that are no shards, and write them back in a way that raises no version."""
        self.sharding.discard_gradients()
        self.pass_over(500 + number)
        masters = [weight.to_local().detach().clone() for weight in self.weights]
        for weight, master in zip(self.weights, masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.to_local()
        torch.optim.SGD(masters, lr=0.5).step()
        for weight, master in zip(self.weights, masters, strict=True):
            weight.to_local().data.copy_(master)
            weight.grad = None
        self.evaluate(number)

    def step_one_by_one(self, number: int) -> None:
        """Whole weights that backward still needs stay; what was kept of them does not."""
        self.sharding.discard_gradients()
        optimizers = {weight: torch.optim.SGD([weight], lr=0.5) for weight in self.weights}

        def update(weight: nn.Parameter) -> None:
            optimizers[weight].step()
            optimizers[weight].zero_grad()

        handles = [
            weight.register_post_accumulate_grad_hook(update)
            for weight in self.weights
            if self.within and weight.requires_grad
        ]
        self.sharding.release()
        self.sharding.traffic.take()
        self.pass_over(600 + number)
        sent, expected = self.sharding.traffic.take(), self.sharding.expected_traffic(1)
        if not self.sharding.plan.axis.weights.keeps:
            assert all(sent[key] == expected[key] for key in expected if key[0] != "gradients")
        for weight in self.weights:
            update(weight)
        for handle in handles:
            handle.remove()
        self.evaluate(number)

    def make_optimizer(self, number: int) -> None:
        """After a pass, whose weights may still be gathered."""
        self.evaluate(number)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def skip(self, number: int) -> None:
        self.sharding.discard_gradients()

    def unshard(self, number: int) -> None:
        self.sharding.release()

    def after_write(self, number: int) -> None:
        if self.told:
            self.sharding.weights_changed()
        if self.draw.random() < 0.5:  # steps others, and weights that were written
            self.evolve(number)

    def notify(self, number: int) -> None:
        super().notify(number)
        self.sharding.weights_changed()


@pytest.mark.parametrize(
    ("zero", "others", "common"),
    [
        (QWZ, {"zero": BOTH, "within": True}, {}),
        (PLAIN, {"zero": PLAIN | HPZ, "within": True}, {}),
        (BOTH, {"code_messages": True}, UNCODED),
        (ALL, {"code_messages": True, "without_gloo": True}, UNCODED),
        (ALL, {"code_messages": "auto"}, UNCODED),
        (PLAIN, {"told": True, "releases": True, "within": True}, {}),
        ({"stage": 2}, {"told": True, "releases": True, "within": True}, {}),
        ({"stage": 1}, {"told": True, "releases": True}, {}),
        ({"stage": 0}, {"told": True, "releases": True}, {}),
    ],
    ids=["both", "copies", "coded", "lengths", "auto", "stage 3", "stage 2", "stage 1", "stage 0"],
)
@pytest.mark.parametrize("seed", range(SEQUENCES))
@ranks(4, timeout=120)
def test_sharded_what_is_kept_changes_no_bit(seed, zero, others, common):
    expected = DrawnShard(seed, zero, **common).run()
    keys = {"zero": zero} | common | others
    with two_machines(without_gloo=keys.pop("without_gloo", False)):
        assert DrawnShard(seed, **keys).run() == expected
