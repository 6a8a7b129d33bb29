"""Which of our tensors is which of Hugging Face's; `{}` is the number of the block.

The one table for both directions. A row counts where our model has its tensor: biases, positions
and an output layer of its own follow from the configuration.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.models.tensor_forms import (
    GROUPED,
    GROUPED_COLUMNS,
    SAME,
    TRANSPOSED,
    VOCABULARY,
    Form,
)


@dataclass(frozen=True)
class Row:
    """One of our tensors, theirs that hold the same numbers, and the form that leads over."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of one kind of model.

    `prefix` stands before the names of all but the head, or nowhere in files of the bare model;
    `embedding` is what a tied `head` repeats; what `ignored` matches are constants that old
    versions saved.
    """

    rows: tuple[Row, ...]
    prefix: str
    embedding: str
    ignored: str
    head: str = "lm_head.weight"

    def row(self, ours: str) -> Row:
        """The row of one of our parameters, with the block's number filled in.

        Raises KeyError for a parameter that this kind of model does not have.
        """
        number = re.search(r"\.(\d+)\.", ours)
        pattern = ours.replace(number[0], ".{}.", 1) if number else ours
        for row in self.rows:
            if row.ours == pattern:
                index = number[1] if number else ""
                return Row(ours, tuple(name.format(index) for name in row.theirs), row.form)
        raise KeyError(ours)

    def is_constant(self, theirs: str) -> bool:
        """Whether a tensor, with the prefix or without, is a constant and not of the weights."""
        return any(re.fullmatch(self.ignored, name) for name in (theirs, self.prefix + theirs))


def _both(ours: str, theirs: tuple[str, ...], form: Form, bias_form: Form) -> tuple[Row, Row]:
    """The rows of a layer's weight and of its bias."""
    return (
        Row(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), form),
        Row(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), bias_form),
    )


GPT2 = Table(
    rows=(
        Row("tokens.weight", ("transformer.wte.weight",), VOCABULARY),
        Row("positions.weight", ("transformer.wpe.weight",)),
        *_both("blocks.{}.norm1", ("transformer.h.{}.ln_1",), SAME, SAME),
        *_both(
            "blocks.{}.attention.qkv", ("transformer.h.{}.attn.c_attn",),
            GROUPED_COLUMNS, GROUPED_COLUMNS,
        ),
        *_both("blocks.{}.attention.output", ("transformer.h.{}.attn.c_proj",), TRANSPOSED, SAME),
        *_both("blocks.{}.norm2", ("transformer.h.{}.ln_2",), SAME, SAME),
        *_both("blocks.{}.mlp.input", ("transformer.h.{}.mlp.c_fc",), TRANSPOSED, SAME),
        *_both("blocks.{}.mlp.output", ("transformer.h.{}.mlp.c_proj",), TRANSPOSED, SAME),
        *_both("norm", ("transformer.ln_f",), SAME, SAME),
        Row("head.weight", ("lm_head.weight",), VOCABULARY),
    ),
    prefix="transformer.",
    embedding="transformer.wte.weight",
    ignored=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
)  # fmt: skip

_BLOCK = "model.layers.{}."
LLAMA = Table(
    rows=(
        Row("tokens.weight", ("model.embed_tokens.weight",), VOCABULARY),
        Row("blocks.{}.norm1.weight", (_BLOCK + "input_layernorm.weight",)),
        *_both(
            "blocks.{}.attention.qkv",
            tuple(f"{_BLOCK}self_attn.{part}_proj" for part in "qkv"),
            GROUPED, GROUPED,
        ),
        *_both("blocks.{}.attention.output", (_BLOCK + "self_attn.o_proj",), SAME, SAME),
        Row("blocks.{}.norm2.weight", (_BLOCK + "post_attention_layernorm.weight",)),
        *_both("blocks.{}.mlp.gate", (_BLOCK + "mlp.gate_proj",), SAME, SAME),
        *_both("blocks.{}.mlp.input", (_BLOCK + "mlp.up_proj",), SAME, SAME),
        *_both("blocks.{}.mlp.output", (_BLOCK + "mlp.down_proj",), SAME, SAME),
        Row("norm.weight", ("model.norm.weight",)),
        Row("head.weight", ("lm_head.weight",), VOCABULARY),
    ),
    prefix="model.",
    embedding="model.embed_tokens.weight",
    ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)  # fmt: skip

_LAYER = "gpt_neox.layers.{}."
NEOX = Table(
    rows=(
        Row("tokens.weight", ("gpt_neox.embed_in.weight",), VOCABULARY),
        *_both("blocks.{}.norm1", (_LAYER + "input_layernorm",), SAME, SAME),
        *_both("blocks.{}.attention.qkv", (_LAYER + "attention.query_key_value",), SAME, SAME),
        *_both("blocks.{}.attention.output", (_LAYER + "attention.dense",), SAME, SAME),
        *_both("blocks.{}.norm2", (_LAYER + "post_attention_layernorm",), SAME, SAME),
        *_both("blocks.{}.mlp.input", (_LAYER + "mlp.dense_h_to_4h",), SAME, SAME),
        *_both("blocks.{}.mlp.output", (_LAYER + "mlp.dense_4h_to_h",), SAME, SAME),
        *_both("norm", ("gpt_neox.final_layer_norm",), SAME, SAME),
        Row("head.weight", ("embed_out.weight",), VOCABULARY),
    ),
    prefix="gpt_neox.",
    embedding="gpt_neox.embed_in.weight",
    ignored=r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",
    head="embed_out.weight",
)

TABLES: Mapping[str, Table] = MappingProxyType(
    {"gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA, "gpt_neox": NEOX}
)
