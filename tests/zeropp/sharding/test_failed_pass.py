"""An exception in a pass, caught: the step repeated gives the gradients of an undisturbed one."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE, data_mesh, zero_config
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError, Sharding, initialize, optimizer_step, shard


class OutOfMemory(RuntimeError):
    pass


def fail_once(*_: object) -> None:
    raise OutOfMemory


def micro_batch(sharding: Sharding, index: int, *, last: bool) -> torch.Tensor:
    tokens = tokens_of(index).chunk(4)[dist.get_rank()]
    with sharding.micro_step(last=last):
        loss = loss_of(sharding.model, tokens)
        loss.backward()
    return loss


def gradients(sharding: Sharding) -> list[torch.Tensor]:
    return [parameter.grad.to_local() for parameter in sharding.model.parameters()]


def undisturbed(zero: dict) -> list[torch.Tensor]:
    sharding = shard(small_model(), data_mesh(), zero_config(zero, 2))
    for index in range(2):
        micro_batch(sharding, index, last=index == 1)
    return gradients(sharding)


def require_equal(sharding: Sharding, expected: list[torch.Tensor]) -> None:
    for gradient, other in zip(gradients(sharding), expected, strict=True):
        assert torch.equal(gradient, other) and torch.isfinite(other).all()


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 3}, ALL_THREE], ids=str)
@ranks(4)
def test_passes_that_failed_are_said_and_repeated(zero: dict):
    sharding = shard(small_model(), data_mesh(), zero_config(zero, 2))
    micro_batch(sharding, 0, last=False)
    handle = sharding.model.blocks[1].up.register_forward_pre_hook(fail_once)
    with pytest.raises(OutOfMemory):
        micro_batch(sharding, 1, last=True)
    handle.remove()
    micro_batch(sharding, 1, last=True)
    require_equal(sharding, undisturbed(zero))
    sharding.discard_gradients()
    micro_batch(sharding, 0, last=False)
    handle = sharding.model.blocks[1].norm.register_full_backward_hook(fail_once)
    with pytest.raises(OutOfMemory):
        micro_batch(sharding, 1, last=True)
    handle.remove()
    with pytest.raises(InputError, match="gradients of this step are incomplete"):
        micro_batch(sharding, 1, last=True)
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="gradients of this step are incomplete"):
        optimizer_step(optimizer, sharding)
    sharding.discard_gradients()
    for index in range(2):
        micro_batch(sharding, index, last=index == 1)
    require_equal(sharding, undisturbed(zero))


@pytest.mark.parametrize("stage", [2, 3])
@ranks(4)
def test_the_optimizer_s_zero_grad_is_enough_where_all_gradients_are_sharded(stage: int):
    sharding = shard(small_model(), data_mesh(), zero_config({"stage": stage}, 2))
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.1)
    handle = sharding.model.blocks[1].norm.register_full_backward_hook(fail_once)
    with pytest.raises(OutOfMemory):
        micro_batch(sharding, 0, last=False)
    handle.remove()
    optimizer.zero_grad()
    for index in range(2):
        micro_batch(sharding, index, last=index == 1)
    require_equal(sharding, undisturbed({"stage": stage}))


@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=str)
@ranks(4)
def test_an_engine_goes_on_after_zero_grad(offload: dict):
    json = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2} | offload,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    losses = []
    for disturbed in (False, True):
        engine, *_ = initialize(model=small_model(), config=json)
        for step in range(3):
            tokens = tokens_of(step).chunk(4)[dist.get_rank()]
            if disturbed and step == 1:
                handle = engine.module.blocks[1].norm.register_full_backward_hook(fail_once)
                with pytest.raises(OutOfMemory):
                    engine.backward(loss_of(engine, tokens))
                handle.remove()
                with pytest.raises(InputError):
                    engine.step()
                engine.zero_grad()
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
