"""How a run goes: length, evaluation, checkpoints and what is logged."""

import logging
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from megatron_zpp.settings.flag import NoEffect, Section, flag, flag_that_needs, needs
from zeropp.settings.schema import Rule, one_of, requires

LEVELS = MappingProxyType(
    {
        name: getattr(logging, name.upper())
        for name in ("debug", "info", "warning", "error", "critical")
    }
)
_NO_EVALUATION = NoEffect(
    "--eval-iters 0 switches evaluation off", when=lambda c: c.evaluation.eval_iters == 0
)
_evaluation_flag = partial(flag, no_effect=_NO_EVALUATION)
load_flag = flag_that_needs("--load", lambda c: c.checkpoint.load is not None)
_save_flag = flag_that_needs("--save", lambda c: c.checkpoint.save is not None)
_gc_flag = flag_that_needs("--manual-gc", lambda c: c.training.manual_gc)
_tensorboard_flag = flag_that_needs(
    "--tensorboard-dir", lambda c: c.log.tensorboard_dir is not None
)
_profile_flag = flag_that_needs("--profile", lambda c: c.log.profile)
_wandb_flag = flag_that_needs("--wandb-project", lambda c: c.log.wandb_project is not None)
_curve_flag = flag_that_needs(
    "--tensorboard-dir or --wandb-project",
    lambda c: c.log.tensorboard_dir is not None or c.log.wandb_project is not None,
)
_NEEDS_PROMPT = needs("--sample-prompt", lambda c: c.evaluation.sample_prompt is not None)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """How long to train, and when to stop earlier; --train-tokens may cap one of the others."""

    train_iters: int | None = flag(None, "steps of the whole run", minimum=1)
    train_samples: int | None = flag(None, "samples of the whole run", minimum=1)
    train_tokens: int | None = flag(None, "tokens of the whole run", minimum=1)
    seed: int = flag(
        1234, "seed of weights, dropout and sample order", minimum=0, maximum=2**32 - 1
    )
    calculate_per_token_loss: bool = flag(
        False,
        "average the loss over all tokens of a step that have one, instead of over the means of "
        "its micro-batches",
    )
    exit_interval: int | None = flag(
        None, "save and stop at an iteration divisible by this", minimum=1
    )
    exit_duration_in_mins: int | None = flag(
        None, "save and stop after this many minutes", minimum=0
    )
    exit_signal_handler: bool = flag(
        False, "save and stop on SIGTERM", aliases=("exit-signal-handler-for-training",)
    )
    exit_signal: str = flag(
        "SIGTERM",
        "a signal on which --exit-signal-handler saves and stops, beside SIGTERM and SIGINT",
        choices=("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGALRM"),
        no_effect=needs("--exit-signal-handler", lambda c: c.training.exit_signal_handler),
    )
    kill_switch_path: str | None = flag(
        None, "save and stop when this file exists", aliases=("kill-switch-file",)
    )
    skip_train: bool = flag(False, "only evaluate", aliases=("no-train",))
    manual_gc: bool = flag(
        False, "collect Python's garbage at --manual-gc-interval, at the same step on all ranks"
    )
    manual_gc_interval: int = _gc_flag(
        0, "iterations between collections; 0: none while training", minimum=0
    )
    no_manual_gc_eval: bool = _gc_flag(
        False, "no collection before and after an evaluation", aliases=("disable-manual-gc-eval",)
    )
    deterministic_mode: bool = flag(
        False, "use only deterministic kernels; an operation without one is an error"
    )
    compile: bool = flag(False, "compile transformer blocks and the loss with torch.compile")
    dry_run: bool = flag(False, "only print what the run needs, and whether it fits")
    dry_run_ranks: int | None = flag(
        None, "number of ranks to estimate for (default: those launched)", minimum=1
    )

    rules = (
        requires(
            "dry_run_ranks",
            "dry_run",
            "{} needs --dry-run; a run's own number of ranks is given to torchrun or zeropp",
        ),
        one_of("train_iters", "train_samples", message="{}: give the length in one unit only"),
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """How often and on how much the held-out loss is measured, and a sample at the end."""

    eval_iters: int = flag(100, "batches of an evaluation; 0: none", minimum=0, synonyms={"-1": 0})
    eval_interval: int = _evaluation_flag(1000, "iterations between evaluations", minimum=1)
    eval_at_start: bool = _evaluation_flag(False, "also evaluate before the first iteration")
    sample_prompt: str | None = flag(None, "after training, generate a continuation of this text")
    sample_length: int = flag(128, "tokens to generate", minimum=1, no_effect=_NEEDS_PROMPT)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Where checkpoints are written and read, how often, and what is loaded from them."""

    save: str | None = flag(None, "folder to save checkpoints in")
    load: str | None = flag(None, "folder to resume from, if it holds a checkpoint")
    ckpt_step: int | None = load_flag(
        None, "iteration of the checkpoint to load (default: the newest)", minimum=0
    )
    save_interval: int | None = _save_flag(
        None,
        "iterations between checkpoints (default: only at the end)",
        minimum=1,
        aliases=("persistent-save-interval",),
    )
    keep_checkpoints: int | None = _save_flag(
        None, "how many of the newest checkpoints to keep (default: all)", minimum=1
    )
    save_retain_interval: int | None = _save_flag(
        None,
        "keep the checkpoints of every N-th iteration, and of the others only the newest, or "
        "--keep-checkpoints of them (default: all)",
        minimum=1,
    )
    async_save: bool = _save_flag(
        False,
        "save in the background; training pauses only while the state is copied to host memory",
    )
    no_save_optim: bool = _save_flag(False, "save without the optimizer's state")
    no_load_optim: bool = load_flag(False, "start with a fresh optimizer")
    finetune: bool = load_flag(False, "load only the weights, and train from iteration 0")
    use_checkpoint_args: bool = flag(False, "take the model's shape from the checkpoint")
    no_load_lr_state: bool = load_flag(False, "start the schedules from the beginning")
    reset_iteration: bool = load_flag(
        False, "start counting at iteration 0", aliases=("reset-progress",)
    )
    no_verify_checkpoint: bool = load_flag(
        False, "load without reading the files to compare their checksums"
    )
    exit_on_missing_checkpoint: bool = flag(False, "fail if --load holds no checkpoint")

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

    log_interval: int = flag(100, "iterations between log lines", minimum=1)
    log_format: str = flag(
        "auto",
        "lines of the log: Megatron's, short ones of at most 80 columns, or short ones on a "
        "terminal only",
        choices=("auto", "short", "megatron"),
    )
    logging_level: int = flag(
        20,
        "print log messages from this level of Python's logging: 20 all, 30 warnings, 40 errors",
        minimum=0,
        aliases=("log-level",),
        synonyms=LEVELS,
    )
    plan_file: str | None = flag(
        None,
        "plan of megatron-zpp plan (--json): print the expected step time at the start, and warn "
        "after 20 iterations if steps take longer",
    )
    log_params_norm: bool = flag(False, "log the norm of the parameters")
    log_num_zeros_in_grad: bool = flag(False, "log how many gradient elements are zero")
    log_throughput: bool = flag(
        False, "log model TFLOP/s per rank, its share of the measured matmul rate, and MFU"
    )
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard")
    tensorboard_queue_size: int = _tensorboard_flag(
        1000, "number of scalars to buffer before writing", minimum=1
    )
    tensorboard_log_interval: int = _curve_flag(1, "iterations between scalars", minimum=1)
    log_timers_to_tensorboard: bool = _curve_flag(False, "write times as scalars")
    log_batch_size_to_tensorboard: bool = _curve_flag(False, "write the batch size as a scalar")
    log_validation_ppl_to_tensorboard: bool = _curve_flag(
        False, "write held-out perplexity as a scalar"
    )
    log_optimizer_states_to_tensorboard: bool = _curve_flag(
        False, "write the norms of Adam's moments as scalars"
    )
    log_memory_to_tensorboard: bool = _curve_flag(False, "write memory use as scalars")
    log_all_axes_to_tensorboard: bool = _tensorboard_flag(
        False, "curves over samples and over tokens too, as Megatron-DeepSpeed draws them"
    )
    log_world_size_to_tensorboard: bool = _curve_flag(
        False, "write the number of ranks as a scalar"
    )
    profile: bool = flag(
        False, "write a trace of some iterations to the folder profile in --tensorboard-dir"
    )
    profile_step_start: int = _profile_flag(10, "iterations before the trace begins", minimum=0)
    profile_step_end: int = _profile_flag(12, "iterations after which the trace ends", minimum=1)
    profile_ranks: tuple[int, ...] = _profile_flag((0,), "ranks that write a trace", minimum=0)
    wandb_project: str | None = flag(
        None, "Weights & Biases project; switches it on", aliases=("wandb-project-name",)
    )
    wandb_exp_name: str | None = _wandb_flag(None, "name of the run at Weights & Biases")
    wandb_entity: str | None = _wandb_flag(
        None, "user or team at Weights & Biases", aliases=("wandb-entity-name",)
    )
    wandb_save_dir: str | None = _wandb_flag(None, "folder of the Weights & Biases files")

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
