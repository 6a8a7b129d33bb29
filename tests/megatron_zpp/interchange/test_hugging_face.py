"""The model against Hugging Face's GPT-2 and Llama with the same weights.

Both compute in fp32 (unit round-off 6e-8), with some tens of operations on values of order one, so
logits agree to well under 1e-5 unless a formula differs.
"""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.config import ModelConfig

VOCABULARY, LAYERS, HIDDEN, HEADS, POSITIONS = 96, 3, 48, 4, 24
GPT2_LAYERS = {  # our name: Hugging Face's
    "norm1": "ln_1",
    "attention.output": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.input": "mlp.c_fc",
    "mlp.output": "mlp.c_proj",
}
LLAMA_LAYERS = {
    "norm1": "input_layernorm",
    "attention.output": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "mlp.input": "mlp.up_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.output": "mlp.down_proj",
}


def model_fields(**changes: object) -> dict:
    """Return fields of a small ModelConfig without dropout."""
    fields = dict(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        seq_length=POSITIONS,
        make_vocab_size_divisible_by=1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return fields | changes


def gpt2_pair(exact_gelu: bool = False) -> tuple[GPT, nn.Module]:
    torch.manual_seed(3)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=POSITIONS,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            activation_function="gelu" if exact_gelu else "gelu_new",
            initializer_range=0.2,  # large, so that the logits are of order one
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    perturb(theirs)
    ours = GPT(ModelConfig(**model_fields(bias_gelu_fusion=not exact_gelu)), VOCABULARY)
    source = theirs.state_dict()
    state = {
        "tokens.weight": source["transformer.wte.weight"],
        "positions.weight": source["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        state[f"norm.{kind}"] = source[f"transformer.ln_f.{kind}"]
        for layer in range(LAYERS):
            block, hf_block = f"blocks.{layer}.", f"transformer.h.{layer}."
            for name, hf_name in GPT2_LAYERS.items():
                value = source[f"{hf_block}{hf_name}.{kind}"]
                state[f"{block}{name}.{kind}"] = value.t() if value.ndim > 1 else value
            parts = source[f"{hf_block}attn.c_attn.{kind}"].t().chunk(3)
            state[f"{block}attention.qkv.{kind}"] = join_groups(*parts, HEADS)
    ours.load_state_dict(state)
    return ours, theirs


def llama_pair(groups: int, base: int = 10000) -> tuple[GPT, nn.Module]:
    torch.manual_seed(4)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=groups,
            max_position_embeddings=POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": base},
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            initializer_range=0.2,
        )
    )
    perturb(theirs)
    config = ModelConfig(
        **model_fields(
            num_query_groups=groups,
            ffn_hidden_size=64,
            normalization="RMSNorm",
            layernorm_epsilon=1e-6,
            position_embedding_type="rope",
            rotary_base=base,
            swiglu=True,
            disable_bias_linear=True,
            untie_embeddings_and_output_weights=True,
        )
    )
    ours = GPT(config, VOCABULARY)
    source = theirs.state_dict()
    state = {
        "tokens.weight": source["model.embed_tokens.weight"],
        "norm.weight": source["model.norm.weight"],
        "head.weight": source["lm_head.weight"],
    }
    for layer in range(LAYERS):
        block, hf_block = f"blocks.{layer}.", f"model.layers.{layer}."
        for name, hf_name in LLAMA_LAYERS.items():
            state[f"{block}{name}.weight"] = source[f"{hf_block}{hf_name}.weight"]
        parts = [source[f"{hf_block}self_attn.{part}_proj.weight"] for part in "qkv"]
        state[f"{block}attention.qkv.weight"] = join_groups(*parts, groups)
    ours.load_state_dict(state)
    return ours, theirs


def perturb(model: nn.Module) -> None:
    """Change biases and gains from 0 and 1, so that swapping two of them changes the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


def join_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """Return rows of queries, keys and values, ordered by groups as in our attention."""
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def compare_logits(ours: GPT, theirs: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (2, POSITIONS), generator=generator)
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        logits = ours.eval()(tokens)
    assert expected.std() > 0.5  # otherwise the tolerance would be too large
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("exact_gelu", [False, True])
def test_gpt2_logits(exact_gelu: bool) -> None:
    ours, theirs = gpt2_pair(exact_gelu)
    assert ours.num_parameters() == sum(p.numel() for p in theirs.parameters())
    compare_logits(ours, theirs)


def test_tanh_gelu_is_not_exact_gelu() -> None:
    """The comparison is precise enough to distinguish the two GELUs."""
    (ours, _), (_, theirs) = gpt2_pair(False), gpt2_pair(True)
    with pytest.raises(AssertionError, match="not close"):
        compare_logits(ours, theirs)


@pytest.mark.parametrize(("groups", "base"), [(HEADS, 10000), (2, 10000), (1, 500)])
def test_llama_logits(groups: int, base: int) -> None:
    ours, theirs = llama_pair(groups, base)
    assert ours.num_parameters() == sum(p.numel() for p in theirs.parameters())
    compare_logits(ours, theirs)


@pytest.mark.parametrize("pair", [gpt2_pair, lambda: llama_pair(2)], ids=["gpt2", "llama"])
def test_loss_curve(pair) -> None:
    """Ten AdamW steps from the same weights: every loss agrees to 1e-5 relative, and falls."""
    ours, theirs = pair()
    generator = torch.Generator().manual_seed(6)
    rows = torch.randint(0, VOCABULARY, (4, POSITIONS + 1), generator=generator)
    curves = []
    for model in (ours.train(), theirs.train()):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        curve = []
        for _ in range(10):
            if model is ours:
                loss = model(rows[:, :-1], labels=rows[:, 1:])
            else:
                logits = model(rows[:, :-1]).logits
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert curves[0][-1] < curves[0][0] - 0.5
