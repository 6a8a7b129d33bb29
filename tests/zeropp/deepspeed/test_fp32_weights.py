"""A model in 16 bit is trained through fp32 weights, as DeepSpeed does."""

import pytest
import torch

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of, engine_of, run
from tests.zeropp.lora_model import add_adapters
from tests.zeropp.small_model import SmallModel, small_model
from zeropp import InputError
from zeropp.deepspeed.utils import safe_get_full_fp32_param
from zeropp.deepspeed.zero import Init

FORMATS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}}}
HALVES = (torch.bfloat16, torch.float16)


def in_16_bit(dtype: torch.dtype = torch.bfloat16) -> SmallModel:
    model = small_model().to(dtype)
    model.register_buffer("scale", torch.ones(3, dtype=dtype))
    return model


def check_like_fp32(model: SmallModel, **settings: object) -> None:
    """`model` trains as the same numbers in fp32, to the last bit."""
    expected = engine_of(in_16_bit().float(), **settings)
    engine = engine_of(model, **settings)
    assert run(engine, 2) == run(expected, 2)
    wanted = [*expected.module.parameters()]
    for own, other in zip(engine.module.parameters(), wanted, strict=True):
        weight = safe_get_full_fp32_param(own)
        assert weight.dtype == torch.float32
        assert torch.equal(weight, safe_get_full_fp32_param(other))


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
@ranks(2)
def test_updates_smaller_than_a_16_bit_step_are_not_lost(settings):
    """At lr 1e-5 a weight of 0.1 moves by 1e-5 per step; bf16 numbers there are 5e-4 apart."""
    adamw = {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}}
    for stage in (1, 3):
        check_like_fp32(in_16_bit(), stage=stage, optimizer=adamw, **settings)


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
@ranks(1)
def test_one_rank_and_both_types_in_one_unit(settings):
    mixed = in_16_bit()
    mixed.blocks[0].up.float()
    check_like_fp32(mixed, **settings)


@ranks(2)
def test_offloaded_and_recorded_models_have_fp32_weights_too():
    host = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    check_like_fp32(in_16_bit(), zero_optimization=host)
    with Init():
        recorded = in_16_bit()
    check_like_fp32(recorded, bf16={"enabled": True})


@ranks(2)
def test_frozen_weights_stay_in_16_bit_unless_the_optimizer_holds_them():
    model = in_16_bit()
    model.embedding.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    trained = [*model.blocks.parameters()]
    sgd = torch.optim.SGD(trained, lr=0.1)
    config = config_of(bf16={"enabled": True}) | {"optimizer": {}}
    engine, *_ = zeropp.initialize(model=model, optimizer=sgd, config=config)
    dtypes = {name: parameter.dtype for name, parameter in engine.module.named_parameters()}
    assert dtypes.pop("embedding.weight") == torch.bfloat16
    assert set(dtypes.values()) == {torch.float32} and model.scale.dtype == torch.bfloat16
    run(engine, 1)
    engine.module.blocks[1].requires_grad_(True)  # later, as in gradual unfreezing
    before = engine.module.blocks[1].up.weight.to_local().clone()
    run(engine, 1)
    assert not torch.equal(engine.module.blocks[1].up.weight.to_local(), before)


@ranks(2)
def test_adapters_that_are_added_later_are_trained_in_fp32():
    zero = {"stage": 3, "zero_quantized_nontrainable_weights": True}
    engine, *_ = zeropp.initialize(
        model=in_16_bit(), config=config_of(zero_optimization=zero, bf16={"enabled": True})
    )
    add_adapters(engine.module)
    for block in engine.module.blocks:
        block.up.down.bfloat16()
        block.up.up.bfloat16()
    engine.quantize_nontrainable_params()
    trained = [each for each in engine.module.parameters() if each.requires_grad]
    assert len(trained) == 8 and {parameter.dtype for parameter in trained} == {torch.float32}
    run(engine, 1)


@ranks(2)
def test_a_16_bit_weight_that_is_unfrozen_too_late_has_no_fp32_weight():
    zero = {"stage": 3, "zero_quantized_nontrainable_weights": True}
    model = in_16_bit()
    model.embedding.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    engine, *_ = zeropp.initialize(
        model=model, config=config_of(zero_optimization=zero, bf16={"enabled": True})
    )
    model.blocks[1].norm.requires_grad_(True)
    with pytest.raises(InputError, match="blocks.1.norm.weight is torch.bfloat16.*unfrozen"):
        engine.quantize_nontrainable_params()
