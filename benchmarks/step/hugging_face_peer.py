"""Hugging Face's GPT-2 of the same shape with the same weights, where transformers is installed."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from benchmarks.shared.setting import Setting
from zeropp.errors import InputError

# Ours: theirs; of a block. Theirs are stored as [in, out] where ours are [out, in].
VECTORS = (
    ("norm1.weight", "ln_1.weight"), ("norm1.bias", "ln_1.bias"),
    ("norm2.weight", "ln_2.weight"), ("norm2.bias", "ln_2.bias"),
    ("attention.output.bias", "attn.c_proj.bias"), ("mlp.input.bias", "mlp.c_fc.bias"),
    ("mlp.output.bias", "mlp.c_proj.bias"),
)  # fmt: skip
MATRICES = (
    ("attention.output.weight", "attn.c_proj.weight"), ("mlp.input.weight", "mlp.c_fc.weight"),
    ("mlp.output.weight", "mlp.c_proj.weight"),
)  # fmt: skip


def is_installed() -> bool:
    """Whether transformers can be imported."""
    return find_spec("transformers") is not None


def hugging_face(
    setting: Setting, weights: Mapping[str, Tensor]
) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """`GPT2LMHeadModel` in fp32 on the setting's device, and what makes logits [B, S, V] of
    tokens and positions [B, S].

    Raises InputError where transformers is not installed, or for a model that is not GPT-2.
    """
    if not is_installed():
        raise InputError("transformers is not installed: pip install transformers, or leave hf out")
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = setting.config.model
    config = GPT2Config(
        vocab_size=ours.padded_vocab_size(setting.vocab_size),
        n_positions=ours.num_positions,
        n_embd=ours.hidden_size,
        n_layer=ours.num_layers,
        n_head=ours.num_attention_heads,
        activation_function="gelu_pytorch_tanh" if ours.bias_gelu_fusion else "gelu",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        layer_norm_epsilon=ours.layernorm_epsilon,
        attn_implementation="sdpa",
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device(setting.ranks.device):
        model = GPT2LMHeadModel(config)
    fill(model, weights, ours.num_layers, ours.num_attention_heads)
    return model, lambda tokens, positions: model(input_ids=tokens, position_ids=positions).logits


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor], layers: int, heads: int) -> None:
    """Give `GPT2LMHeadModel` the weights of our GPT; raises KeyError if one has no place."""
    theirs = dict(model.named_parameters())
    found = {
        "transformer.wte.weight": weights["tokens.weight"],
        "transformer.wpe.weight": weights["positions.weight"],
        "transformer.ln_f.weight": weights["norm.weight"],
        "transformer.ln_f.bias": weights["norm.bias"],
    }
    for index in range(layers):
        ours, here = f"blocks.{index}.", f"transformer.h.{index}."
        found |= {here + name: weights[ours + mine] for mine, name in VECTORS}
        found |= {here + name: weights[ours + mine].t() for mine, name in MATRICES}
        qkv = weights[ours + "attention.qkv.weight"]
        found[here + "attn.c_attn.weight"] = ungrouped(qkv, heads).t()
        found[here + "attn.c_attn.bias"] = ungrouped(weights[ours + "attention.qkv.bias"], heads)
    if missing := set(theirs) ^ set(found):
        raise KeyError(f"not the same weights: {', '.join(sorted(missing))}")
    for name, value in found.items():
        theirs[name].copy_(value)


def ungrouped(qkv: Tensor, heads: int) -> Tensor:
    """Rows [N, 3, D] of queries, keys and values of each head to rows [3, N, D]."""
    grouped = qkv.unflatten(0, (heads, 3, -1))
    return grouped.transpose(0, 1).flatten(0, 2)
