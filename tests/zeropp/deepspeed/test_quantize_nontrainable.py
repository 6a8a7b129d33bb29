"""`quantize_nontrainable_params()`: its effect on optimizers, and on models without one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import zeropp
from tests.ranks import ranks
from tests.zeropp.lora_model import add_adapters, engine_losses, lora_model, with_quantized_weights
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError
from zeropp.wire.frozen_weights import is_quantized

MIXZ = {"stage": 3, "zero_quantized_nontrainable_weights": True}
CONFIG = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": MIXZ}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


@ranks(2)
def test_a_model_without_an_optimizer_is_quantized_too():
    engine, *_ = zeropp.initialize(model=small_model(), config=CONFIG)
    engine.module.requires_grad_(False)
    engine.quantize_nontrainable_params()
    assert is_quantized(engine.module.blocks[0].up.weight)
    with torch.no_grad():
        loss = loss_of(engine, tokens_of(0)).item()
        expected = loss_of(
            with_quantized_weights(small_model().requires_grad_(False), 2), tokens_of(0)
        ).item()
    assert loss == pytest.approx(expected, rel=1e-5)


@ranks(1)
def test_an_optimizer_of_nothing_is_an_error():
    frozen = small_model().requires_grad_(False)
    with pytest.raises(InputError, match="all parameters are frozen"):
        zeropp.initialize(model=frozen, config=CONFIG | {"optimizer": ADAMW})


@ranks(2)
def test_names_in_an_optimizer_stay_those_of_its_parameters():
    model = small_model()
    optimizer = torch.optim.SGD(
        [
            {"params": list(model.blocks.named_parameters(prefix="blocks"))},
            {"params": [("embedding.weight", model.embedding.weight)], "lr": 0.0},
        ],
        lr=0.1,
    )
    engine, *_ = zeropp.initialize(model=model, optimizer=optimizer, config=CONFIG)
    add_adapters(engine.module)
    engine.optimizer.quantize_nontrainable_params()
    first, second = optimizer.param_groups
    named = dict(engine.module.named_parameters())
    assert [named[name] for name in first["param_names"]] == first["params"]
    assert len(first["params"]) == 8 and second["params"] == second["param_names"] == []


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_adapters_that_are_added_later_need_no_process_groups_of_their_own(stage):
    zero = {"zero_optimization": MIXZ | {"stage": stage}}
    engine, *_ = zeropp.initialize(model=small_model(), config=CONFIG | zero)
    before = dict(c10d._world.pg_names)
    add_adapters(engine.module)
    engine.quantize_nontrainable_params()
    assert engine.sharding.units[1] is not engine.module.blocks[1]  # a unit of adapters
    assert dict(c10d._world.pg_names) == before


@ranks(2)
def test_parameters_may_be_frozen_and_unfrozen_later():
    engine, *_ = zeropp.initialize(model=lora_model(), config=CONFIG | {"optimizer": ADAMW})
    engine_losses(engine, 1)
    gain, thin = engine.module.blocks[0].norm.weight, engine.module.blocks[1].up.down.weight
    gain.requires_grad_(True)
    thin.requires_grad_(False)
    engine.quantize_nontrainable_params()
    before = gain.full_tensor().clone(), thin.full_tensor().clone()
    engine_losses(engine, 2)
    assert is_quantized(thin) and torch.equal(thin.full_tensor(), before[1])
    assert not torch.equal(gain.full_tensor(), before[0])
    everywhere = [torch.empty_like(before[0]) for _ in range(2)]
    dist.all_gather(everywhere, gain.full_tensor())
    assert torch.equal(*everywhere)
