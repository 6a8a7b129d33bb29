"""Each layer against its formula."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_zpp.model.attention.rotary import base_frequencies, rotary_table, rotate
from megatron_zpp.model.mlp import activate
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.model.small import GPT2, build, rows


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
