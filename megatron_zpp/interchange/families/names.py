"""The names of a GPT's weights in Hugging Face's files, one table for each kind of model.

Each row pairs a module of `megatron_zpp.model.gpt.GPT` with the Hugging Face modules whose weights
and biases hold the same numbers; `{}` stands for the number of the block. The tables are read in
both directions, by import and export. A model uses only the parameters that it has: biases, learned
positions and a separate output layer depend on its configuration.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_zpp.interchange.families.forms import (
    FIRST_HALF,
    PADDED_VOCABULARY,
    QKV,
    QKV_FUSED,
    QKV_TRANSPOSED,
    SAME,
    SECOND_HALF,
    TRANSPOSED,
    Form,
)


@dataclass(frozen=True)
class NameRow:
    """A GPT module, the Hugging Face modules with the same numbers, and how they are laid out.

    `form` converts between the two. In what `NameTable.row` returns, the names are those of one
    parameter and its tensors.
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

        Raises KeyError for a parameter of a module that this kind of model does not have.
        """
        number = re.search(r"\.(\d+)\.", gpt_name)
        pattern = gpt_name.replace(number[0], ".{}.", 1) if number else gpt_name
        module, _, kind = pattern.rpartition(".")  # kind: weight or bias
        for row in self.rows:
            if row.gpt_name == module:
                block = number[1] if number else ""
                hf_names = tuple(f"{name.format(block)}.{kind}" for name in row.hf_names)
                return NameRow(gpt_name, hf_names, row.form)
        raise KeyError(gpt_name)

    def is_constant(self, hf_name: str) -> bool:
        """Whether a tensor, named with or without the prefix, is a constant and not a weight."""
        return any(re.fullmatch(self.constants, name) for name in (hf_name, self.prefix + hf_name))


GPT2_BLOCK = "transformer.h.{}."
GPT2 = NameTable(
    rows=(
        NameRow("tokens", ("transformer.wte",), PADDED_VOCABULARY),
        NameRow("positions", ("transformer.wpe",)),
        NameRow("blocks.{}.norm1", (GPT2_BLOCK + "ln_1",)),
        NameRow("blocks.{}.attention.qkv", (GPT2_BLOCK + "attn.c_attn",), QKV_TRANSPOSED),
        NameRow("blocks.{}.attention.output", (GPT2_BLOCK + "attn.c_proj",), TRANSPOSED),
        NameRow("blocks.{}.norm2", (GPT2_BLOCK + "ln_2",)),
        NameRow("blocks.{}.mlp.input", (GPT2_BLOCK + "mlp.c_fc",), TRANSPOSED),
        NameRow("blocks.{}.mlp.output", (GPT2_BLOCK + "mlp.c_proj",), TRANSPOSED),
        NameRow("norm", ("transformer.ln_f",)),
        NameRow("head", ("lm_head",), PADDED_VOCABULARY),
    ),
    prefix="transformer.",
    embedding="transformer.wte.weight",
    constants=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
)

LLAMA_BLOCK = "model.layers.{}."
LLAMA = NameTable(  # Mistral, Qwen2 and SmolLM2 too
    rows=(
        NameRow("tokens", ("model.embed_tokens",), PADDED_VOCABULARY),
        NameRow("blocks.{}.norm1", (LLAMA_BLOCK + "input_layernorm",)),
        NameRow(
            "blocks.{}.attention.qkv",
            tuple(f"{LLAMA_BLOCK}self_attn.{part}_proj" for part in "qkv"),
            QKV,
        ),
        NameRow("blocks.{}.attention.output", (LLAMA_BLOCK + "self_attn.o_proj",)),
        NameRow("blocks.{}.norm2", (LLAMA_BLOCK + "post_attention_layernorm",)),
        NameRow("blocks.{}.mlp.gate", (LLAMA_BLOCK + "mlp.gate_proj",)),
        NameRow("blocks.{}.mlp.input", (LLAMA_BLOCK + "mlp.up_proj",)),
        NameRow("blocks.{}.mlp.output", (LLAMA_BLOCK + "mlp.down_proj",)),
        NameRow("norm", ("model.norm",)),
        NameRow("head", ("lm_head",), PADDED_VOCABULARY),
    ),
    prefix="model.",
    embedding="model.embed_tokens.weight",
    constants=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)


def llama_with(*rows: NameRow) -> NameTable:
    """Return Llama's names with other rows for some modules, and rows for further modules."""
    others = {row.gpt_name for row in rows}
    same = tuple(row for row in LLAMA.rows if row.gpt_name not in others)
    return replace(LLAMA, rows=(*same, *rows))


