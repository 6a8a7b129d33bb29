"""state.json: what a checkpoint holds besides the tensors, and which runs may load it."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.config import ModelConfig
from megatron_zpp.settings.gpt.model import OF_CAPABILITIES, OF_TRAINING, PositionConfig
from megatron_zpp.settings.gpt.sizes import LatentAttentionConfig
from zeropp.errors import InputError, first_lines
from zeropp.settings import declared

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
    *declared("NOT_ARCHITECTURE", CAPABILITIES),
    *OF_TRAINING,
)
# Of the others, those that neither shapes nor the layout of weights depend on: another task, such
# as longer texts, may change them.
OF_FINE_TUNING = {
    *(PositionConfig.__annotations__.keys() - {"position_embedding_type", "rotary_interleaved"}),
    *("window_size", "window_attn_skip_freq", "layernorm_epsilon", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "activation_func_clamp_value"),
    *("softmax_type", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("scale_embeddings", "bias_gelu_fusion"),
    *declared("OF_FINE_TUNING", CAPABILITIES),
}
ROPE_SCALING = (
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_positions",
)
LATENT_ATTENTION = (*LatentAttentionConfig.__annotations__, "mscale", "mscale_all_dim")

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of training other than the tensors. Everything in it can be written as JSON.

    `architecture` holds what must be equal in a model that loads the checkpoint, `configuration`
    all settings of the run that saved it, `tokenizer` the fingerprint of its tokenizer.
    `optimizer_saved` is set when the checkpoint is saved. `num_worlds`: how many independent
    replicas have saved one each. `node`: the index of this one. `launch`: identifies the start of
    the run on all of them. `sample_sizes`: how many training, validation and
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
    unused = [] if model.use_rope_scaling else [*ROPE_SCALING]
    unused += [] if model.multi_latent_attention else LATENT_ATTENTION
    idle = (part for part in OF_CAPABILITIES if not getattr(model, part.marked_by))
    unused += [item.name for part in idle for item in dataclasses.fields(part)]
    values = {name: value for name, value in values.items() if name not in unused}
    if model.position_embedding_type == "learned_absolute":
        values["num_positions"] = model.num_positions
    return {**values, "vocab_size": vocab_size}


def with_tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that were read from JSON with tuples for its lists."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }


def check_architecture(
    checkpoint: Path,
    state: TrainingState,
    model_architecture: Mapping[str, Any] | None,
    shape_differences: list[str],
    *,
    fine_tunes: bool = False,
) -> None:
    """Raise InputError with every difference between the checkpoint's architecture and the model's.

    `model_architecture` is None if unknown; `shape_differences` are those of the model's tensors.
    With `fine_tunes`, settings that no weight depends on may differ, and are logged.
    """
    lines, differing = list(shape_differences), []
    if model_architecture is not None:
        defaults = asdict(ModelConfig())  # of settings that older checkpoints do not have
        saved = {**defaults, **state.architecture}
        own = {**defaults, **json.loads(json.dumps(dict(model_architecture)))}  # with lists
        differing = [name for name in {**own, **saved} if saved.get(name) != own.get(name)]
        lines[:0] = [
            f"{name} is {saved.get(name)} in the checkpoint, {own.get(name)} in the model"
            for name in differing
        ]
    may_change = not shape_differences and OF_FINE_TUNING.issuperset(differing)
    if lines and not (may_change and fine_tunes):
        hint = ", or --finetune, which takes the model's and trains anew" if may_change else ""
        raise InputError(
            f"the checkpoint {checkpoint} is of another architecture:\n  {first_lines(lines)}\n"
            f"Give the settings it was trained with, or load another checkpoint{hint}."
        )
    for line in lines:
        log.info("--finetune: %s", line)


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
