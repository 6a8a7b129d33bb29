"""Models as in tests of DeepSpeed and of trainers: parts used late, several types, made under Init.

Losses are those of a plain loop; sums over the ranks are in another order, as in test_engine: 1e-5.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import skip_init

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.families import WIDTH as DIM
from tests.zeropp.deepspeed.families import Dangling, Line, Repeated
from tests.zeropp.deepspeed.families import seeded as built
from tests.zeropp.deepspeed.small_engine import config_of, engine_of, gathered_parameters, run
from tests.zeropp.lora_model import add_adapters
from tests.zeropp.small_model import SmallModel, small_model
from zeropp import InputError, deepspeed
from zeropp.deepspeed.utils import safe_get_full_fp32_param
from zeropp.deepspeed.zero import Init

PLAIN = {"type": "SGD", "params": {"lr": 0.1}}


def inputs_of(step: int) -> torch.Tensor:
    return torch.randn(6, DIM, generator=torch.Generator().manual_seed(step))


@ranks(1)
def test_attributes_of_the_model_stay_its_own():
    assert engine_of(Repeated()).id == 3


@pytest.mark.parametrize("by_json", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
@ranks(1)
def test_a_group_without_parameters(stage, by_json):
    model = Repeated()
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [*model.parameters()]}]
    if by_json:
        given = {"model_parameters": groups}
    else:
        given = {"optimizer": torch.optim.AdamW(groups)}
    engine, *_ = zeropp.initialize(model=model, config=config_of(stage=stage), **given)
    before = gathered_parameters(engine.module)
    engine.backward(engine(inputs_of(0)))
    engine.step()
    after = gathered_parameters(engine.module)
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("stages", [(3, 3), (1, 2), (0, 3)])
@ranks(2)
def test_one_loss_of_two_engines(stages):
    """Whichever engine begins the backward pass, both divide by their micro-batches once."""
    models = [built(Repeated), built(Dangling)]
    plain = copy.deepcopy(models)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in plain]
    engines = [
        engine_of(
            model,
            stage=stage,
            optimizer=PLAIN,
            gradient_clipping=0.0,
            train_batch_size=12,
            micro_batches=2,
        )
        for model, stage in zip(models, stages, strict=True)
    ]
    for step in range(3):
        for number in range(2):
            x = inputs_of(2 * step + number)
            (0.5 * plain[0](x) + 0.25 * plain[1](x).loss).backward()
            x = x.chunk(2)[dist.get_rank()]
            loss = engines[0](x) + 0.5 * engines[1](x).loss
            backward = (torch.Tensor.backward, engines[0].backward, engines[1].backward)[step]
            backward(loss)
            for each in engines:
                each.step()
        for each in optimizers:
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for engine, model in zip(engines, plain, strict=True):
        for name, weight in gathered_parameters(engine.module).items():
            expected = model.get_parameter(name).detach()
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5)


@ranks(2)
def test_layers_without_first_values_under_init():
    with deepspeed.zero.Init():
        model = nn.Sequential(skip_init(nn.Linear, DIM, DIM), nn.Linear(DIM, DIM))
    engine = engine_of(model)
    with deepspeed.zero.GatheredParameters([*model[0].parameters()], modifier_rank=0):
        if dist.get_rank() == 0:
            for parameter in model[0].parameters():
                nn.init.constant_(parameter, 0.1)  # memory may hold any numbers
    engine.backward(engine(inputs_of(0)).mean())
    engine.step()
    assert engine.was_step_applied()


SAME = 1e-5


@ranks(1)
def test_a_model_has_one_engine():
    for make in (Line, small_model):
        model = make()
        engine = engine_of(model)
        with pytest.raises(InputError, match="sharded already, by an earlier call: go on with the"):
            engine_of(model)
        assert engine.module is model


@pytest.mark.parametrize("stage", [0, 3])
@ranks(2)
def test_an_engine_made_inside_the_context_that_records_a_model(stage):
    expected = run(engine_of(stage=stage), steps=2)
    with deepspeed.zero.Init():
        torch.manual_seed(5)
        engine = engine_of(SmallModel(), stage=stage)
        with deepspeed.zero.Init():
            other = SmallModel()
    assert run(engine, steps=2) == expected
    run(engine_of(other, stage=stage), steps=1)


@pytest.mark.parametrize("writer", [0, 1])
@ranks(2)
def test_what_a_rank_writes_before_the_model_is_sharded(writer):
    with deepspeed.zero.Init():
        model = small_model()
    weight = model.blocks[0].up.weight
    with zeropp.zero.GatheredParameters(weight, modifier_rank=writer):
        if dist.get_rank() == writer:
            nn.init.constant_(weight, 7.0 + writer)
    engine = engine_of(model)
    assert gathered_parameters(engine.module)["blocks.0.up.weight"].unique().tolist() == [
        7 + writer
    ]


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
    for stage in range(4):
        mixed = in_16_bit()
        mixed.blocks[0].up.float()
        check_like_fp32(mixed, stage=stage, **settings)


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
