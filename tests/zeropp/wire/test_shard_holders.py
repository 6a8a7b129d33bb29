"""Holders of shards that are gone: freed at any time, also while an optimizer calls its hooks."""

import gc
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of
from zeropp import attach
from zeropp.deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from zeropp.deepspeed.zero import GatheredParameters
from zeropp.wire.kept_weights import KeptWeights
from zeropp.wire.shard_holders import holders

OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
@ranks(1)
def test_an_engine_may_be_freed_while_an_optimizer_calls_its_hooks(register):
    """As the garbage collector does, whenever it likes."""
    engines, before = [], holders(object)

    def free(*_: object) -> None:
        engines.clear()
        while gc.collect():
            pass

    handle = register(free)
    try:
        engines += [engine_of(), engine_of(zero_optimization=OFFLOADED)]
        model = weakref.ref(engines[0].module)
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        torch.optim.SGD([parameter], lr=0.5).step()
    finally:
        handle.remove()
    assert parameter.tolist() == [0.5, 0.5] and model() is None
    hooks = handle.hooks_dict_ref()
    held = len(hooks)
    for _ in range(3):
        engine_of()
        gc.collect()
    assert len(hooks) == held and holders(object) == before


@ranks(2)
def test_what_is_told_of_writes_is_no_step_of_an_optimizer():
    engine = engine_of(zero_optimization={**OFFLOADED, "stage": 3})
    steps = []
    handle = register_optimizer_step_pre_hook(lambda *step: steps.append(step))
    try:
        parameter = next(engine.module.parameters())
        with GatheredParameters(parameter, modifier_rank=0):
            torch.nn.init.ones_(parameter)
        assert (safe_get_full_fp32_param(parameter) == 1).all()
        safe_set_full_fp32_param(parameter, torch.zeros(parameter.shape))
        assert (safe_get_full_fp32_param(parameter) == 0).all()
    finally:
        handle.remove()
    assert not steps


@ranks(1)
def test_a_model_that_is_detached_holds_nothing():
    before = holders(object)
    model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    attached = attach(model, {"zero_optimization": {"stage": 3}})
    assert [KeptWeights] == [type(holder) for holder in holders(object) if holder not in before]
    attached.detach()
    assert holders(object) == before
