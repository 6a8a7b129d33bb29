"""The state dict of an offloaded model holds the fp32 weights, whole precision both ways."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, gathered_parameters, run
from tests.zeropp.small_model import small_model
from zeropp import Engine

ON_HOST = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
BF16 = {"enabled": True}
DELAYED = {"delayed_param_update": True, "delayed_param_update_warmup": 1}


def offloaded(**settings: object) -> Engine:
    return engine_of(zero_optimization=ON_HOST, bf16=BF16, **settings)


@pytest.mark.parametrize("settings", [{}, {"zeropp": DELAYED}], ids=["at once", "delayed"])
@ranks(2)
def test_the_fp32_weights_are_shown_and_loaded(settings):
    engine, again = offloaded(**settings), offloaded(**settings)
    run(engine, 3)
    masters = [master.full_tensor() for master in engine.optimizer.masters.values()]
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(engine.module, options=options)
    assert list(whole) == [name for name, _ in small_model().named_parameters()]
    for value, master in zip(whole.values(), masters, strict=True):
        assert value.dtype == torch.float32 and torch.equal(value, master.detach())
    kept = engine.module.state_dict(keep_vars=True)
    assert all(kept[name] is each for name, each in engine.module.named_parameters())
    part = engine.module.blocks[1].state_dict()["up.weight"]
    assert torch.equal(part, whole["blocks.1.up.weight"])
    for load in (
        lambda: again.module.load_state_dict(engine.module.state_dict()),
        lambda: set_model_state_dict(again.module, dict(whole), options=options),
    ):
        run(again, 1)
        load()
        for master, expected in zip(again.optimizer.masters.values(), masters, strict=True):
            assert torch.equal(master.full_tensor(), expected)
        for name, rounded in gathered_parameters(again.module).items():
            assert torch.equal(rounded, whole[name].bfloat16())