def block_rows(hf_names: Mapping[str, str]) -> tuple[NameRow, ...]:
    """Return rows of modules of Llama's blocks, by the GPT's names."""
    return tuple(
        NameRow(f"blocks.{{}}.{gpt_name}", (LLAMA_BLOCK + hf_name,))
        for gpt_name, hf_name in hf_names.items()
    )


QK_NORMS = block_rows(
    {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
)
QWEN3 = llama_with(*QK_NORMS)
PHI3 = llama_with(
    NameRow("blocks.{}.attention.qkv", (LLAMA_BLOCK + "self_attn.qkv_proj",), QKV_FUSED),
    NameRow("blocks.{}.mlp.gate", (LLAMA_BLOCK + "mlp.gate_up_proj",), FIRST_HALF),
    NameRow("blocks.{}.mlp.input", (LLAMA_BLOCK + "mlp.gate_up_proj",), SECOND_HALF),
)
OLMO2 = llama_with(
    *block_rows(
        {
            "attention.queries_norm": "self_attn.q_norm",
            "attention.keys_norm": "self_attn.k_norm",
            "post_norm1": "post_attention_layernorm",
            "post_norm2": "post_feedforward_layernorm",
        }
    )
)
GEMMA2 = llama_with(
    *block_rows(
        {
            "post_norm1": "post_attention_layernorm",
            "norm2": "pre_feedforward_layernorm",
            "post_norm2": "post_feedforward_layernorm",
        }
    )
)
GEMMA3 = replace(GEMMA2, rows=(*GEMMA2.rows, *QK_NORMS))

GPT_NEOX_BLOCK = "gpt_neox.layers.{}."
GPT_NEOX = NameTable(
    rows=(
        NameRow("tokens", ("gpt_neox.embed_in",), PADDED_VOCABULARY),
        NameRow("blocks.{}.norm1", (GPT_NEOX_BLOCK + "input_layernorm",)),
        NameRow("blocks.{}.attention.qkv", (GPT_NEOX_BLOCK + "attention.query_key_value",)),
        NameRow("blocks.{}.attention.output", (GPT_NEOX_BLOCK + "attention.dense",)),
        NameRow("blocks.{}.norm2", (GPT_NEOX_BLOCK + "post_attention_layernorm",)),
        NameRow("blocks.{}.mlp.input", (GPT_NEOX_BLOCK + "mlp.dense_h_to_4h",)),
        NameRow("blocks.{}.mlp.output", (GPT_NEOX_BLOCK + "mlp.dense_4h_to_h",)),
        NameRow("norm", ("gpt_neox.final_layer_norm",)),
        NameRow("head", ("embed_out",), PADDED_VOCABULARY),
    ),
    prefix="gpt_neox.",
    embedding="gpt_neox.embed_in.weight",
    constants=r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",
    head="embed_out.weight",
)

BLOOM_BLOCK = "transformer.h.{}."
BLOOM = NameTable(
    rows=(
        NameRow("tokens", ("transformer.word_embeddings",), PADDED_VOCABULARY),
        NameRow("embed_norm", ("transformer.word_embeddings_layernorm",)),
        NameRow("blocks.{}.norm1", (BLOOM_BLOCK + "input_layernorm",)),
        NameRow("blocks.{}.attention.qkv", (BLOOM_BLOCK + "self_attention.query_key_value",)),
        NameRow("blocks.{}.attention.output", (BLOOM_BLOCK + "self_attention.dense",)),
        NameRow("blocks.{}.norm2", (BLOOM_BLOCK + "post_attention_layernorm",)),
        NameRow("blocks.{}.mlp.input", (BLOOM_BLOCK + "mlp.dense_h_to_4h",)),
        NameRow("blocks.{}.mlp.output", (BLOOM_BLOCK + "mlp.dense_4h_to_h",)),
        NameRow("norm", ("transformer.ln_f",)),
        NameRow("head", ("lm_head",), PADDED_VOCABULARY),
    ),
    prefix="transformer.",
    embedding="transformer.word_embeddings.weight",
    constants=r"transformer\.h\.\d+\.self_attention\.(masked_)?bias",
)
