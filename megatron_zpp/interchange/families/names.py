"""The names of a GPT's weights in Hugging Face's files, a table for each kind of model.

Each row pairs a module of `megatron_zpp.model.gpt.GPT` with the Hugging Face modules whose weights
and biases hold the same numbers. `{}` stands for the number of the block, and `{expert}`, `{head}`
and `{kv_head}` for that of an expert, of a query head and of a key-value head, each of which has
modules of its own. Tables of dense families are beside their settings, in `dense/`. The tables are
read in both directions, by import and export. A model uses only the parameters that it has: biases,
learned positions and a separate output layer depend on its configuration.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_zpp.interchange.families.forms import (
    ALL_EXPERTS,
    ALL_EXPERTS_TRANSPOSED,
    EACH_EXPERT,
    EVEN_BIASES,
    EVEN_OUTPUTS,
    FIRST_HALF,
    FIRST_HALVES,
    ODD_BIASES,
    ODD_OUTPUTS,
    PADDED_VOCABULARY,
    QKV,
    SAME,
    SECOND_HALF,
    SECOND_HALVES,
    Form,
)
from megatron_zpp.settings.config import ModelConfig


@dataclass(frozen=True)
class NameRow:
    """A GPT module, the Hugging Face modules with the same numbers, and how they are laid out.

    `form` converts between the two. A row may also pair a single tensor with others, such as a
    buffer. In what `NameTable.row` returns, the names are those of one parameter and its tensors.
    With `keeps_dtype` the tensors are written in fp32 whatever the others are.
    """

    gpt_name: str
    hf_names: tuple[str, ...]
    form: Form = SAME
    keeps_dtype: bool = False

    def of(self, gpt_name: str, block: str, counts: Mapping[str, int], kind: str = "") -> "NameRow":
        """Return the row of one parameter of a block, whose `kind` ends the names.

        `counts` of experts and heads, by what stands for their numbers.
        """
        names = []
        for name in self.hf_names:
            item = next((item for item in counts if f"{{{item}}}" in name), "")
            numbers = range(counts[item] if item else 1)
            names += [name.format(block, **{item: number}) + kind for number in numbers]
        return replace(self, gpt_name=gpt_name, hf_names=tuple(names))


@dataclass(frozen=True, kw_only=True)
class NameTable:
    """The names of all weights of one kind of model.

    `prefix` begins every name but that of the head; files of the bare model, without the head,
    leave it out. `embedding` is the tensor that a tied `head` shares. `constants` is a regular
    expression for tensors that old versions of transformers saved though they are not weights.
    `layer` begins the names of a block. `experts` is the module that has the parameters of a
    block's experts in transformers, whatever their names in files.
    """

    rows: tuple[NameRow, ...]
    prefix: str
    embedding: str
    constants: str
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    experts: str = "model.layers.{}.mlp.experts"

    def row(self, gpt_name: str, model: ModelConfig | None = None) -> NameRow:
        """Return the row of a GPT parameter, with all numbers filled in.

        Raises KeyError for a parameter of a module that this kind of model does not have.
        """
        number = re.search(r"\.(\d+)\.", gpt_name)
        pattern = gpt_name.replace(number[0], ".{}.", 1) if number else gpt_name
        module, _, kind = pattern.rpartition(".")  # kind: weight or bias
        block, counts = number[1] if number else "", counts_in(model)
        for wanted, end in ((pattern, ""), (module, f".{kind}")):
            for row in self.rows:
                if row.gpt_name == wanted:
                    return row.of(gpt_name, block, counts, end)
        raise KeyError(gpt_name)

    def most_apart(self, model: ModelConfig) -> tuple[int, str]:
        """Return of how many experts or heads files have tensors of their own, and which it is."""
        names = [name for row in self.rows for name in row.hf_names]
        return max(
            (count, item.replace("_", "-") + "s")
            for item, count in (*counts_in(model).items(), ("", 0))
            if any(f"{{{item}}}" in name for name in names) or not item
        )

    def is_constant(self, hf_name: str) -> bool:
        """Whether a tensor, named with or without the prefix, is a constant and not a weight."""
        return any(re.fullmatch(self.constants, name) for name in (hf_name, self.prefix + hf_name))


def counts_in(model: ModelConfig | None) -> dict[str, int]:
    """Return how many experts, and heads with parameters of their own, a model has.

    The keys are what stands for their numbers in names. Without a model they are one each.
    """
    if model is None:
        return dict.fromkeys(("expert", "head", "kv_head"), 1)
    return {
        "expert": model.num_experts or 0,
        "head": model.num_attention_heads if model.qk_layernorm_per_head else 0,
        "kv_head": model.kv_heads if model.qk_layernorm_per_head else 0,
    }


LLAMA_BLOCK = "model.layers.{}."
LLAMA = NameTable(
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
GATE_UP = (
    NameRow("blocks.{}.mlp.gate", (LLAMA_BLOCK + "mlp.gate_up_proj",), FIRST_HALF),
    NameRow("blocks.{}.mlp.input", (LLAMA_BLOCK + "mlp.gate_up_proj",), SECOND_HALF),
)


def expert_rows(module: str, gate: str, input: str, output: str) -> tuple[NameRow, ...]:
    """Return the rows of experts that have a module each in `module` of a block."""
    names = {"gate": gate, "input": input, "output": output}
    return tuple(
        NameRow(
            f"blocks.{{}}.mlp.experts.{ours}",
            (f"{LLAMA_BLOCK}{module}.experts.{{expert}}.{theirs}",),
            EACH_EXPERT,
        )
        for ours, theirs in names.items()
    )


def shared_rows(module: str) -> tuple[NameRow, ...]:
    """Return the rows of the MLP that all tokens pass, which is `module` of a block."""
    names = {"gate": "gate_proj", "input": "up_proj", "output": "down_proj"}
    return block_rows({f"mlp.shared.{ours}": f"{module}.{name}" for ours, name in names.items()})


QWEN_EXPERTS = (
    *block_rows({"mlp.router": "mlp.gate"}),
    *expert_rows("mlp", "gate_proj", "up_proj", "down_proj"),
)
QWEN2_MOE = llama_with(
    *QWEN_EXPERTS,
    *shared_rows("mlp.shared_expert"),
    *block_rows({"mlp.shared_gate": "mlp.shared_expert_gate"}),
)
QWEN3_MOE = llama_with(*QK_NORMS, *QWEN_EXPERTS)
MIXTRAL = llama_with(
    *block_rows({"mlp.router": "block_sparse_moe.gate"}),
    *expert_rows("block_sparse_moe", "w1", "w3", "w2"),
)
NORMS_OF_ALL_HEADS = block_rows(
    {"attention.queries_norm": "self_attn.q_norm", "attention.keys_norm": "self_attn.k_norm"}
)
OLMOE = llama_with(*NORMS_OF_ALL_HEADS, *QWEN_EXPERTS)
GRANITE_BLOCK = LLAMA_BLOCK + "block_sparse_moe."
GRANITE_EXPERTS = llama_with(
    *block_rows({"mlp.router": "block_sparse_moe.router.layer"}),
    NameRow("blocks.{}.mlp.experts.gate", (GRANITE_BLOCK + "input_linear",), FIRST_HALVES),
    NameRow("blocks.{}.mlp.experts.input", (GRANITE_BLOCK + "input_linear",), SECOND_HALVES),
    NameRow("blocks.{}.mlp.experts.output", (GRANITE_BLOCK + "output_linear",), ALL_EXPERTS),
)
GRANITE_MOE = replace(GRANITE_EXPERTS, experts=GRANITE_BLOCK + "experts")
LATENT_ATTENTION = block_rows(
    {
        "attention.q": "self_attn.q_proj",
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_down_norm": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_down_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
    }
)
DEEPSEEK_V2 = llama_with(*LATENT_ATTENTION, *QWEN_EXPERTS, *shared_rows("mlp.shared_experts"))


def with_expert_bias(table: NameTable, hf_name: str) -> NameTable:
    """Return a table with the bias of the choice of experts, which is `hf_name` of a block."""
    ours = "blocks.{}.mlp.router.expert_bias"
    row = NameRow(ours, (LLAMA_BLOCK + hf_name,), keeps_dtype=True)
    return replace(table, rows=(*table.rows, row))


V3_BIAS = "mlp.gate.e_score_correction_bias"
DEEPSEEK_V3 = with_expert_bias(DEEPSEEK_V2, V3_BIAS)
GLM4_MOE = with_expert_bias(
    llama_with(*QK_NORMS, *QWEN_EXPERTS, *shared_rows("mlp.shared_experts")), V3_BIAS
)
MINIMAX_M2 = with_expert_bias(
    replace(MIXTRAL, rows=(*MIXTRAL.rows, *NORMS_OF_ALL_HEADS)),
    "block_sparse_moe.e_score_correction_bias",
)
GPT_OSS = llama_with(
    *block_rows({"mlp.router": "mlp.router"}),
    *(
        NameRow(f"blocks.{{}}.{ours}", (LLAMA_BLOCK + theirs,), form)
        for ours, theirs, form in (
            ("attention.sinks", "self_attn.sinks", SAME),
            ("mlp.experts.gate.weight", "mlp.experts.gate_up_proj", EVEN_OUTPUTS),
            ("mlp.experts.gate.bias", "mlp.experts.gate_up_proj_bias", EVEN_BIASES),
            ("mlp.experts.input.weight", "mlp.experts.gate_up_proj", ODD_OUTPUTS),
            ("mlp.experts.input.bias", "mlp.experts.gate_up_proj_bias", ODD_BIASES),
            ("mlp.experts.output.weight", "mlp.experts.down_proj", ALL_EXPERTS_TRANSPOSED),
            ("mlp.experts.output.bias", "mlp.experts.down_proj_bias", ALL_EXPERTS),
        )
    ),
)
