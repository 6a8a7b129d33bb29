"""Two sharded models of a rank, the roots of one `Sharding`, train as one on one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import ranks
from tests.zeropp.failed_passes import GOES_ON
from zeropp import InputError, Sharding, ZeroConfig, optimizer_step, shard

STEPS, MICRO_BATCHES = 3, 4


def halves() -> nn.Sequential:
    """A model that is cut into its two parts; the second has the first's output as its input."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(6, 6) for _ in range(2))) for _ in range(2)))


def batches(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(STEPS, MICRO_BATCHES, 3, 6, generator=generator)


def train_whole() -> nn.Module:
    """One process, with the samples of both ranks."""
    model = halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.cat([batches(0), batches(1)], dim=1)
    for micro_batches in samples:
        for batch in micro_batches:
            (model(batch).square().mean() / len(micro_batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(("stage", "once"), [(1, False), (2, True), (3, False), (3, True)])
@ranks(2)
def test_passes_in_turn_train_as_one_model(stage: int, once: bool) -> None:
    """All forward passes of the first part come before its backward passes."""
    model = halves()
    config = {"zero_optimization": {"stage": stage}, "zeropp": {"reduce_gradients_once": once}}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    parts = [
        shard(part, mesh, ZeroConfig.from_json(config), units=list(part), keeps_root=True)
        for part in model
    ]
    joined = Sharding.join(model, parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro_batches in batches(dist.get_rank()):
        middles = [model[0](batch) for batch in micro_batches]
        received = [middle.detach().requires_grad_() for middle in middles]
        outputs = [model[1](each) for each in received]
        for index, output in enumerate(outputs):
            is_last = index == MICRO_BATCHES - 1
            parts[1].begin_micro_step(last=is_last)
            (output.square().mean() / MICRO_BATCHES).backward()
            parts[0].begin_micro_step(last=is_last)
            middles[index].backward(received[index].grad)
            has_means = [each.grad is not None for each in model.parameters()]
            assert not once or all(has_means) == any(has_means) == is_last
        optimizer_step(optimizer, joined, clip_grad=0.01)
    assert joined.traffic.take() == {
        key: STEPS * sent for key, sent in joined.expected_traffic(MICRO_BATCHES).items()
    }
    assert sum(joined.traffic.take().values()) == 0
    for own, expected in zip(model.parameters(), train_whole().parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), expected)


@GOES_ON
@ranks(2)
def test_a_failed_pass_of_a_part_must_be_discarded() -> None:
    model = halves()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    config = ZeroConfig.from_json({"zero_optimization": {"stage": 3}})
    joined = Sharding.join(model, [shard(part, mesh, config, units=list(part)) for part in model])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    joined.begin_micro_step(last=True)
    received = model[0](torch.ones(3, 6)).detach().requires_grad_()
    received.register_hook(_fail)
    with pytest.raises(RuntimeError, match="failed"):
        model[1](received).sum().backward()
    with pytest.raises(InputError, match="a backward pass ended with an exception"):
        optimizer_step(optimizer, joined)
    joined.discard_gradients()
    joined.begin_micro_step(last=True)
    model[1](model[0](torch.ones(3, 6))).sum().backward()
    assert optimizer_step(optimizer, joined).grad_norm > 0


def _fail(*_: object) -> None:
    raise RuntimeError("failed")
