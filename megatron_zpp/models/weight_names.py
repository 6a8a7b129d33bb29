"""The names of a GPT's weights in Hugging Face's files, one table for each kind of model.

Each row pairs a parameter of `megatron_zpp.model.gpt.GPT` with the Hugging Face tensors that hold
the same numbers; `{}` stands for the number of the block. The tables are read in both directions,
by import and export. A model uses only the rows whose parameter it has: biases, learned positions
and a separate output layer depend on its configuration.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.models.tensor_forms import (
    PADDED_VOCABULARY,
    QKV,
    QKV_TRANSPOSED,
    SAME,
    TRANSPOSED,
    Form,
)


@dataclass(frozen=True)
class NameRow:
    """A GPT parameter, the Hugging Face tensors with the same numbers, and how they are laid out.

    `form` converts between the two.
    """

    gpt_name: str
    hf_names: tuple[str, ...]
    form: Form = SAME


@dataclass(frozen=True, kw_only=True)
class NameTable:
    """The names of all weights of one kind of model.

    `prefix` begins every name but that of the head; files of the bare model, without the head,
    leave it out. `embedding` is the tensor that a tied `head` shares. `constants` is a regular
    expression for tensors that old versions of transformers saved though they are not weights.
    """

    rows: tuple[NameRow, ...]
    prefix: str
    embedding: str
    constants: str
    head: str = "lm_head.weight"

    def row(self, gpt_name: str) -> NameRow:
        """Return the row of a GPT parameter, with the block's number filled in.

        Raises KeyError for a parameter that this kind of model does not have.
        """
        number = re.search(r"\.(\d+)\.", gpt_name)
        pattern = gpt_name.replace(number[0], ".{}.", 1) if number else gpt_name
        for row in self.rows:
            if row.gpt_name == pattern:
                block = number[1] if number else ""
                hf_names = tuple(name.format(block) for name in row.hf_names)
                return NameRow(gpt_name, hf_names, row.form)
        raise KeyError(gpt_name)

    def is_constant(self, hf_name: str) -> bool:
        """Whether a tensor, named with or without the prefix, is a constant and not a weight."""
        return any(re.fullmatch(self.constants, name) for name in (hf_name, self.prefix + hf_name))


def _weight_and_bias(
    gpt_name: str, hf_names: tuple[str, ...], weight_form: Form, bias_form: Form
) -> tuple[NameRow, NameRow]:
    """Return the rows of a layer's weight and of its bias."""
    return tuple(
        NameRow(f"{gpt_name}.{kind}", tuple(f"{name}.{kind}" for name in hf_names), form)
        for kind, form in (("weight", weight_form), ("bias", bias_form))
    )


GPT2_BLOCK = "transformer.h.{}."
GPT2 = NameTable(
    rows=(
        NameRow("tokens.weight", ("transformer.wte.weight",), PADDED_VOCABULARY),
        NameRow("positions.weight", ("transformer.wpe.weight",)),
        *_weight_and_bias("blocks.{}.norm1", (GPT2_BLOCK + "ln_1",), SAME, SAME),
        *_weight_and_bias(
            "blocks.{}.attention.qkv", (GPT2_BLOCK + "attn.c_attn",),
            QKV_TRANSPOSED, QKV_TRANSPOSED,
        ),
        *_weight_and_bias(
            "blocks.{}.attention.output", (GPT2_BLOCK + "attn.c_proj",), TRANSPOSED, SAME
        ),
        *_weight_and_bias("blocks.{}.norm2", (GPT2_BLOCK + "ln_2",), SAME, SAME),
        *_weight_and_bias("blocks.{}.mlp.input", (GPT2_BLOCK + "mlp.c_fc",), TRANSPOSED, SAME),
        *_weight_and_bias("blocks.{}.mlp.output", (GPT2_BLOCK + "mlp.c_proj",), TRANSPOSED, SAME),
        *_weight_and_bias("norm", ("transformer.ln_f",), SAME, SAME),
        NameRow("head.weight", ("lm_head.weight",), PADDED_VOCABULARY),
    ),
    prefix="transformer.",
    embedding="transformer.wte.weight",
    constants=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
)  # fmt: skip

LLAMA_BLOCK = "model.layers.{}."
LLAMA = NameTable(  # SmolLM2 too
    rows=(
        NameRow("tokens.weight", ("model.embed_tokens.weight",), PADDED_VOCABULARY),
        NameRow("blocks.{}.norm1.weight", (LLAMA_BLOCK + "input_layernorm.weight",)),
        *_weight_and_bias(
            "blocks.{}.attention.qkv",
            tuple(f"{LLAMA_BLOCK}self_attn.{part}_proj" for part in "qkv"),
            QKV, QKV,
        ),
        *_weight_and_bias(
            "blocks.{}.attention.output", (LLAMA_BLOCK + "self_attn.o_proj",), SAME, SAME
        ),
        NameRow("blocks.{}.norm2.weight", (LLAMA_BLOCK + "post_attention_layernorm.weight",)),
        *_weight_and_bias("blocks.{}.mlp.gate", (LLAMA_BLOCK + "mlp.gate_proj",), SAME, SAME),
        *_weight_and_bias("blocks.{}.mlp.input", (LLAMA_BLOCK + "mlp.up_proj",), SAME, SAME),
        *_weight_and_bias("blocks.{}.mlp.output", (LLAMA_BLOCK + "mlp.down_proj",), SAME, SAME),
        NameRow("norm.weight", ("model.norm.weight",)),
        NameRow("head.weight", ("lm_head.weight",), PADDED_VOCABULARY),
    ),
    prefix="model.",
    embedding="model.embed_tokens.weight",
    constants=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)  # fmt: skip

GPT_NEOX_BLOCK = "gpt_neox.layers.{}."
GPT_NEOX = NameTable(
    rows=(
        NameRow("tokens.weight", ("gpt_neox.embed_in.weight",), PADDED_VOCABULARY),
        *_weight_and_bias("blocks.{}.norm1", (GPT_NEOX_BLOCK + "input_layernorm",), SAME, SAME),
        *_weight_and_bias(
            "blocks.{}.attention.qkv", (GPT_NEOX_BLOCK + "attention.query_key_value",), SAME, SAME
        ),
        *_weight_and_bias(
            "blocks.{}.attention.output", (GPT_NEOX_BLOCK + "attention.dense",), SAME, SAME
        ),
        *_weight_and_bias(
            "blocks.{}.norm2", (GPT_NEOX_BLOCK + "post_attention_layernorm",), SAME, SAME
        ),
        *_weight_and_bias(
            "blocks.{}.mlp.input", (GPT_NEOX_BLOCK + "mlp.dense_h_to_4h",), SAME, SAME
        ),
        *_weight_and_bias(
            "blocks.{}.mlp.output", (GPT_NEOX_BLOCK + "mlp.dense_4h_to_h",), SAME, SAME
        ),
        *_weight_and_bias("norm", ("gpt_neox.final_layer_norm",), SAME, SAME),
        NameRow("head.weight", ("embed_out.weight",), PADDED_VOCABULARY),
    ),
    prefix="gpt_neox.",
    embedding="gpt_neox.embed_in.weight",
    constants=r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",
    head="embed_out.weight",
)

TABLES: Mapping[str, NameTable] = MappingProxyType(  # by the model_type of config.json
    {"gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA, "gpt_neox": GPT_NEOX}
)
