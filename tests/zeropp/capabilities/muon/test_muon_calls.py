"""Muon under random sequences of what an optimizer may be asked, beside torch's Muon and AdamW.

Set RANDOM_MUON to draw more sequences than the suite does.
"""

import copy
import os

import pytest
import torch
from torch import nn

from tests.zeropp.optim.optimizer_pair import Pair, run
from zeropp import InputError
from zeropp.capabilities.muon.matrix_step import MuonOptions
from zeropp.capabilities.muon.muon import Muon

DRAWS = int(os.environ.get("RANDOM_MUON", "20"))
BF16 = MuonOptions(dtype=torch.bfloat16)


class MuonPair(Pair):
    """Beside torch's Muon and AdamW."""

    group = {"use_muon": True}

    def drawn_settings(self) -> dict:
        draw = self.draw
        return {
            "lr": 0.02, "momentum": draw.choice([0.0, 0.9]), "nesterov": draw.random() < 0.5,
            "weight_decay": draw.choice([0.0, 0.1]), "ns_steps": draw.choice([1, 5]),
            "adjust_lr_fn": draw.choice([None, "original", "match_rms_adamw"]),
        }  # fmt: skip

    def make(self, parameters: list[nn.Parameter]) -> Muon:
        groups = [
            {"params": (each for each in parameters if each.ndim == 2), "use_muon": True},
            {"params": (each for each in parameters if each.ndim == 1), "use_muon": False},
        ]
        return Muon(groups, **self.settings, options=BF16)

    def make_peers(self, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        matrices = [each for each in parameters if each.ndim == 2]
        others = [each for each in parameters if each.ndim == 1]
        decay = self.settings["weight_decay"]
        return [
            torch.optim.Muon(matrices, **self.settings),
            torch.optim.AdamW(others, lr=0.02, weight_decay=decay),
        ]

    def load_into_another(self) -> None:
        saved = copy.deepcopy(self.optimizer.state_dict())
        groups = [group["params"] for group in self.optimizer.param_groups]
        another = [{"params": each, "use_muon": each[0].ndim == 2} for each in groups]
        self.optimizer = Muon(another, **self.settings, options=BF16)
        self.optimizer.load_state_dict(saved)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_random_calls_are_torchs(seed):
    run(MuonPair, seed, [MuonPair.load_into_another])


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
    for take in (optimizer.add_param_group, lambda group: Muon([group])):
        with pytest.raises(InputError, match=message):
            take(group)
    assert len(optimizer.param_groups) == 1
    for model, message in (([], "no parameters"), (nn.Embedding(3, 3), "no trained matrix")):
        with pytest.raises(InputError, match=message):
            Muon(model)
