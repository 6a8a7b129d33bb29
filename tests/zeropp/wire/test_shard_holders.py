"""Holders of shards that are gone: freed at any time, also while an optimizer calls its hooks."""

import gc
import weakref

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of
from zeropp.wire.shard_holders import holders

OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
@ranks(1)
def test_an_engine_may_be_freed_while_an_optimizer_calls_its_hooks(register):
    """As the garbage collector does, whenever it likes."""
    engines = []

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
    assert len(hooks) == held and not holders(object)
