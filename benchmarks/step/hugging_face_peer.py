"""Hugging Face's GPT-2 of the same shape with the same weights, where transformers is installed."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from benchmarks.shared.training_setup import TrainingSetup
from zeropp.errors import InputError

# Names in a block: ours, Hugging Face's. Their matrices are [in, out] where ours are [out, in].
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
    setup: TrainingSetup, weights: Mapping[str, Tensor]
) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """`GPT2LMHeadModel` in fp32 on the setup's device, and a function that computes logits
    [B, S, V] from tokens and positions [B, S].

    Raises InputError where transformers is not installed, or for a model that is not GPT-2.
    """
    if not is_installed():
        raise InputError("transformers is not installed: pip install transformers, or leave hf out")
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = setup.config.model
    config = GPT2Config(
        vocab_size=ours.padded_vocab_size(setup.vocab_size),
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
    with torch.device(setup.ranks.device):
        model = GPT2LMHeadModel(config)
    copy_weights(model, weights, ours.num_layers, ours.num_attention_heads)
    return model, lambda tokens, positions: model(input_ids=tokens, position_ids=positions).logits


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Mapping[str, Tensor], layers: int, heads: int) -> None:
    """Copy our GPT's weights into `GPT2LMHeadModel`; raises KeyError for names that differ."""
    theirs = dict(model.named_parameters())
    values = {
        "transformer.wte.weight": weights["tokens.weight"],
        "transformer.wpe.weight": weights["positions.weight"],
        "transformer.ln_f.weight": weights["norm.weight"],
        "transformer.ln_f.bias": weights["norm.bias"],
    }
    for index in range(layers):
        block, their_block = f"blocks.{index}.", f"transformer.h.{index}."
        values |= {their_block + name: weights[block + mine] for mine, name in VECTORS}
        values |= {their_block + name: weights[block + mine].t() for mine, name in MATRICES}
        qkv, bias = (weights[block + f"attention.qkv.{kind}"] for kind in ("weight", "bias"))
        values[their_block + "attn.c_attn.weight"] = ungrouped(qkv, heads).t()
        values[their_block + "attn.c_attn.bias"] = ungrouped(bias, heads)
    if missing := set(theirs) ^ set(values):
        raise KeyError(f"not the same weights: {', '.join(sorted(missing))}")
    for name, value in values.items():
        theirs[name].copy_(value)


def ungrouped(qkv: Tensor, heads: int) -> Tensor:
    """Rows of queries, keys and values [heads, 3, channels] as [3, heads, channels]."""
    grouped = qkv.unflatten(0, (heads, 3, -1))
    return grouped.transpose(0, 1).flatten(0, 2)
