"""torchtitan's Llama on CPUs, sharded by its own function, with and without ZeRO++."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.convergence.torchtitan_llama import sharded_llama
from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.sharding.foreign_experts import HAS_GROUPS, NO_GROUPS
from zeropp.sharding.attach import Attached

PLAIN = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 2}}
STEPS, LAYERS, EXPERT_STEPS = 3, 2, 2


def losses(
    model: nn.Module, tensor_size: int = 1, steps: int = STEPS, lr: float = 1e-3
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=True)
    generator = torch.Generator().manual_seed(dist.get_rank() // tensor_size)
    measured = []
    for _ in range(steps):
        tokens = torch.randint(0, 2000, (2, 17), generator=generator)
        logits = model(tokens[:, :-1], torch.arange(16).expand(2, 16))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        measured.append(loss.item())
    return measured


def crossing(attached: Attached, steps: int) -> int:
    """The bytes that all ranks have sent across nodes, after the ledger was compared."""
    sent = attached.traffic.sent
    assert sent == {key: steps * each for key, each in attached.expected_traffic().items()}
    total = torch.tensor(sum(each for (_, hop), each in sent.items() if hop == "across_nodes"))
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("tensor_size", [1, 2])
@ranks(4, timeout=120)
def test_unquantized_it_learns_the_same_and_with_zeropp_it_sends_less(tensor_size):
    pytest.importorskip("torchtitan", exc_type=ImportError)  # here: only ranks need it
    expected = losses(sharded_llama(None, tensor_size, LAYERS)[0], tensor_size)
    sent = []
    for config in (PLAIN, PLAIN | {"zero_optimization": ALL_THREE}):
        model, parallelize = sharded_llama(config, tensor_size, LAYERS)
        measured = losses(model, tensor_size)
        if config is PLAIN:
            assert measured == pytest.approx(expected, rel=1e-6)
        assert measured[0] == pytest.approx(expected[0], rel=5e-3)  # what INT8 may move a loss by
        (attached,) = parallelize.attached
        sent.append(crossing(attached, STEPS))
    assert 5 * sent[1] < sent[0]


@pytest.mark.skipif(not HAS_GROUPS, reason=NO_GROUPS)
@ranks(4, timeout=180)
def test_experts_are_attached_on_a_mesh_of_their_own():
    """A block is one unit with two parameter groups."""
    pytest.importorskip("torchtitan", exc_type=ImportError)
    from tests.zeropp.integrations.torchtitan_experts import sharded_qwen3

    options = {"steps": EXPERT_STEPS, "lr": 3e-4}
    expected = losses(sharded_qwen3(None)[0], **options)
    sent = []
    for config in (PLAIN, PLAIN | {"zero_optimization": ALL_THREE}):
        model, parallelize = sharded_qwen3(config)
        measured = losses(model, **options)
        if config is PLAIN:
            assert measured == pytest.approx(expected, rel=1e-6)
        last = torch.tensor([measured[-1], expected[-1]])
        dist.all_reduce(last)
        assert last[0].item() == pytest.approx(last[1].item(), rel=3e-3)
        (attached,) = parallelize.attached
        assert attached.skipped == {} and {"layers.0", "layers.1"} < {*attached.units}
        sent.append(crossing(attached, EXPERT_STEPS))
    assert 5 * sent[1] < sent[0]
