"""The optimizer step: clipping by the global norm, unscaling, and skipping on all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import ranks
from tests.zeropp.small_model import HIDDEN_SIZE, VOCAB_SIZE, loss_of, small_model, tokens_of
from zeropp import LossScaler, ZeroConfig, optimizer_step, shard
from zeropp.optim.step_or_skip import global_zeros


def one_process(scale: float = 1.0):
    sharding = shard(small_model(), None, ZeroConfig())
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=1.0)
    (loss_of(sharding.model, tokens_of(0)) * scale).backward()
    return sharding, optimizer


def test_norm_and_clipping_agree_with_torch():
    sharding, optimizer = one_process()
    expected = small_model()
    loss_of(expected, tokens_of(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.25)
    result = optimizer_step(optimizer, sharding, clip_grad=0.25)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert result.grad_norm > 0.25 and not result.skipped
    for mine, theirs in zip(sharding.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs - theirs.grad, rtol=1e-6, atol=1e-7)
        assert mine.grad is None


def test_a_power_of_two_loss_scale_changes_nothing():
    plain, optimizer = one_process()
    scaled, scaled_optimizer = one_process(scale=1024.0)
    first = optimizer_step(optimizer, plain, clip_grad=0.0)
    second = optimizer_step(
        scaled_optimizer, scaled, clip_grad=0.0, scaler=LossScaler(scale=1024.0)
    )
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-6)
    for parameter, scaled_parameter in zip(
        plain.model.parameters(), scaled.model.parameters(), strict=True
    ):
        assert torch.equal(parameter, scaled_parameter)


@ranks(2)
def test_overflow_on_one_rank_skips_the_update_on_all():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    config = ZeroConfig.from_json({"zero_optimization": {"stage": 2}})
    sharding = shard(small_model(), mesh, config)
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=1.0)
    before = [p.full_tensor().clone() for p in sharding.model.parameters()]
    loss = loss_of(sharding.model, tokens_of(0))
    (loss * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    scaler = LossScaler(scale=4.0, hysteresis=1)
    result = optimizer_step(optimizer, sharding, clip_grad=1.0, scaler=scaler)
    assert result.skipped and scaler.scale == 2.0
    for parameter, old in zip(sharding.model.parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), old)
        assert parameter.grad is None


@pytest.mark.parametrize("stage", [0, 1, 3])
@ranks(4)
def test_zeros_are_counted_once_over_all_ranks(stage):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    config = ZeroConfig.from_json({"zero_optimization": {"stage": stage}})
    sharding = shard(small_model(), mesh, config)
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.0)
    few_words(sharding.model).backward()
    result = optimizer_step(optimizer, sharding, count_zeros=True)
    expected = small_model()
    few_words(expected).backward()
    zeros = sum((p.grad == 0).sum().item() for p in expected.parameters())
    assert result.num_zeros == zeros >= (VOCAB_SIZE - 7) * HIDDEN_SIZE


@ranks(4)
def test_a_rank_without_any_part_of_the_model_takes_part():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    config = ZeroConfig.from_json({"zero_optimization": {"stage": 3}})
    torch.manual_seed(0)
    model, alone = torch.nn.Linear(5, 2), torch.nn.Linear(5, 2)  # two rows: two ranks hold none
    alone.load_state_dict(model.state_dict())
    sharding = shard(model, mesh, config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(3, 5)).square().sum().backward()
    alone(torch.ones(3, 5)).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    result = optimizer_step(optimizer, sharding, clip_grad=1.0, count_zeros=True)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert result.num_zeros == 0


def test_more_zeros_than_fp32_can_count():
    zeros = [(tensor, tensor) for tensor in (torch.zeros(2**24), torch.zeros(1))]
    assert global_zeros(zeros, shard(small_model(), None, ZeroConfig())).item() == 2**24 + 1


def few_words(model: torch.nn.Module) -> torch.Tensor:
    """A loss in which only words below 7 take part: the others' embeddings get no gradient."""
    return model(tokens_of(0) % 7)[..., :7].square().mean()
