"""torchtitan's Llama on CPUs, sharded by its own function, with and without ZeRO++."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.convergence.torchtitan_llama import sharded_llama
from tests.ranks import ranks

PLAIN = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 2}}
ZERO = {
    "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
}  # fmt: skip
STEPS, LAYERS = 3, 2


def losses(model: nn.Module, tensor_size: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    generator = torch.Generator().manual_seed(dist.get_rank() // tensor_size)
    measured = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 2000, (2, 17), generator=generator)
        logits = model(tokens[:, :-1], torch.arange(16).expand(2, 16))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        measured.append(loss.item())
    return measured


@pytest.mark.parametrize("tensor_size", [1, 2])
@ranks(4, timeout=120)
def test_unquantized_it_learns_the_same_and_with_zeropp_it_sends_less(tensor_size):
    pytest.importorskip("torchtitan", exc_type=ImportError)  # here: only ranks need it
    expected = losses(sharded_llama(None, tensor_size, LAYERS)[0], tensor_size)
    sent = []
    for config in (PLAIN, PLAIN | {"zero_optimization": ZERO}):
        model, parallelize = sharded_llama(config, tensor_size, LAYERS)
        measured = losses(model, tensor_size)
        if config is PLAIN:
            assert measured == pytest.approx(expected, rel=1e-6)
        assert measured[0] == pytest.approx(expected[0], rel=5e-3)  # what INT8 may move a loss by
        (attached,) = parallelize.attached
        assert attached.traffic.sent == {
            key: STEPS * num_bytes for key, num_bytes in attached.expected_traffic().items()
        }
        crossing = (n for (_, hop), n in attached.traffic.sent.items() if hop == "across_nodes")
        total = torch.tensor(sum(crossing))
        dist.all_reduce(total)
        sent.append(total.item())
    assert 5 * sent[1] < sent[0]
