"""The names of a GPT's weights in Megatron's checkpoints: one table, whatever the files.

megatron-core's own names are the reference (`decoder.layers.0.self_attention.linear_qkv.weight`).
Names of older Megatrons, and of checkpoints that are not split by rank, are brought to them by
`core_name`. Queries, keys and values are in groups as in our GPT; the two halves of a gated
`linear_fc1` are the gate and what it multiplies. All experts of a layer are in one tensor, with the
experts in front, also where files have them apart (`rank_parts.with_experts_joined`).
"""

import re
from collections.abc import Sequence
from types import MappingProxyType

from megatron_zpp.interchange.families.names import NameTable, name_table
from megatron_zpp.settings.config import ModelConfig

# What other names begin with or contain, and megatron-core's own; tried in this order.
_SPELLINGS = (
    (r"^(module\.)+", ""),
    (r"^language_model\.(encoder|transformer|decoder)\.", "decoder."),
    (r"^language_model\.", ""),
    (r"^encoder\.", "decoder."),
    (r"^output_layer\.lm_head\.", "output_layer."),
    (r"\.attention\.", ".self_attention."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
    (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
    (r"\.final_norm\.", ".final_layernorm."),
)
# The dim along which tensor-parallel ranks have parts of a weight, by its module; others have all.
_SPLIT_DIMS = MappingProxyType(
    {
        "word_embeddings": 0,
        "output_layer": 0,
        "linear_qkv": 0,
        "core_attention": 0,
        "linear_fc1": 0,
        "linear_proj": 1,
        "linear_fc2": 1,
    }
)


def megatron_names(model: ModelConfig) -> NameTable:
    """Return the names of a model's weights, of which gated MLPs have others."""
    return name_table("megatron_gated" if model.is_gated else "megatron")


def core_name(name: str) -> str:
    """Return megatron-core's own name for the tensor that a checkpoint calls `name`."""
    for pattern, replacement in _SPELLINGS:
        name = re.sub(pattern, replacement, name)
    return name


def core_names(names: Sequence[str]) -> dict[str, str]:
    """Return megatron-core's own names, also of layers that DeepSpeed's pipeline engine numbers.

    It numbers all modules one after another: the embedding, the layers, the final normalization,
    which alone has a `weight` without a name before it, and the head.
    """
    numbers = {int(match[1]) for name in names if (match := re.match(r"(\d+)\.input_", name))}
    layers = {number: layer for layer, number in enumerate(sorted(numbers))}

    def plain(name: str) -> str:
        name = re.sub(r"^tied_modules\.embed\.", "embedding.", name)
        match = re.match(r"(\d+)\.(.*)", name)
        if match is None:
            return name
        number, rest = int(match[1]), match[2]
        if number in layers:
            return f"decoder.layers.{layers[number]}.{rest}"
        if "." not in rest:
            return f"decoder.final_layernorm.{rest}"
        return f"output_layer.{rest}" if rest.startswith("lm_head.") else f"embedding.{rest}"

    return {name: core_name(plain(name)) for name in names}


def split_dim(core: str) -> int | None:
    """Return the dim along which tensor-parallel ranks split a tensor; None if all have all."""
    dim = _SPLIT_DIMS.get(core.split(".")[-2] if "." in core else "")
    return None if dim == 1 and core.endswith(".bias") else dim


def is_constant(name: str) -> bool:
    """Whether an entry of a checkpoint is not a weight."""
    return name_table("megatron").is_constant(name)


def stored_names(core: str, *, has_experts: bool) -> list[str]:
    """Return the names in a torch_dist checkpoint of what megatron-core calls `core`.

    There a normalization belongs to the linear layer behind it. That before experts has two names:
    Transformer Engine's layers have it by itself, megatron-core's own layers as before an MLP.
    """
    name = core.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    return [name, core] if has_experts and ".pre_mlp_layernorm." in core else [name]
