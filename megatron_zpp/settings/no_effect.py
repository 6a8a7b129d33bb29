"""Settings that change nothing beside the others: which, when, and why; said once where typed."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from megatron_zpp.settings.config import Config, ModelConfig
from megatron_zpp.settings.data import names_examples


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Settings, by destination, that have no effect `when` a configuration is like this."""

    settings: tuple[str, ...]
    when: Callable[[Config], bool]
    why: str


IDLE = (
    Idle(
        settings=tuple(one.name for one in fields(ModelConfig) if one.name != "seq_length"),
        when=lambda c: c.lora.pretrained_checkpoint is not None,
        why="the model in --pretrained-checkpoint says what it is",
    ),
    Idle(
        settings=("lora_alpha", "lora_dropout"),
        when=lambda c: c.lora.lora_rank == 0,
        why="without --lora-rank there are no adapters",
    ),
    Idle(
        settings=("save_interval", "keep_checkpoints", "no_save_optim"),
        when=lambda c: c.checkpoint.save is None,
        why="nothing is saved without --save",
    ),
    Idle(
        settings=("no_load_optim", "finetune", "reset_iteration")
        + ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        when=lambda c: c.checkpoint.load is None,
        why="nothing is loaded without --load",
    ),
    Idle(
        settings=("use_pin_memory",),
        when=lambda c: c.zero.zero_optimization.offload_optimizer.device == "none",
        why="nothing is offloaded",
    ),
    Idle(
        settings=("fp32_residual_connection",),
        when=lambda c: c.precision.format == "float32",
        why="everything is fp32",
    ),
    Idle(
        settings=("loss_scale", "initial_loss_scale", "min_loss_scale")
        + ("loss_scale_window", "hysteresis"),
        when=lambda c: not c.precision.fp16,
        why="only --fp16 scales the loss",
    ),
    Idle(
        settings=("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        when=lambda c: c.precision.loss_scale is not None,
        why="a --loss-scale that is given stays as it is",
    ),
    Idle(
        settings=("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        when=lambda c: c.schedule.lr_decay_style != "WSD",
        why="it needs --lr-decay-style WSD",
    ),
    Idle(
        settings=("min_lr",),
        when=lambda c: c.schedule.lr_decay_style == "constant",
        why="--lr-decay-style constant does not decay",
    ),
    Idle(
        settings=("lr_warmup_init",),
        when=lambda c: not any(
            getattr(c.schedule, f"lr_warmup_{unit}")
            for unit in ("fraction", "iters", "samples", "tokens")
        ),
        why="there is no warm-up",
    ),
    Idle(
        settings=("recompute_num_layers",),
        when=lambda c: c.recompute.recompute_granularity != "full",
        why="it counts the blocks of --recompute-granularity full",
    ),
    Idle(
        settings=("rotary_percent", "rotary_base", "use_rope_scaling"),
        when=lambda c: c.model.position_embedding_type != "rope",
        why="it needs --position-embedding-type rope",
    ),
    Idle(
        settings=("rope_scaling_factor",),
        when=lambda c: not c.model.use_rope_scaling,
        why="it needs --use-rope-scaling",
    ),
    Idle(
        settings=("split",),
        when=lambda c: c.data.mock_data or bool(c.data.train_data_path or c.data.valid_data_path),
        why="each split has its own source",
    ),
    Idle(
        settings=("data_cache_path",),
        when=lambda c: c.data.mock_data,
        why="made-up samples need no index",
    ),
    Idle(
        settings=("data_cache_path",),
        when=lambda c: names_examples(c.data),
        why="examples need no index",
    ),
    Idle(
        settings=("eval_interval", "eval_at_start"),
        when=lambda c: c.evaluation.eval_iters == 0,
        why="--eval-iters 0 switches evaluation off",
    ),
    Idle(
        settings=("sample_length",),
        when=lambda c: c.evaluation.sample_prompt is None,
        why="it needs --sample-prompt",
    ),
    Idle(
        settings=("tensorboard_queue_size",),
        when=lambda c: c.log.tensorboard_dir is None,
        why="it needs --tensorboard-dir",
    ),
    Idle(
        settings=("tensorboard_log_interval", "log_timers_to_tensorboard")
        + ("log_batch_size_to_tensorboard", "log_validation_ppl_to_tensorboard")
        + ("log_optimizer_states_to_tensorboard", "log_memory_to_tensorboard")
        + ("log_world_size_to_tensorboard",),
        when=lambda c: c.log.tensorboard_dir is None and c.log.wandb_project is None,
        why="it needs --tensorboard-dir or --wandb-project",
    ),
    Idle(
        settings=("wandb_exp_name", "wandb_save_dir"),
        when=lambda c: c.log.wandb_project is None,
        why="it needs --wandb-project",
    ),
)


def why_idle(setting: str, config: Config) -> str:
    """Why a setting changes nothing in this configuration; empty if it does."""
    return next((one.why for one in IDLE if setting in one.settings and one.when(config)), "")
