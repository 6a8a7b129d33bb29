"""Random sequences of what an optimizer may be asked, beside torch's optimizers."""

import copy
import pickle
import random
from collections.abc import Callable, Iterable

import torch
from torch import nn

Parameters = Iterable[nn.Parameter]
SHAPES = [(8, 6), (8, 6), (8, 6), (1, 7), (7, 1), (5, 12), (12, 5), (1, 1)]


class Pair:
    """Two equal lists of parameters: ours in one optimizer, theirs in torch's, their peers.

    Subclasses make these optimizers; `settings` are those of both.
    """

    settings: dict
    group: dict = {}  # of parameters that are added later, beside their rate

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.settings = self.drawn_settings()
        self.ours = [*self.drawn(draw.randint(1, 5)), nn.Parameter(torch.randn(4))]
        self.theirs = copy.deepcopy(self.ours)
        self.optimizer, self.peers = self.make(self.ours), self.make_peers(self.theirs)

    def drawn_settings(self) -> dict:
        raise NotImplementedError

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise NotImplementedError

    def make_peers(self, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        raise NotImplementedError

    def drawn(self, count: int) -> list[nn.Parameter]:
        return [nn.Parameter(torch.randn(self.draw.choice(SHAPES))) for _ in range(count)]

    def step(self) -> None:
        """Step with gradients, some of which are zero or None."""
        for mine, other in zip(self.ours, self.theirs, strict=True):
            gradient = torch.randn_like(mine) * self.draw.choice([0, 1, 1, 1e-6, 1e6])
            if mine.requires_grad and self.draw.random() < 0.8:
                mine.grad, other.grad = gradient, gradient.clone()
        if self.draw.random() < 0.3:
            assert self.optimizer.step(lambda: 7) == 7
        else:
            self.optimizer.step()
        for each in self.peers:
            each.step()

    def step_by_a_factor(self) -> None:
        """A power of two, by which gradients are scaled exactly."""
        for mine, other in zip(self.ours, self.theirs, strict=True):
            gradient = torch.randn_like(mine)
            if mine.requires_grad:
                mine.grad, other.grad = 1024 * gradient, gradient
        self.optimizer.step(factor=torch.tensor(1 / 1024))
        for each in self.peers:
            each.step()
        for each in (self.optimizer, *self.peers):
            each.zero_grad()

    def step_that_is_skipped(self) -> None:
        before = copy.deepcopy([self.ours, [*self.optimizer.state_dict()["state"].values()]])
        self.optimizer.step(factor=torch.tensor(self.draw.choice([float("nan"), float("inf")])))
        now = [self.ours, [*self.optimizer.state_dict()["state"].values()]]
        assert str(before) == str(now)
        for parameter, old in zip(self.ours, before[0], strict=True):
            assert torch.equal(parameter, old)

    def zero_grad(self) -> None:
        to_none = self.draw.random() < 0.5
        for each in (self.optimizer, *self.peers):
            each.zero_grad(set_to_none=to_none)

    def write_in_place(self) -> None:
        index = self.draw.randrange(len(self.ours))
        with torch.no_grad():
            self.ours[index].mul_(0.5)
            self.theirs[index].mul_(0.5)

    def freeze(self) -> None:
        index = self.draw.randrange(len(self.ours))
        for each in (self.ours[index], self.theirs[index]):
            each.grad = None
            each.requires_grad_(False)

    def change_groups(self) -> None:
        lr, decay = self.draw.choice([0.0, 0.01, torch.tensor(0.03)]), self.draw.choice([0.0, 0.2])
        for each in (self.optimizer, *self.peers):
            for group in each.param_groups:
                group["lr"], group["weight_decay"] = lr, decay

    def add_a_group(self) -> None:
        new = self.drawn(2)
        theirs = copy.deepcopy(new)
        self.ours += new
        self.theirs += theirs
        self.optimizer.add_param_group({"params": new, "lr": 0.05} | self.group)
        self.peers[0].add_param_group({"params": theirs, "lr": 0.05})

    def go_on_with_a_copy(self) -> None:
        """A deep copy, or one through a file; parameters leave their gradients behind."""
        both, gradients = (self.ours, self.optimizer), [each.grad for each in self.ours]
        if self.draw.random() < 0.5:
            self.ours, self.optimizer = copy.deepcopy(both)
        else:
            self.ours, self.optimizer = pickle.loads(pickle.dumps(both))
        for each, gradient in zip(self.ours, gradients, strict=True):
            each.grad = gradient

    def load_into_another(self) -> None:
        saved = copy.deepcopy(self.optimizer.state_dict())
        groups = [group["params"] for group in self.optimizer.param_groups]
        self.optimizer = self.make(groups[0])
        for each in groups[1:]:
            self.optimizer.add_param_group({"params": each} | self.group)
        self.optimizer.load_state_dict(saved)

    def compare(self) -> None:
        for mine, other in zip(self.ours, self.theirs, strict=True):
            # A few roundings of an update, of 0.05 or less; by matrices: the bits of torch.
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def run(make: Callable[[random.Random], Pair], seed: int, calls: list[Callable]) -> None:
    """Draw calls, with steps among them, and compare after each."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    pair = make(draw)
    each_call = [
        *[Pair.step] * 6, Pair.step_that_is_skipped, Pair.zero_grad, Pair.write_in_place,
        Pair.freeze, Pair.change_groups, Pair.add_a_group, Pair.go_on_with_a_copy,
    ]  # fmt: skip
    for _ in range(30):
        draw.choice([*each_call, *calls])(pair)
        pair.compare()
