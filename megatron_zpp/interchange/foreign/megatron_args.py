"""Megatron's arguments, as its checkpoints hold them, as the configuration of our GPT.

Most fields of ModelConfig have the names of Megatron's arguments and are taken as they are.
"""

import dataclasses
import math
from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from typing import Any

from megatron_zpp.interchange.foreign.pickles import UnloadedObject
from megatron_zpp.settings.config import ModelConfig
from megatron_zpp.settings.gpt.model import OF_TRAINING
from zeropp.errors import InputError
from zeropp.settings import declared, read_toml

CAPABILITIES = "megatron_zpp.interchange.foreign.capabilities"
PATTERNS = ("window_size", "window_attn_skip_freq", "no_rope_freq")
GAINS_AROUND_ZERO = "layernorm_zero_centered_gamma"  # --apply-layernorm-1p since 0.17
_NOT_OF_THE_MODEL = ("make_vocab_size_divisible_by", "seq_length", *OF_TRAINING)


def model_fields(args: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return the fields of ModelConfig that the arguments set, without those of the vocabulary.

    Raises InputError for arguments of a model that our GPT cannot be, and for missing ones.
    """
    for what, rows in table()["only"].items():
        for name, supported in rows.items():
            if args.get(name) not in (None, *supported):
                shown = f"--{name.replace('_', '-')} is {args[name]!r}"
                raise InputError(f"{location}: {shown}: not available here: {what}")
    missing = [
        name for name in ("num_layers", "hidden_size", "num_attention_heads") if not args.get(name)
    ]
    if missing:
        raise InputError(f"{location}: its arguments do not say {', '.join(missing)}")
    fields = {
        field.name: args[field.name]
        for field in dataclasses.fields(ModelConfig)
        if args.get(field.name) is not None and field.name not in _NOT_OF_THE_MODEL
    }
    fields["seq_length"] = args.get("seq_length") or args.get("encoder_seq_length") or 1
    fields.setdefault("max_position_embeddings", fields["seq_length"])
    fields |= _renamed(args) | _positions(args, location) | _layer_patterns(args)
    for read in declared("READS", CAPABILITIES):
        fields = read(fields, location)
    return fields


def args_in(content: Any, where: str) -> dict[str, Any]:
    """Return the arguments that a program saved; {} if it saved none.

    Raises InputError if they are something else than arguments.
    """
    args = content.get("args") if isinstance(content, Mapping) else UnloadedObject()
    if args is None:
        return {}
    if not isinstance(args, Namespace):
        raise InputError(f"{where}: is not laid out as Megatron's: no arguments are where they are")
    return vars(args)


def _renamed(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields whose arguments have another name or meaning."""
    fields: dict[str, Any] = {"num_query_groups": None}
    if args.get("group_query_attention"):
        fields["num_query_groups"] = args["num_query_groups"]
    elif args.get("num_key_value_heads"):  # Megatron-DeepSpeed
        fields["num_query_groups"] = args["num_key_value_heads"]
    if args.get("add_bias_linear") is not None:
        fields["disable_bias_linear"] = not args["add_bias_linear"]
    if args.get("norm_epsilon") is not None:
        fields["layernorm_epsilon"] = args["norm_epsilon"]
    if args.get("normalization") is None and args.get("use_rmsnorm"):
        fields["normalization"] = "RMSNorm"
    fields["normalization"] = _normalization(args.get("normalization"))
    if args.get(GAINS_AROUND_ZERO) is not None:
        fields["apply_layernorm_1p"] = args[GAINS_AROUND_ZERO]
    return fields


def _normalization(name: str | None) -> str:
    names = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}  # Megatron-DeepSpeed's spelling
    return names.get(name, name) if name else "LayerNorm"


def _positions(args: Mapping[str, Any], location: str) -> dict[str, Any]:
    kind = getattr(args.get("position_embedding_type"), "name", args.get("position_embedding_type"))
    fields: dict[str, Any] = {}
    if args.get("use_rotary_position_embeddings"):
        kind = "rope"
    if kind == "yarn":
        kind, fields["rope_type"] = "rope", "yarn"
        fields["yarn_attention_factor"] = _yarn_attention_factor(args)
    kind = kind or "learned_absolute"
    if kind not in ("learned_absolute", "rope", "alibi", "none"):
        raise InputError(f"{location}: --position-embedding-type {kind!r} is not available here")
    fields["position_embedding_type"] = kind
    if (base := args.get("rotary_base")) is not None:
        fields["rotary_base"] = float(base)
    return fields


