"""Each layer against its formula; variants of the model train and are causal; weights."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_zpp.model.attention.rotary import base_frequencies, rotary_table, rotate
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.mlp import activate
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.model.small import GPT2, LLAMA, build, rows

VARIANTS = {  # what no family of interchange/families/test_table.py has, and one of each kind
    "gpt2": GPT2,
    "llama": LLAMA,
    "no positions": replace(GPT2, position_embedding_type="none"),
    "liglu": replace(GPT2, liglu=True),
    "fp32 residual": replace(LLAMA, fp32_residual_connection=True),
    "no dropout": replace(GPT2, hidden_dropout=0.0, attention_dropout=0.0),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_variant_learns_a_batch(config: ModelConfig) -> None:
    """It starts at a uniform guess, ln(padded vocabulary), and memorises two rows."""
    model = build(config).train()
    data = rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    losses = []
    for _ in range(12):
        loss = model(data[:, :-1], labels=data[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(64.0).log().item(), abs=0.1)
    assert losses[-1] < losses[0] - 1
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_more_tokens_than_positions() -> None:
    with pytest.raises(ValueError, match="20 tokens, but 16 positions"):
        build(GPT2)(rows(length=19))
    build(LLAMA)(rows(length=19))  # rotary positions have no end


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """In 16 bit the loss is fp32 and near the fp32 model's; an fp32 residual stays fp32."""
    data = rows()
    for config in (GPT2, replace(LLAMA, fp32_residual_connection=True)):
        model = build(config).eval()
        exact = model(data[:, :-1], labels=data[:, 1:])
        loss = model.to(dtype)(data[:, :-1], labels=data[:, 1:])
        loss.backward()
        assert loss.dtype == torch.float32
        # 16 additions to the residual of relative error 2^-9 each, on logits of order 0.1
        assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
        assert all(parameter.grad.dtype == dtype for parameter in model.parameters())
        dtypes = []
        model.blocks[1].register_forward_hook(
            lambda module, inputs, output, dtypes=dtypes: dtypes.append(output.dtype)
        )
        model(data[:, :-1])
        assert dtypes == [torch.float32 if config.fp32_residual_connection else dtype]


def test_a_residual_cast_to_16_bit_raises() -> None:
    """Casting the inputs of blocks would silently undo an fp32 residual."""
    block = build(replace(GPT2, fp32_residual_connection=True)).to(torch.bfloat16).blocks[0]
    with pytest.raises(AssertionError, match="fp32 residual was cast to 16 bit"):
        block(torch.zeros(1, 2, 32, dtype=torch.bfloat16))


def test_gpt2_small_counts() -> None:
    """GPT-2 124M: the published 124,439,808 weights."""
    config = ModelConfig(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        seq_length=1024,
        make_vocab_size_divisible_by=1,
    )
    with torch.device("meta"):
        model = GPT(config, 50257)
        padded = GPT(replace(config, make_vocab_size_divisible_by=128), 50257)
    assert model.num_parameters() == 124_439_808
    assert padded.padded_vocab_size == 50304
    assert padded.num_parameters() == 124_439_808 + (50304 - 50257) * 768


def test_llama_counts() -> None:
    """Llama 2 7B's published 6,738,415,616 weights, and fewer with grouped queries."""
    config = ModelConfig(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=11008,
        num_attention_heads=32,
        seq_length=4096,
        make_vocab_size_divisible_by=1,
        normalization="RMSNorm",
        position_embedding_type="rope",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
    )
    with torch.device("meta"):
        model = GPT(config, 32000)
        grouped = GPT(replace(config, num_query_groups=8), 32000)
    assert model.num_parameters() == 6_738_415_616
    fewer = 32 * 2 * 24 * 128 * 4096  # in each block, 24 of 32 keys and of 32 values are gone
    assert grouped.num_parameters() == 6_738_415_616 - fewer


def tanh_gelu(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def erf_gelu(x: float) -> float:
    return x / 2 * (1 + math.erf(x / math.sqrt(2)))


ACTIVATIONS = {
    "default": ({}, tanh_gelu),
    "unfused": ({"bias_gelu_fusion": False}, erf_gelu),
    "openai": ({"openai_gelu": True, "bias_gelu_fusion": False}, tanh_gelu),
    "squared relu": ({"squared_relu": True}, lambda x: max(x, 0) ** 2),
    "swiglu": ({"swiglu": True}, lambda x: x / (1 + math.exp(-x))),
    "liglu": ({"liglu": True}, lambda x: x),
}


@pytest.mark.parametrize(("flags", "formula"), ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
def test_activation(flags: dict, formula) -> None:
    points = [-3.0, -1.0, -0.1, 0.0, 0.5, 2.0]
    values = activate(torch.tensor(points), replace(GPT2, **flags))
    assert values.tolist() == pytest.approx([formula(x) for x in points], abs=1e-6)


def test_rotate_is_exact_in_16_bit() -> None:
    """The product is taken in fp32 and rounded once."""
    x = torch.randn(1, 4, 2, 2, 8).bfloat16()
    rotary = rotary_table(torch.arange(4)[None] + 1000, base_frequencies(8, 1e4))
    assert torch.equal(rotate(x, rotary), rotate(x.float(), rotary).bfloat16())


@torch.no_grad()
def test_residual_connection() -> None:
    x = torch.randn(2, 4, 32)
    for after_norm, is_bf16 in ((False, False), (True, False), (True, True)):
        config = replace(
            GPT2,
            apply_residual_connection_post_layernorm=after_norm,
            fp32_residual_connection=is_bf16,
            init_method_std=0.3,
        )
        block = build(config).blocks[0].eval()
        block = block.bfloat16() if is_bf16 else block
        normalized = block.norm1(x.to(block.norm1.weight.dtype))
        middle = (normalized if after_norm else x).float() + block.attention(normalized)
        normalized = block.norm2(middle.to(normalized.dtype))
        expected = (normalized if after_norm else middle).float() + block.mlp(normalized)
        assert torch.equal(block(x), expected)


@torch.no_grad()
def test_all_dropouts() -> None:
    """Dropout of embeddings, of attention weights and of both branches; none in evaluation."""
    tokens = rows()[:, :-1]

    def changes(config: ModelConfig, blocks: bool) -> bool:
        layers = None if blocks else range(0)
        model = build(replace(config, init_method_std=0.3), layers=layers)
        return not torch.allclose(model.train()(tokens), model.eval()(tokens))

    no_dropout = replace(GPT2, hidden_dropout=0.0, attention_dropout=0.0)
    assert not changes(no_dropout, blocks=True)
    assert changes(replace(no_dropout, attention_dropout=0.5), blocks=True)
    assert changes(replace(no_dropout, hidden_dropout=0.5), blocks=False)
    assert not changes(replace(no_dropout, attention_dropout=0.5), blocks=False)
    block = build(replace(GPT2, hidden_dropout=1.0)).blocks[0]
    x = torch.randn(1, 4, 32)
    assert torch.equal(block.train()(x), x)
    assert not torch.equal(block.eval()(x), x)


@torch.no_grad()
def test_attention_softmax_is_fp32_in_16_bit() -> None:
    """As exact as one rounding of the output allows, with dropout's kernel and without."""
    attention = build(replace(GPT2, attention_dropout=1e-9)).blocks[0].attention
    q, k, v = (torch.randn(2, 16, 4, 8).mul_(4).bfloat16() for _ in range(3))
    exact = attention.eval().core(q.double(), k.double(), v.double())
    for mode in (True, False):
        result = attention.train(mode).core(q, k, v).double()
        assert ((result - exact).norm() / exact.norm()) < 2**-8
