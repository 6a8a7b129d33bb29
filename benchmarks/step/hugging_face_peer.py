"""Hugging Face's GPT-2 of the same shape with the same weights, where transformers is installed."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from benchmarks.shared.training_setup import TrainingSetup
from megatron_zpp.interchange.families.forms import Sizes
from megatron_zpp.interchange.families.names import name_table
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError


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
    copy_weights(model, weights, ours, config.vocab_size)
    return model, lambda tokens, positions: model(input_ids=tokens, position_ids=positions).logits


@torch.no_grad()
def copy_weights(
    model: nn.Module, weights: Mapping[str, Tensor], config: ModelConfig, rows: int
) -> None:
    """Copy our GPT's weights, with `rows` rows of vocabulary, into `GPT2LMHeadModel`.

    Raises KeyError if their names do not match.
    """
    sizes = Sizes(model=config, vocab_rows=rows, padded_rows=rows)
    values = {}
    for name, weight in weights.items():
        row = name_table("gpt2").row(name)
        values |= dict(zip(row.hf_names, row.form.split(weight, sizes), strict=True))
    parameters = dict(model.named_parameters())
    if missing := set(parameters) ^ set(values):
        raise KeyError(f"not the same weights: {', '.join(sorted(missing))}")
    for name, value in values.items():
        parameters[name].copy_(value)
