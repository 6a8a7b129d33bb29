"""Muon under random sequences of what an optimizer may be asked, beside torch's Muon and AdamW.

Set RANDOM_MUON to draw more sequences than the suite does.
"""

import copy
import os
import pickle
import random

import pytest
import torch
from torch import nn

from zeropp import InputError
from zeropp.capabilities.muon.matrix_step import MuonOptions
from zeropp.capabilities.muon.muon import Muon

DRAWS = int(os.environ.get("RANDOM_MUON", "20"))
SHAPES = [(8, 6), (8, 6), (8, 6), (1, 7), (7, 1), (5, 12), (12, 5), (1, 1)]
BF16 = MuonOptions(dtype=torch.bfloat16)


class Pair:
    """Two equal lists of parameters: ours in one optimizer, theirs in torch's Muon and AdamW."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.settings = {
            "lr": 0.02, "momentum": draw.choice([0.0, 0.9]), "nesterov": draw.random() < 0.5,
            "weight_decay": draw.choice([0.0, 0.1]), "ns_steps": draw.choice([1, 5]),
            "adjust_lr_fn": draw.choice([None, "original", "match_rms_adamw"]),
        }  # fmt: skip
        matrices, vectors = self.drawn(draw.randint(1, 5)), [nn.Parameter(torch.randn(4))]
        self.ours = [*matrices, *vectors]
        self.theirs = copy.deepcopy(self.ours)
        self.optimizer = self.muon(self.ours)
        mine = [each for each in self.theirs if each.ndim == 2]
        others = [each for each in self.theirs if each.ndim == 1]
        decay = self.settings["weight_decay"]
        self.peers = [
            torch.optim.Muon(mine, **self.settings),
            torch.optim.AdamW(others, lr=0.02, weight_decay=decay),
        ]

    def drawn(self, count: int) -> list[nn.Parameter]:
        return [nn.Parameter(torch.randn(self.draw.choice(SHAPES))) for _ in range(count)]

    def muon(self, parameters: list[nn.Parameter]) -> Muon:
        groups = [
            {"params": (each for each in parameters if each.ndim == 2), "use_muon": True},
            {"params": (each for each in parameters if each.ndim == 1), "use_muon": False},
        ]
        return Muon(groups, **self.settings, options=BF16)

    def step(self) -> None:
        """Step with gradients, some of which are zero or None."""
        for mine, other in zip(self.ours, self.theirs, strict=True):
            gradient = torch.randn_like(mine) * self.draw.choice([0, 1, 1, 1e-6, 1e6])
            if mine.requires_grad and self.draw.random() < 0.8:
                mine.grad, other.grad = gradient, gradient.clone()
        result = self.optimizer.step(lambda: 7) if self.draw.random() < 0.3 else None
        if result is None:
            self.optimizer.step()
        for each in self.peers:
            each.step()

    def step_that_is_skipped(self) -> None:
        before = [each.detach().clone() for each in self.ours]
        self.optimizer.step(factor=torch.tensor(float("nan")))
        for parameter, old in zip(self.ours, before, strict=True):
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
        self.optimizer.add_param_group({"params": new, "use_muon": True, "lr": 0.05})
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
        another = [{"params": each, "use_muon": each[0].ndim == 2} for each in groups]
        self.optimizer = Muon(another, **self.settings, options=BF16)
        self.optimizer.load_state_dict(saved)

    def compare(self) -> None:
        for mine, other in zip(self.ours, self.theirs, strict=True):
            # One rounding of AdamW's and of the factor of updates; by matrices: the bits of torch.
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


CALLS = [
    *[Pair.step] * 6, Pair.step_that_is_skipped, Pair.zero_grad, Pair.write_in_place, Pair.freeze,
    Pair.change_groups, Pair.add_a_group, Pair.go_on_with_a_copy, Pair.load_into_another,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(DRAWS))
def test_random_calls_are_torchs(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    pair = Pair(draw)
    for _ in range(30):
        draw.choice(CALLS)(pair)
        pair.compare()


def test_nan_stays_in_its_matrix():
    """Without a factor, which would skip the step; torch's Muon does the same."""
    matrices = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
    optimizer = Muon([{"params": matrices, "use_muon": True}], options=BF16)
    for each in matrices:
        each.grad = torch.randn(4, 3)
    matrices[1].grad[2, 1] = float("nan")
    optimizer.step()
    assert [each.isnan().all().item() for each in matrices] == [False, True, False]
    assert matrices[0].isfinite().all() and matrices[2].isfinite().all()


def test_torchs_state_is_taken_and_another_kinds_left_out():
    matrix = nn.Parameter(torch.randn(4, 3))
    matrix.grad = torch.randn(4, 3)
    peers = [
        torch.optim.Muon([matrix], lr=0.5, momentum=0.8, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([matrix], lr=0.5),
    ]
    for peer in peers:
        peer.step()
        optimizer = Muon([{"params": [matrix], "use_muon": True}])
        optimizer.load_state_dict(peer.state_dict())
        (group,) = optimizer.param_groups
        assert group["use_muon"] and group["lr"] == 0.5 and len(group["ns_coefficients"]) == 5
        if peer is peers[0]:
            taken = group["momentum"], group["scale_mode"], group["extra_scale_factor"]
            assert taken == (0.8, "spectral", 0.2)
            momentum = optimizer.state[matrix]["momentum_buffer"]
            assert torch.equal(momentum, peer.state[matrix]["momentum_buffer"])
        else:
            assert (group["momentum"], group["eps"]) == (0.95, 1e-7)
            assert not optimizer.state[matrix]
        optimizer.step()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": [nn.Parameter(torch.ones(3))], "use_muon": True}, "shape \\[3\\]"),
        ({"params": [nn.Parameter(torch.ones(3, 3))]}, "no use_muon"),
        ({"params": nn.Parameter(torch.ones(3, 3)), "use_muon": True, "momentum": 2}, "momentum"),
        ({"params": [nn.Parameter(torch.ones(3, 3))], "use_muon": True, "lr": -1}, "lr = -1"),
        (
            {"params": [nn.Parameter(torch.ones(3, 3))], "use_muon": True, "adjust_lr_fn": "rms"},
            'adjust_lr_fn = "rms"',
        ),
    ],
)
def test_groups_that_cannot_be_added_are_named_and_left_out(group, message):
    optimizer = Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": True}])
    with pytest.raises(InputError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
