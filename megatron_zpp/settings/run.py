"""How a run goes: length, evaluation, checkpoints and what is logged."""

import logging
from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.settings.flag import Section, flags_in
from zeropp.settings import Rule, one_of, requires

LEVELS = MappingProxyType(
    {
        name: getattr(logging, name.upper())
        for name in ("debug", "info", "warning", "error", "critical")
    }
)
_flag = flags_in(
    "run.toml",
    {"--eval-iters 0 switches evaluation off": lambda c: c.evaluation.eval_iters == 0},
)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """How long to train, and when to stop earlier; --train-tokens may cap one of the others."""

    train_iters: int | None = _flag(None)
    train_samples: int | None = _flag(None)
    train_tokens: int | None = _flag(None)
    seed: int = _flag(1234)
    calculate_per_token_loss: bool = _flag(False)
    exit_interval: int | None = _flag(None)
    exit_duration_in_mins: int | None = _flag(None)
    exit_signal_handler: bool = _flag(False)
    exit_signal: str = _flag("SIGTERM")
    kill_switch_path: str | None = _flag(None)
    skip_train: bool = _flag(False)
    manual_gc: bool = _flag(False)
    manual_gc_interval: int = _flag(0)
    no_manual_gc_eval: bool = _flag(False)
    deterministic_mode: bool = _flag(False)
    compile: bool = _flag(False)
    dry_run: bool = _flag(False)
    dry_run_ranks: int | None = _flag(None)
    rehearse_ranks: int | None = _flag(None)

    rules = (
        requires(
            "dry_run_ranks",
            "dry_run",
            "{} needs --dry-run; a run's own number of ranks is given to torchrun or zeropp",
        ),
        one_of("dry_run", "rehearse_ranks", message="{}: give one of them"),
        one_of("train_iters", "train_samples", message="{}: give the length in one unit only"),
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """How often and on how much the held-out loss is measured, and a sample at the end."""

    eval_iters: int = _flag(100)
    eval_interval: int = _flag(1000)
    eval_at_start: bool = _flag(False)
    sample_prompt: str | None = _flag(None)
    sample_length: int = _flag(128)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Where checkpoints are written and read, how often, and what is loaded from them."""

    save: str | None = _flag(None)
    load: str | None = _flag(None)
    ckpt_step: int | None = _flag(None)
    save_interval: int | None = _flag(None)
    keep_checkpoints: int | None = _flag(None)
    save_retain_interval: int | None = _flag(None)
    async_save: bool = _flag(False)
    no_save_optim: bool = _flag(False)
    no_load_optim: bool = _flag(False)
    finetune: bool = _flag(False)
    use_checkpoint_args: bool = _flag(False)
    no_load_lr_state: bool = _flag(False)
    reset_iteration: bool = _flag(False)
    no_verify_checkpoint: bool = _flag(False)
    exit_on_missing_checkpoint: bool = _flag(False)

    rules = (
        Rule(
            ("save_retain_interval", "save_interval"),
            lambda retained, interval: retained and interval and retained % interval,
            "{} is not a multiple of {}: change one of them",
        ),
        requires("exit_on_missing_checkpoint", "load", "{} needs --load FOLDER"),
        requires("use_checkpoint_args", "load", "{} needs --load FOLDER"),
    )


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """What is printed and written for TensorBoard and Weights & Biases, and how often."""

    log_interval: int = _flag(100)
    log_format: str = _flag("auto")
    logging_level: int = _flag(20, synonyms=LEVELS)
    plan_file: str | None = _flag(None)
    log_params_norm: bool = _flag(False)
    log_num_zeros_in_grad: bool = _flag(False)
    log_throughput: bool = _flag(False)
    tensorboard_dir: str | None = _flag(None)
    tensorboard_queue_size: int = _flag(1000)
    tensorboard_log_interval: int = _flag(1)
    log_timers_to_tensorboard: bool = _flag(False)
    log_batch_size_to_tensorboard: bool = _flag(False)
    log_validation_ppl_to_tensorboard: bool = _flag(False)
    log_optimizer_states_to_tensorboard: bool = _flag(False)
    log_memory_to_tensorboard: bool = _flag(False)
    log_all_axes_to_tensorboard: bool = _flag(False)
    log_world_size_to_tensorboard: bool = _flag(False)
    profile: bool = _flag(False)
    profile_step_start: int = _flag(10)
    profile_step_end: int = _flag(12)
    profile_ranks: tuple[int, ...] = _flag((0,))
    wandb_project: str | None = _flag(None)
    wandb_exp_name: str | None = _flag(None)
    wandb_entity: str | None = _flag(None)
    wandb_save_dir: str | None = _flag(None)

    rules = (
        requires(
            "profile",
            "tensorboard_dir",
            "{} needs --tensorboard-dir FOLDER, where the trace is written",
        ),
        Rule(
            ("profile", "profile_step_start", "profile_step_end"),
            lambda profile, start, end: profile and end <= start,
            "{2}: expected more than {1}",
        ),
    )
