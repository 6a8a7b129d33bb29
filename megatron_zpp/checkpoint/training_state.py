"""state.json: what a checkpoint holds besides the tensors, and which runs may load it."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_zpp.settings.config import Config, ModelConfig
from megatron_zpp.settings.gpt.experts import OF_TRAINING, MoeConfig
from zeropp.errors import InputError, first_lines

STATE = "state.json"
FORMAT = 1

# Model settings that may differ between the run that saved the weights and one that loads them.
NOT_ARCHITECTURE = (
    "seq_length",
    "max_position_embeddings",
    "init_method_std",
    "hidden_dropout",
    "attention_dropout",
    "fp32_residual_connection",
    "pad_vocab_size_to",
    "moe_router_dtype",
    *OF_TRAINING,
)
ROPE_SCALING = (
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_positions",
)
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
LATER_FIELDS = (
    "softmax_type",
    "quick_geglu",
    "glu_linear_offset",
    "activation_func_clamp_value",
)
LATENT_ATTENTION = (
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "mscale",
    "mscale_all_dim",
)


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of training other than the tensors. Everything in it can be written as JSON.

    `architecture` holds what must be equal in a model that loads the checkpoint, `configuration`
    all settings of the run that saved it, `tokenizer` the fingerprint of its tokenizer.
    `optimizer_saved` is set when the checkpoint is saved. `num_worlds`: how many nodes that step
    alone have saved one each. `node`: the place of this one among them. `launch`: what names the
    start of the run, on all of them alike. `sample_sizes`: how many training, validation and
    test samples runs asked for, this one last, on which their order depends. `data_bytes`: those of
    each file of tokens or examples.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    seed: int
    world_size: int
    stage: int
    tokenizer: str
    optimizer_saved: bool = True
    num_worlds: int = 1
    node: int = 0
    launch: str = ""
    sample_sizes: list[list[int]] = field(default_factory=list)
    data_bytes: dict[str, int] = field(default_factory=dict)
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    architecture: dict[str, Any] = field(default_factory=dict)
    configuration: dict[str, Any] = field(default_factory=dict)


def state_text(state: TrainingState) -> str:
    """The content of state.json."""
    return json.dumps({"format": FORMAT, **vars(state)}, indent=1) + "\n"


def read_state(checkpoint: Path) -> TrainingState:
    """Return a checkpoint's training state; raises InputError if this program cannot read it."""
    content = json.loads((checkpoint / STATE).read_text())
    if content.pop("format") != FORMAT:
        raise InputError(f"{checkpoint} was written by another version of this program")
    unknown = sorted(set(content) - {item.name for item in dataclasses.fields(TrainingState)})
    if unknown:
        raise InputError(f"{checkpoint / STATE} has unknown entries: {', '.join(unknown)}")
    return TrainingState(**content)


def architecture(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The settings that must be equal in every model that loads the same weights."""
    values = {
        item.name: getattr(model, item.name)
        for item in dataclasses.fields(model)
        if item.name not in NOT_ARCHITECTURE
    }
    # Older checkpoints do not have these.
    unused = [] if model.use_rope_scaling else [*ROPE_SCALING]
    unused += [name for name in MULTIPLIERS if getattr(model, name) == 1]
    defaults = ModelConfig()
    unused += [name for name in LATER_FIELDS if values[name] == getattr(defaults, name)]
    unused += [] if model.multi_latent_attention else LATENT_ATTENTION
    unused += [] if model.has_experts else [item.name for item in dataclasses.fields(MoeConfig)]
    values = {name: value for name, value in values.items() if name not in unused}
    if model.position_embedding_type == "learned_absolute":
        values["num_positions"] = model.num_positions
    return {**values, "vocab_size": vocab_size}


def with_tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that were read from JSON with tuples for its lists."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }


def run_settings(config: Config) -> dict[str, Any]:
    """All settings of a run by section, as plain values that JSON can hold."""
    sections = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    zero = sections.pop("zero").to_dict()
    return {"zero": zero, **{name: asdict(section) for name, section in sections.items()}}


def check_architecture(
    checkpoint: Path,
    state: TrainingState,
    model_architecture: Mapping[str, Any] | None,
    shape_differences: list[str],
) -> None:
    """Raise InputError with every difference between the checkpoint's architecture and the model's.

    `model_architecture` is None if unknown; `shape_differences` are those of the model's tensors.
    """
    lines = list(shape_differences)
    if model_architecture is not None:
        defaults = asdict(ModelConfig())  # of settings that older checkpoints do not have
        saved = {**defaults, **state.architecture}
        own = {**defaults, **json.loads(json.dumps(dict(model_architecture)))}  # with lists
        names = [*own, *(name for name in saved if name not in own)]
        lines[:0] = [
            f"{name} is {saved.get(name)} in the checkpoint, {own.get(name)} in the model"
            for name in names
            if saved.get(name) != own.get(name)
        ]
    if lines:
        raise InputError(
            f"the checkpoint {checkpoint} is of another architecture:\n  {first_lines(lines)}\n"
            "Give the settings it was trained with, or load another checkpoint."
        )


def check_tokenizer(checkpoint: Path, state: TrainingState, tokenizer: str | None) -> None:
    """Raise InputError if the checkpoint's tokenizer has another fingerprint than `tokenizer`."""
    if tokenizer is not None and state.tokenizer != tokenizer:
        raise InputError(
            f"the checkpoint {checkpoint} was trained with another tokenizer (fingerprint "
            f"{state.tokenizer[:12]}, now {tokenizer[:12]}): its token ids mean other text. "
            "Give the tokenizer it was trained with."
        )


def check_optimizer_saved(checkpoint: Path, state: TrainingState) -> None:
    """Raise InputError if the checkpoint has no optimizer state."""
    if not state.optimizer_saved:
        raise InputError(
            f"the checkpoint {checkpoint} has no optimizer state (it was saved with "
            "--no-save-optim): add --no-load-optim to start with a fresh optimizer"
        )
