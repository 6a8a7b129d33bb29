"""The names of a GPT's weights in Megatron's checkpoints: one table, whatever the files.

megatron-core's own names are the reference (`decoder.layers.0.self_attention.linear_qkv.weight`).
Names of older Megatrons, and of checkpoints that are not split by rank, are brought to them by
`core_name`. Queries, keys and values are in groups as in our GPT; the two halves of a gated
`linear_fc1` are the gate and what it multiplies.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from megatron_zpp.interchange.families.names import NameTable, name_table
from megatron_zpp.settings.config import ModelConfig
from zeropp.settings import read_toml


def megatron_names(model: ModelConfig) -> NameTable:
    """Return the names of a model's weights, of which gated MLPs have others."""
    return name_table("megatron_gated" if model.is_gated else "megatron")


def core_name(name: str) -> str:
    """Return megatron-core's own name for the tensor that a checkpoint calls `name`."""
    for pattern, replacement in table()["spellings"]:
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
    dim = table()["split_dims"].get(core.split(".")[-2] if "." in core else "")
    return None if dim == 1 and core.endswith(".bias") else dim


def is_constant(name: str) -> bool:
    """Whether an entry of a checkpoint is not a weight."""
    return name_table("megatron").is_constant(name)


def stored_name(core: str) -> str:
    """Return the name in a torch_dist checkpoint of what megatron-core calls `core`.

    There a normalization belongs to the linear layer behind it.
    """
    name = core.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


@cache
def table() -> Mapping[str, Any]:
    """Return the contents of `megatron_names.toml`."""
    return read_toml(__package__, "megatron_names.toml")
