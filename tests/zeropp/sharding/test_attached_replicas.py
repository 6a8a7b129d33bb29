"""Replicas of shards (HSDP), attached: FSDP2 sums over the replicas itself."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zeropp
from tests.ranks import ranks
from tests.zeropp.sharding.test_attach import BF16, PLAIN, STEPS, ZERO, ZEROPP, sharded, train
from tests.zeropp.small_model import small_model
from zeropp import InputError


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@ranks(4)
def test_replicas_of_shards(policy):
    """Shards in a node, replicas across."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    expected = train(sharded(mesh, mp_policy=policy))
    model = sharded(mesh, mp_policy=policy)
    attached = zeropp.attach(model, PLAIN)
    close = 1e-5 if policy is not BF16 else 0.02
    assert train(model) == pytest.approx(expected, rel=close, abs=close)
    sent = attached.traffic.take()
    assert sent == {
        key: STEPS * num_bytes for key, num_bytes in attached.expected_traffic().items()
    }


class Branch(nn.Module):
    """The gradients of `first` are 0, if it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: torch.Tensor, uses_first: bool) -> torch.Tensor:
        return self.last(self.first(x) if uses_first else x)


@ranks(4)
def test_replicas_agree():
    """Replicas that differ are refused. A parameter that one of them has used, with gradients of 0,
    is stepped on all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    is_second = dist.get_rank() >= 2
    other = ZEROPP | {"zero_optimization": ZERO | {"zero_quantized_gradients": False}}
    with pytest.raises(InputError, match=r"_gradients is True on rank \d and False on rank \d"):
        zeropp.attach(sharded(mesh), other if is_second else ZEROPP)
    frozen = small_model()
    frozen.blocks[0].up.requires_grad_(not is_second)
    with pytest.raises(InputError, match=r"up.weight is .* trained on rank \d and .* frozen on"):
        zeropp.attach(fully_shard(frozen, mesh=mesh), PLAIN)
    model = fully_shard(Branch(), mesh=mesh)
    zeropp.attach(model, PLAIN)
    model(torch.ones(2, 4), not is_second).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
