"""Trained parameters are gathered with the module that uses them, wherever they are registered."""

import peft
import pytest
import torch
from torch import nn

import zeropp
from tests.megatron_zpp.interchange.foreign_models import llama
from tests.ranks import ranks
from tests.zeropp.deepspeed import test_peft
from tests.zeropp.lora_model import (
    add_adapters,
    engine_losses,
    expected_losses,
    with_quantized_weights,
)
from tests.zeropp.small_model import HIDDEN_SIZE, SmallModel, small_model
from zeropp import InputError
from zeropp.sharding.cut import places_of, trained_subunits
from zeropp.wire.quantized_shard import is_quantized

STEPS = 2
MIXZ = {"stage": 3, "zero_quantized_nontrainable_weights": True}
CONFIG = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": MIXZ,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
}  # fmt: skip


class Gated(nn.Module):
    """A frozen layer, and a trained gain and matrix in dicts that nobody calls."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, width = base, base.out_features
        self.gains = nn.ParameterDict({"own": torch.ones(width)})
        self.turns = nn.ParameterDict({"own": torch.randn(width, width) / width})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.base(x) * self.gains["own"]
        return x + x @ self.turns["own"]


class Attending(nn.Module):
    """PyTorch's attention, which reads the weight of its output layer and does not call that."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.MultiheadAttention(HIDDEN_SIZE, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.core(x, x, x, need_weights=False)[0]


def with_dicts() -> SmallModel:
    model = small_model().requires_grad_(False)
    for block in model.blocks:
        block.up = Gated(block.up)
    return model


def with_trained_biases() -> SmallModel:
    """Layers that own a trained and a frozen parameter each."""
    model = small_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def with_attention() -> SmallModel:
    model = small_model()
    for index in range(len(model.blocks)):
        model.blocks[index] = Attending()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("out_proj" in name)
    return model


class Experts(nn.Module):
    """Layers with adapters, of which a pass takes the second."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(x)


def with_experts() -> SmallModel:
    model = small_model()
    for index in range(len(model.blocks)):
        model.blocks[index] = Experts()
    return add_adapters(model)


MODELS = {
    "dicts": with_dicts,
    "biases": with_trained_biases,
    "attention": with_attention,
    "experts": with_experts,
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("dicts", {}),
        ("biases", {}),
        ("attention", {}),
        ("attention", {"zero_hpz_partition_size": 2}),
        ("experts", {}),
    ],
    ids=["dicts", "biases", "attention", "attention-hpZ", "experts"],
)
@ranks(4, ranks_per_node=2)
def test_training_is_that_of_the_rounded_weights(kind, more):
    config = CONFIG | {"zero_optimization": MIXZ | more, "train_micro_batch_size_per_gpu": 1}
    expected = expected_losses(with_quantized_weights(MODELS[kind](), 4), STEPS, 2, 4)
    engine, *_ = zeropp.initialize(model=MODELS[kind](), config=config)
    assert engine_losses(engine, STEPS) == pytest.approx(expected, rel=1e-5)
    for parameter in engine.module.parameters():
        assert is_quantized(parameter) == (parameter.ndim > 1 and not parameter.requires_grad)


@ranks(2)
def test_attention_that_is_frozen_afterwards():
    """Nothing is apart where all is trained when it is sharded."""
    model = with_attention()
    expected = expected_losses(with_quantized_weights(model, 2), STEPS, 2, 2)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    engine, *_ = zeropp.initialize(model=model.requires_grad_(True), config=CONFIG)
    for name, parameter in engine.module.named_parameters():
        parameter.requires_grad_(name in trained)
    engine.optimizer.quantize_nontrainable_params()
    assert engine_losses(engine, STEPS) == pytest.approx(expected, rel=1e-5)


@ranks(2)
def test_a_parameter_that_nothing_would_gather_is_named():
    engine, *_ = zeropp.initialize(model=small_model(), config=CONFIG)
    engine.module.requires_grad_(False)
    engine.module.blocks[1].extra = nn.ParameterDict({"gain": torch.ones(HIDDEN_SIZE)})
    with pytest.raises(InputError, match=r"blocks\.1\.extra\.gain was added"):
        engine.optimizer.quantize_nontrainable_params()


def test_a_trained_weight_shared_with_its_unit_stays_in_the_unit():
    model = with_trained_biases().blocks[0]
    model.shared = model.up.bias
    names = {parameter: name for name, parameter in model.named_parameters()}
    trained = {
        names[parameter]
        for parameters in trained_subunits(model, places_of(model)).values()
        for parameter in parameters
    }
    assert trained == {"norm.bias", "down.bias"}
    block = small_model().blocks[0]
    assert trained_subunits(block, places_of(block)) == {}


def two_of_which_one_is_active(model: nn.Module) -> peft.PeftModel:
    model = test_peft.converted(model, ("q_proj", "v_proj"))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("other")
    return model


@ranks(2)
def test_an_adapter_that_is_not_active():
    expected = test_peft.plain_losses(
        with_quantized_weights(two_of_which_one_is_active(llama()), 2)
    )
    config = test_peft.config_of(test_peft.MIXZ)
    engine, *_ = zeropp.initialize(model=llama(), config=config)
    two_of_which_one_is_active(engine.module)
    engine.optimizer.quantize_nontrainable_params()
    assert test_peft.losses_of(engine) == pytest.approx(expected, rel=test_peft.CLOSE)
