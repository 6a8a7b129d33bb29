"""LoRA adapters: the model starts unchanged, only they are trained, and they are merged."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron_zpp.capabilities.lora.adapters import Adapter, add_adapters, initialize_adapters
from megatron_zpp.capabilities.lora.merged_weights import CheckpointAdapters, MergedWeights
from megatron_zpp.capabilities.lora.settings import A, B, LoraConfig
from megatron_zpp.model.delta import is_of_delta
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.train.finetuning import InMemoryWeights
from zeropp.errors import InputError

CONFIG = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, hidden_dropout=0.0,
    attention_dropout=0.0, swiglu=True, position_embedding_type="rope",
)  # fmt: skip
TOKENS = torch.arange(8)[None]


def lora(**changes: object) -> LoraConfig:
    return LoraConfig(**{"pretrained_checkpoint": "m", "lora_rank": 2} | changes)


def model_with(config: LoraConfig) -> GPT:
    model = add_adapters(GPT(CONFIG, 64), config)
    initialize(model, 1, CONFIG)
    initialize_adapters(model, 1)
    return model


def test_the_model_starts_unchanged_with_the_same_names():
    plain = GPT(CONFIG, 64)
    initialize(plain, 1, CONFIG)
    model = model_with(lora())
    assert torch.equal(model(TOKENS), plain(TOKENS))
    names = {name for name, _ in model.named_parameters() if not is_of_delta(name)}
    assert names == {name for name, _ in plain.named_parameters()}
    assert all(
        parameter.requires_grad == is_of_delta(name) for name, parameter in model.named_parameters()
    )


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_adds_the_scaled_product_of_dropped_inputs(kind):
    layer, x = kind(6, 4, True), torch.randn(5, 6)
    layer.take(Adapter(scaling=1.5, dropout=0.5), dict(zip((A, B), layer.factors(2), strict=True)))
    down, up = layer.lora_A.weight, layer.lora_B.weight
    expected = F.linear(x, layer.weight + 1.5 * up @ down, layer.bias)
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
    model = add_adapters(GPT(CONFIG, 64), lora(lora_target_modules=targets))
    adapters = sum(hasattr(each, "lora_A") for each in model.modules())
    assert adapters == 2 * count


def test_an_unknown_target_raises_with_the_nearest_names():
    with pytest.raises(InputError, match=r"mlp\.gates names no.*did you mean mlp\.gate.*there are"):
        add_adapters(GPT(CONFIG, 64), lora(lora_target_modules=("qkv", "mlp.gates")))


MIXTURE = dict(num_experts=4, moe_ffn_hidden_size=12, moe_router_topk=2)
OF_EXPERTS = ("experts.gate", "experts.input", "experts.output")


def mixture_with(config: LoraConfig, **changes: object) -> GPT:
    model_config = replace(CONFIG, **MIXTURE | changes)
    model = add_adapters(GPT(model_config, 64), config)
    initialize(model, 1, model_config)
    initialize_adapters(model, 1)
    return model


def test_experts_have_adapters_only_if_named():
    names = [name for name, _ in mixture_with(lora()).named_parameters() if is_of_delta(name)]
    assert {name.split(".")[2] for name in names} == {"attention"}
    shapes = {
        name.removeprefix("blocks.1.mlp.experts."): list(parameter.shape)
        for name, parameter in mixture_with(lora(lora_target_modules=OF_EXPERTS)).named_parameters()
        if parameter.requires_grad and name.startswith("blocks.1.")
    }
    assert shapes == {
        "gate.lora_A.weight": [8, 16], "gate.lora_B.weight": [48, 2],
        "input.lora_A.weight": [8, 16], "input.lora_B.weight": [48, 2],
        "output.lora_A.weight": [8, 12], "output.lora_B.weight": [64, 2],
    }  # fmt: skip


@pytest.mark.parametrize("rank", [1, 4])  # too narrow for grouped products, and wide enough
def test_adapters_of_experts_add_what_is_merged_into_their_matrices(rank: int):
    config = lora(lora_target_modules=OF_EXPERTS, lora_alpha=3.0, lora_rank=rank)
    model, plain = mixture_with(config), GPT(replace(CONFIG, **MIXTURE), 64)
    assert torch.equal(model(TOKENS), mixture_with(lora())(TOKENS))
    weights = {}
    for name, parameter in model.named_parameters():
        if is_of_delta(name):
            torch.nn.init.normal_(parameter)
        else:
            weights[name] = parameter.detach().clone()
    for block, each in enumerate(model.blocks):
        for name in OF_EXPERTS:
            layer = each.mlp.get_submodule(name)
            down = layer.lora_A.weight.unflatten(0, (4, rank))
            up = layer.lora_B.weight.unflatten(0, (4, -1))
            weights[f"blocks.{block}.mlp.{name}.weight"] += 3.0 / rank * (up @ down).flatten(0, 1)
    plain.load_state_dict(weights)
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), atol=1e-4, rtol=1e-4)


def test_what_cannot_have_an_adapter_is_no_target():
    shared = dict(moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True)
    for name in ("shared_gate", "router"):
        with pytest.raises(InputError, match=f"{name} names no linear layer"):
            mixture_with(lora(lora_target_modules=(name,)), **shared)


def test_experts_in_some_layers_are_named():
    marks = "[0,1]"
    model = mixture_with(lora(lora_target_modules=("gate",)), moe_layer_freq=marks)
    names = {name.split(".lora")[0] for name, _ in model.named_parameters() if is_of_delta(name)}
    assert names == {"blocks.0.mlp.gate", "blocks.1.mlp.experts.gate"}
    with pytest.raises(InputError, match=r"blocks\.0\.mlp\.experts\.gate names no linear layer"):
        mixture_with(lora(lora_target_modules=("blocks.0.mlp.experts.gate",)), moe_layer_freq=marks)


def test_adapters_have_the_standard_deviation_of_pefts():
    config = ModelConfig(num_layers=1, hidden_size=256, num_attention_heads=2)
    layer = add_adapters(GPT(config, 64), LoraConfig(pretrained_checkpoint="m", lora_rank=64))
    initialize_adapters(layer, 7)
    lora_a = layer.blocks[0].attention.qkv.lora_A.weight
    # The standard deviation of n = 64 * 256 draws has itself one of 1 / sqrt(2 n); 4 are allowed.
    assert lora_a.std().item() == pytest.approx((3 * 256) ** -0.5, rel=4 * (2 * 64 * 256) ** -0.5)
    assert not layer.blocks[0].attention.qkv.lora_B.weight.any()


LORA = LoraConfig(pretrained_checkpoint="base", lora_rank=2, lora_alpha=3.0)
PAIR = {
    "blocks.0.mlp.input.lora_A.weight": torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]),
    "blocks.0.mlp.input.lora_B.weight": torch.tensor([[1.0, 0.0], [0.0, 4.0]]).bfloat16(),
}
BASE = {
    "blocks.0.mlp.input.weight": torch.ones(2, 3).bfloat16(),
    "blocks.0.mlp.input.bias": torch.ones(2),
    "norm.weight": torch.ones(3).double(),
}


def saved_adapters(tensors: dict[str, torch.Tensor] = PAIR) -> CheckpointAdapters:
    expected = {name: tensor.to("meta") for name, tensor in PAIR.items()}
    return CheckpointAdapters(InMemoryWeights(tensors), LORA, "checkpoint", expected)


def test_adapters_are_merged_in_fp32_and_other_weights_stay():
    merged = MergedWeights(InMemoryWeights(BASE), saved_adapters())
    facts = merged.facts()
    assert facts.keys() == BASE.keys() and all(tensor.is_meta for tensor in facts.values())
    weight = merged.read("blocks.0.mlp.input.weight")
    assert torch.equal(weight, torch.tensor([[2.5, 4.0, 5.5], [1.0, 7.0, 1.0]]))
    assert weight.dtype == facts["blocks.0.mlp.input.weight"].dtype == torch.float32
    assert torch.equal(merged.read("blocks.0.mlp.input.bias"), torch.ones(2))
    assert merged.read("norm.weight").dtype == torch.float64
    assert torch.equal(BASE["blocks.0.mlp.input.weight"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({"blocks.0.mlp.input.weight": torch.ones(3, 3)},
         r"blocks\.0\.mlp\.input\.weight has shape \[3, 3\], expected \[2, 3\]"),
        ({}, r"checkpoint: its adapters are of another model:\n  missing: blocks\.0\.mlp\.input"),
    ],
)  # fmt: skip
def test_layers_of_another_shape_are_named(base: dict, message: str):
    with pytest.raises(InputError, match=message):
        MergedWeights(InMemoryWeights(base), saved_adapters())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "checkpoint: no adapters"),
        ({name: tensor for name, tensor in PAIR.items() if "lora_A" in name},
         r"only in the model: blocks\.0\.mlp\.input\.lora_B\.weight"),
        (PAIR | {"blocks.0.mlp.gate.lora_B.weight": torch.ones(2, 2)},
         r"only in the checkpoint: blocks\.0\.mlp\.gate\.lora_B\.weight"),
        ({name: tensor.repeat(2, 1) for name, tensor in PAIR.items()},
         r"lora_A\.weight has shape \[4, 3\] in the checkpoint, \[2, 3\] in the model"),
    ],
)  # fmt: skip
def test_checkpoints_with_other_adapters_raise(tensors: dict, message: str):
    with pytest.raises(InputError, match=message):
        saved_adapters(tensors)
