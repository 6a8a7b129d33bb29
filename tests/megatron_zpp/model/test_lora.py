"""LoRA adapters: the model starts unchanged, and only the adapters are trained."""

import pytest
import torch
import torch.nn.functional as F

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.model.lora import initialize_adapters, is_adapter
from megatron_zpp.model.part import Part
from megatron_zpp.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_zpp.settings.config import LoraConfig, ModelConfig
from zeropp.errors import InputError

CONFIG = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, hidden_dropout=0.0,
    attention_dropout=0.0, swiglu=True, position_embedding_type="rope",
)  # fmt: skip
TOKENS = torch.arange(8)[None]


def lora(**changes: object) -> LoraConfig:
    return LoraConfig(pretrained_checkpoint="m", lora_rank=2, **changes)


def model_with(config: LoraConfig) -> GPT:
    model = GPT(CONFIG, 64, Part(lora=config))
    initialize(model, 1, CONFIG)
    initialize_adapters(model, 1)
    return model


def test_the_model_starts_unchanged_with_the_same_names():
    plain = GPT(CONFIG, 64)
    initialize(plain, 1, CONFIG)
    model = model_with(lora())
    assert torch.equal(model(TOKENS), plain(TOKENS))
    names = {name for name, _ in model.named_parameters() if not is_adapter(name)}
    assert names == {name for name, _ in plain.named_parameters()}
    assert all(
        parameter.requires_grad == is_adapter(name) for name, parameter in model.named_parameters()
    )


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_adds_the_scaled_product_of_dropped_inputs(kind):
    layer = kind(6, 4, True, lora=lora(lora_alpha=3.0, lora_dropout=0.5))
    x = torch.randn(5, 6)
    down, up = layer.lora_A.weight, layer.lora_B.weight
    expected = F.linear(x, layer.weight + 3.0 / 2 * up @ down, layer.bias)
    assert torch.allclose(layer.eval()(x), expected, atol=1e-6)
    torch.manual_seed(4)
    output = layer.train()(x)
    torch.manual_seed(4)
    expected = F.linear(x, layer.weight, layer.bias) + 1.5 * F.dropout(x, 0.5) @ down.T @ up.T
    assert torch.allclose(output, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("targets", "count"),
    [(None, 5), (("qkv",), 1), (("output",), 2), (("mlp.gate", "attention.output"), 2)],
)
def test_targets_are_endings_of_names(targets, count):
    model = GPT(CONFIG, 64, Part(lora=lora(lora_target_modules=targets)))
    adapters = sum(hasattr(each, "lora_A") for each in model.modules())
    assert adapters == 2 * count


def test_an_unknown_target_raises_with_the_nearest_names():
    with pytest.raises(InputError, match=r"mlp\.gates names no.*did you mean mlp\.gate.*there are"):
        GPT(CONFIG, 64, Part(lora=lora(lora_target_modules=("qkv", "mlp.gates"))))


def test_adapters_have_the_standard_deviation_of_pefts():
    config = ModelConfig(num_layers=1, hidden_size=256, num_attention_heads=2)
    layer = GPT(config, 64, Part(lora=LoraConfig(pretrained_checkpoint="m", lora_rank=64)))
    initialize_adapters(layer, 7)
    lora_a = layer.blocks[0].attention.qkv.lora_A.weight
    # The standard deviation of n = 64 * 256 draws has itself one of 1 / sqrt(2 n); 4 are allowed.
    assert lora_a.std().item() == pytest.approx((3 * 256) ** -0.5, rel=4 * (2 * 64 * 256) ** -0.5)
    assert not layer.blocks[0].attention.qkv.lora_B.weight.any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_rank": 4}, "--pretrained-checkpoint"),
        ({"lora_target_modules": ("qkv",)}, "needs --lora-rank"),
        ({"lora_rank": -1}, "at least 0"),
        ({"lora_alpha": 0.0}, "more than 0"),
    ],
)
def test_invalid_settings_raise(fields, message):
    with pytest.raises(InputError, match=message):
        LoraConfig(**fields).check()
