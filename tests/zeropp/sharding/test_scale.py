"""Many nodes, simulated: the traffic of a step under a fake process group equals the formulas."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.cluster.fake_ranks import counted_step, fake_rank
from tests.zeropp.prescribed_gradients import ALL_THREE, zero_config
from zeropp.sharding.forecast import node_bytes

NODES, PER_NODE = 6, 4
RANKS = NODES * PER_NODE
WIDTH, BLOCKS = 1536, 3
M = 2 * BLOCKS * WIDTH * WIDTH  # bytes of the model in 16 bit


class Wide(nn.Module):
    """Square matrices only, all of them in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.relu(block(x))
        return x


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, WIDTH)).float().sum()


def sent_by_a_node(zero: dict, num_micro_batches: int = 1) -> Counter:
    """Bytes by (purpose, hop) that the ranks of one node send, each counted by its own ledger."""
    total: Counter[tuple[str, str]] = Counter()
    config = zero_config(zero, PER_NODE, bf16={"enabled": True})
    for rank in range(PER_NODE, 2 * PER_NODE):
        with fake_rank(rank, RANKS) as mesh:
            sharding = counted_step(Wide, loss, mesh, config, num_micro_batches)
            assert sharding.traffic.sent == sharding.expected_traffic(num_micro_batches)
            total.update(sharding.traffic.take())
            forecast = node_bytes(sharding.plan, num_micro_batches)
    assert total == forecast
    return total


def bytes_across_nodes(sent: Counter) -> float:
    return sum(num_bytes for (_, hop), num_bytes in sent.items() if hop == "across_nodes") / M


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_zero3_sends_what_the_formula_says(num_micro_batches):
    """Weights twice around a ring of all ranks, gradients across nodes in one of two hops."""
    sent = sent_by_a_node({"stage": 3}, num_micro_batches)
    ring, hop = (RANKS - 1) / RANKS, (NODES - 1) / NODES
    assert bytes_across_nodes(sent) == pytest.approx(num_micro_batches * (2 * ring + hop), rel=1e-3)
    assert bytes_across_nodes(sent) <= 3 * num_micro_batches


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_all_three_send_what_the_formula_says(num_micro_batches):
    """INT8 and a scale for 256 once per step; INT4 and a scale for 128 for each micro-batch."""
    sent = sent_by_a_node(ALL_THREE | {"zero_hpz_partition_size": PER_NODE}, num_micro_batches)
    weights, gradients = (8 + 16 / 256) / 16, (4 + 16 / 128) / 16
    expected = (weights + num_micro_batches * gradients) * (NODES - 1) / NODES
    assert bytes_across_nodes(sent) == pytest.approx(expected, rel=1e-3)
    assert sent["weights_backward", "across_nodes"] == 0


def test_each_component_saves_its_own_bytes():
    zero3 = bytes_across_nodes(sent_by_a_node({"stage": 3}))
    hop = (NODES - 1) / NODES
    saved = {
        "zero_quantized_weights": 2 * ((RANKS - 1) / RANKS - hop * (8 + 16 / 256) / 16),
        "zero_quantized_gradients": hop * (1 - (4 + 16 / 128) / 16),
    }
    for key, share in saved.items():
        assert zero3 - bytes_across_nodes(sent_by_a_node({"stage": 3, key: True})) == pytest.approx(
            share, 0.01
        )
    hpz = bytes_across_nodes(sent_by_a_node({"stage": 3, "zero_hpz_partition_size": PER_NODE}))
    assert hpz == pytest.approx(2 * hop, rel=1e-3)