def _yarn_attention_factor(args: Mapping[str, Any]) -> float:
    """Return what queries and keys are multiplied by, which Megatron computes of two `mscale`s."""
    scale = args.get("rotary_scaling_factor") or 1.0
    mscale, of_all = args.get("mscale"), args.get("mscale_all_dim")
    if mscale is None or of_all is None:
        mscale, of_all = 1.0, 0.0
    growth = 0.1 * math.log(max(scale, 1.0))
    return (1.0 + mscale * growth) / (1.0 + of_all * growth)


def _yarn_args(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's arguments for YaRN's settings."""
    growth = 0.1 * math.log(max(model.rotary_scaling_factor, 1.0))
    return {
        "yarn_original_max_position_embeddings": model.yarn_original_max_position_embeddings,
        "yarn_beta_fast": model.yarn_beta_fast,
        "yarn_beta_slow": model.yarn_beta_slow,
        "mscale": (model.yarn_attention_factor - 1.0) / growth if growth else 1.0,
        "mscale_all_dim": 0.0,
    }


def _layer_patterns(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts of frequencies and windows, which arguments have as numbers and lists."""
    fields = {}
    for name in (*PATTERNS, *declared("PATTERNS", CAPABILITIES)):
        value = args.get(name)
        if name == "window_size" and value is not None:
            fields[name] = ",".join(map(str, value))
        elif isinstance(value, list | tuple):
            fields[name] = str(list(map(int, value))).replace(" ", "")
        elif value is not None:
            fields[name] = str(value)
    return fields


def megatron_args(model: ModelConfig, vocab_rows: int, what: str) -> dict[str, Any]:
    """Return Megatron-LM's arguments for a model; raises InputError if they cannot describe it."""
    if model.multi_latent_attention:
        raise InputError(f"{what}: models with latent attention are not written for Megatron-LM")
    defaults = ModelConfig()
    lines = [
        f"--{name.replace('_', '-')} {getattr(model, name)}"
        for name in table()["fields"]["not_in_megatron"]
        if getattr(model, name) != getattr(defaults, name)
    ]
    if model.position_embedding_type == "alibi":
        lines.append("--position-embedding-type alibi")
    is_yarn = model.rope_type == "yarn"
    if is_yarn and model.rotary_scaling_factor == 1 and model.yarn_attention_factor != 1:
        lines.append(f"--yarn-attention-factor {model.yarn_attention_factor} without scaling")
    lines += [line for missing in declared("MISSING", CAPABILITIES) for line in missing(model)]
    if lines:
        raise InputError(f"{what}: Megatron-LM has no {', '.join(lines)}")
    args = {name: getattr(model, name) for name in table()["fields"]["in_megatron"]}
    for name in ("rotary_base", "rotary_seq_len_interpolation_factor"):  # whole numbers there
        args[name] = int(args[name]) if args[name] == int(args[name]) else args[name]
    args |= _yarn_args(model) if is_yarn else {}
    for write in declared("WRITES", CAPABILITIES):
        args |= write(model)
    kind = "yarn" if is_yarn else model.position_embedding_type
    return args | {
        GAINS_AROUND_ZERO: model.apply_layernorm_1p,
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_dim,
        "group_query_attention": model.kv_heads != model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "max_position_embeddings": model.num_positions,
        "position_embedding_type": kind,
        "add_position_embedding": kind == "learned_absolute",
        "use_rotary_position_embeddings": kind == "rope",
        "norm_epsilon": model.layernorm_epsilon,
        "add_bias_linear": not model.disable_bias_linear,
        "padded_vocab_size": vocab_rows,
        **table()["always"],
    }


@cache
def table() -> Mapping[str, Any]:
    """Return the contents of `megatron_args.toml`."""
    return read_toml(__package__, "megatron_args.toml")
