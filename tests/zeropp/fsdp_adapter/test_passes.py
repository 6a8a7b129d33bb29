"""Hooks of engines that are gone: freed at any time, also while an optimizer calls its hooks."""

import gc
import weakref

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of
from tests.zeropp.prescribed_gradients import PrescribedModel, backward, data_mesh, zero_config
from zeropp import shard

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
    for _ in range(3):  # each takes away what the one before has left
        engine_of()
        gc.collect()
    assert len(hooks) <= held


@ranks(2)
def test_a_model_may_take_no_inputs_where_fsdp2_expects_some():
    """As it does on GPUs before torch 2.13, which move inputs to the device."""
    begin = FSDPState._root_pre_forward

    def move_inputs(state, module, args, kwargs):
        moved = [tuple(args)] if args else [()] if kwargs else []
        return moved[0], begin(state, module, args, kwargs)[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPState, "_root_pre_forward", move_inputs)
        sharding = shard(PrescribedModel([[(4, 3)]]), data_mesh(), zero_config({"stage": 3}))
        backward(sharding, [torch.full((4, 3), 2.0)])
    (weight,) = sharding.model.parameters()
    assert (weight.grad.to_local() == 2.0).all()
