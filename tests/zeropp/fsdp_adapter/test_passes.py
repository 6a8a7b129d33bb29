"""What begins a pass, in all versions of FSDP2."""

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import PrescribedModel, backward, data_mesh, zero_config
from zeropp import shard


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
