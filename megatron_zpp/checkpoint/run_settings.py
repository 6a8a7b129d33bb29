"""What a checkpoint keeps of a run's settings, and a run's settings taken from a checkpoint."""

import dataclasses
import logging
from dataclasses import replace
from typing import Any

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.settings.config import Config, ModelConfig
from zeropp.errors import InputError

# Of the model's section: what does not decide which weights there are and what they mean.
FREE = (
    "seq_length", "max_position_embeddings", "init_method_std", "hidden_dropout",
    "attention_dropout", "fp32_residual_connection", "attention_softmax_in_fp32",
    "apply_query_key_layer_scaling",
)
SCALING = ("use_rope_scaling", "rope_scaling_factor")  # of the rotary positions, if it is used

log = logging.getLogger("megatron_zpp")


def with_checkpoint_model(config: Config) -> Config:
    """`config` with the model's shape of the checkpoint in `--load` (`--use-checkpoint-args`)."""
    path = checkpoint.choose(config.checkpoint.load)
    if path is None:
        raise nothing_to_load(config.checkpoint.load, "--use-checkpoint-args")
    shape = dict(checkpoint.read_state(path).architecture)
    shape.pop("vocab_size")
    positions = shape.pop("num_positions", None)
    if positions is not None:
        shape["max_position_embeddings"] = positions
    for name, value in shape.items():
        if value != getattr(config.model, name):
            log.info("--use-checkpoint-args: %s is %s", name, value)
    config = replace(config, model=replace(config.model, **shape))
    config.model.check()
    return config


def architecture(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """What must be equal in every model that loads the same weights."""
    fields = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.name not in FREE
    }
    for name in SCALING if not model.use_rope_scaling else ():
        del fields[name]  # older checkpoints do not have them
    if model.position_embedding_type == "learned_absolute":
        fields["num_positions"] = model.num_positions
    return {**fields, "vocab_size": vocab_size}


def settings(config: Config) -> dict[str, Any]:
    """All settings of a run by section, as plain values that JSON can hold."""
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    zero = sections.pop("zero").to_dict()
    return {"zero": zero, **{name: dataclasses.asdict(part) for name, part in sections.items()}}


def nothing_to_load(folder: str, flag: str) -> InputError:
    return InputError(
        f"--load {folder} holds no checkpoint, and {flag} needs one: name the folder that --save "
        f"named, or leave {flag} out"
    )
