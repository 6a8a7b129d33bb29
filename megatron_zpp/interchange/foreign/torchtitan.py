"""torchtitan's checkpoints of its Llama 3: files of torch.distributed.checkpoint and nothing else.

Their tensors are whole, whatever ranks wrote them, with Adam's moments as
`optimizer.state.<weight>.exp_avg`. What the model is they do not say: sizes follow from shapes, the
rest from flags. torchtitan rotates neighbouring channels, our GPT those half a head apart, so rows
of queries and keys change places, as in its own conversion to Hugging Face's format.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.interchange.foreign.shard_tensors import ShardTensors
from megatron_zpp.interchange.foreign.tensor_files import (
    COMMON_STATE,
    ForeignCheckpoint,
    LazyTensor,
    NamedTensors,
)
from megatron_zpp.settings.gpt.shape_flags import ShapeFlags
from zeropp.errors import InputError
from zeropp.optim import MOMENTS

STATE = "optimizer.state."
STEP = "train_state.step"
NOT_WEIGHTS = ("optimizer.", "train_state", "lr_scheduler", "dataloader", "freqs_cis")
EMBEDDING, QUERIES, KEYS = (
    "tok_embeddings.weight",
    "layers.0.attention.wq.weight",
    "layers.0.attention.wk.weight",
)


def read_torchtitan(folder: Path) -> ForeignCheckpoint:
    """Return what is in a checkpoint; raises InputError if it is damaged or incomplete."""
    shards = ShardTensors(folder)
    if COMMON_STATE in shards.names():
        raise InputError(
            f"{folder}: is of Megatron-LM, but metadata.json, which it writes last, is missing: "
            "the save was interrupted, or the folder was not copied whole"
        )
    shapes = shards.shapes()
    weights = {name: shards.whole(name) for name in shapes if not name.startswith(NOT_WEIGHTS)}
    moments = {key: _moments(shards, key) for key in MOMENTS}
    step_names = [name for name in shapes if name.startswith(STATE) and name.endswith(".step")]
    reason = ""
    if not step_names or any(each.keys() != weights.keys() for each in moments.values()):
        moments, reason = {}, "there is no state of Adam of all weights in it"
    return ForeignCheckpoint(
        weights=NamedTensors(str(folder), weights),
        moments={key: NamedTensors(f"{folder}: {key}", each) for key, each in moments.items()},
        step=shards.whole(step_names[0]).read().item() if moments else 0,
        without_moments=reason,
        iteration=int(shards.whole(STEP).read().item()) if STEP in shapes else 0,
    )


def torchtitan_fields(weights: NamedTensors, flags: ShapeFlags) -> dict[str, Any]:
    """Return the fields of ModelConfig: sizes of the tensors' shapes, and what the flags say.

    Raises InputError for another model, and for missing flags.
    """
    shapes = {name: fact.shape for name, fact in weights.facts().items()}
    ffn_name = "layers.0.feed_forward.w1.weight"
    if missing := [name for name in (EMBEDDING, QUERIES, KEYS, ffn_name) if name not in shapes]:
        raise InputError(
            f"{weights.location}: has no {missing[0]}, so it is not torchtitan's Llama 3, the only "
            "model of torch.distributed.checkpoint without a description that is imported"
        )
    heads = flags.num_attention_heads
    if heads is None or flags.rotary_base is None:
        raise InputError(
            f"{weights.location}: does not say what its model is: give --num-attention-heads and "
            "--rotary-base (n_heads and rope_theta of its flavor), and see --help for others"
        )
    query_rows, hidden = shapes[QUERIES]
    head_dim, rest = divmod(query_rows, heads)
    if rest or shapes[KEYS][0] % head_dim:
        raise InputError(
            f"--num-attention-heads {heads}: does not fit {query_rows} rows of queries and "
            f"{shapes[KEYS][0]} of keys"
        )
    factor = 8.0 if flags.rope_scaling_factor is None else flags.rope_scaling_factor
    length = flags.seq_length or 8192
    return {
        "num_layers": 1 + max(int(name.split(".")[1]) for name in shapes if "layers." in name),
        "hidden_size": hidden,
        "ffn_hidden_size": shapes[ffn_name][0],
        "num_attention_heads": heads,
        "num_query_groups": shapes[KEYS][0] // head_dim,
        "kv_channels": head_dim,
        "seq_length": length,
        "max_position_embeddings": length,
        "layernorm_epsilon": flags.layernorm_epsilon or 1e-5,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "rotary_base": flags.rotary_base,
        "use_rope_scaling": factor != 1,
        **({"rope_scaling_factor": factor} if factor != 1 else {}),
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _moments(shards: ShardTensors, key: str) -> Mapping[str, LazyTensor]:
    ending = f".{key}"
    return {
        name.removeprefix(STATE).removesuffix(ending): shards.whole(name)
        for name in shards.shapes()
        if name.startswith(STATE) and name.endswith(ending)
    }
