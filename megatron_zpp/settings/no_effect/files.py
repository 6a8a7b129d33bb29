"""Flags about what is read and written: checkpoints, data, tokenizers, logs."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, ignored

_FORMAT = "there is one format, torch.distributed.checkpoint"
_OWN_SHARDS = "each rank writes and reads its own shards"
_ONE_WRITER = "one process beside each rank writes all checkpoints of --async-save"
_EXACT_NAMES = "a checkpoint must have the weights of the model, with their names and shapes"
_ANY_SIZE = "every checkpoint loads at any number of ranks and any stage"
_MAPPED = "datasets are always memory-mapped, page by page as they are read"
_FINGERPRINT = "checkpoints hold a fingerprint of the tokenizer, and flags name its files"
_TIMERS = "--log-timers-to-tensorboard shows every time that is measured"
_MEMORY = "use --log-memory-to-tensorboard"
_ALWAYS_WRITTEN = "the scalar is always written"
_PROFILER = "--profile records operations and kernels with PyTorch's profiler"
_TIKTOKEN = "only the TikTokenizer reads it, which is not available"
_INFERENCE = "only Megatron's inference engine reads it"


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags(Section):
    """How checkpoints are written and read."""

    ckpt_format: str = ignored("torch_dist", _FORMAT)
    auto_detect_ckpt_format: bool = ignored(False, _FORMAT)
    use_dist_ckpt: bool = ignored(False, _FORMAT)
    dist_ckpt_format: str = ignored("torch_dist", _FORMAT)
    dist_ckpt_save_pre_mcore_014: bool = ignored(False, _FORMAT)
    ckpt_fully_parallel_save: bool = ignored(
        True, _OWN_SHARDS, aliases=("ckpt-fully-parallel-save",),
        shorthands={"no-ckpt-fully-parallel-save": False},
    )  # fmt: skip
    ckpt_fully_parallel_save_process_group: str = ignored("dp", _OWN_SHARDS)
    ckpt_fully_parallel_load: bool = ignored(False, _OWN_SHARDS)
    ckpt_fully_parallel_load_process_group: str = ignored("dp", _OWN_SHARDS)
    ckpt_fully_parallel_load_exchange_algo: str = ignored("broadcast", _OWN_SHARDS)
    ckpt_fully_parallel_load_per_rank_objects: bool = ignored(False, _OWN_SHARDS)
    ckpt_assume_constant_structure: bool = ignored(False, "each save works out its layout anew")
    ckpt_pg_tensors_cache_create: bool = ignored(False, "each save works out its layout anew")
    ckpt_pg_tensors_cache_path: str = ignored("", "each save works out its layout anew")
    ckpt_drop_redundant_extra_state: bool = ignored(
        False, "checkpoints hold tensors, and no extra state of TransformerEngine's modules"
    )
    dist_ckpt_workers: int = ignored(1, _OWN_SHARDS, minimum=1)
    dist_ckpt_strictness: str = ignored("assume_ok_unexpected", _EXACT_NAMES)
    no_ckpt_load_validate_sharding_integrity: bool = ignored(
        False, _EXACT_NAMES, aliases=("disable-ckpt-load-validate-sharding-integrity",)
    )
    no_strict_fsdp_dtensor_load: bool = ignored(
        False, _EXACT_NAMES, aliases=("disable-strict-fsdp-dtensor-load",)
    )
    dist_ckpt_optim_fully_reshardable: bool = ignored(False, _ANY_SIZE)
    distrib_optim_fully_reshardable_mem_efficient: bool = ignored(False, _ANY_SIZE)
    use_mp_args_from_checkpoint_args: bool = ignored(False, _ANY_SIZE)
    load_main_params_from_ckpt: bool = ignored(False, "checkpoints hold the fp32 weights")
    use_persistent_ckpt_worker: bool = ignored(False, _ONE_WRITER)
    async_strategy: str = ignored("nvrx", _ONE_WRITER)
    async_ckpt_use_cpu_shm: bool = ignored(False, "--async-save always copies to shared memory")
    async_ckpt_cpu_priority: int = ignored(10, _ONE_WRITER)
    async_ckpt_io_priority: int = ignored(3, _ONE_WRITER)
    verify_integrity: bool = ignored(
        False, "checksums are written, and compared unless --no-verify-checkpoint is given"
    )
    disable_msc: bool = ignored(False, "checkpoints and data are in folders of the file system")
    no_save_tokenizer_assets: bool = ignored(
        False, _FINGERPRINT, aliases=("disable-save-tokenizer-assets",)
    )
    no_use_tokenizer_model_from_checkpoint_args: bool = ignored(
        False, _FINGERPRINT, aliases=("disable-use-tokenizer-model-from-checkpoint-args",)
    )
    log_progress: bool = ignored(False, "the log and metrics.jsonl show the progress")


@dataclass(frozen=True, kw_only=True)
class DataFlags(Section):
    """How data is read, and text encoded."""

    data_impl: str = ignored("infer", _MAPPED, choices=("infer", "mmap", "lazy", "cached"))
    mmap_warmup: bool = ignored(False, _MAPPED)
    no_mmap_bin_files: bool = ignored(False, _MAPPED)
    dataloader_fast_cache_load: bool = ignored(False, _MAPPED)
    dataloader_defer_npy_index_mmap: bool = ignored(False, _MAPPED)
    mid_level_dataset_surplus: float = ignored(
        0.005,
        "datasets of a blend exceed their shares by this",
        choices=(0.005,),
        why_no_others="datasets of a blend exceed their shares by 0.005; leave it out",
    )
    allow_ambiguous_pad_tokens: bool = ignored(False, "padding has no loss, whatever its token is")
    trust_remote_code: bool = ignored(False, "no code from a tokenizer's folder is run")
    tokenizer_hf_no_use_fast: bool = ignored(False, "tokenizer.json gives the same ids")
    tiktoken_pattern: str = ignored("", _TIKTOKEN)
    tiktoken_num_special_tokens: int = ignored(1000, _TIKTOKEN)
    use_gigatoken: bool = ignored(False, "tiktoken gives the same ids")


@dataclass(frozen=True, kw_only=True)
class LogFlags(Section):
    """Logs, timers and profilers."""

    timing_log_option: str = ignored("minmax", _TIMERS, choices=("max", "minmax", "all"))
    no_barrier_with_level_1_timing: bool = ignored(False, _TIMERS)
    train_sync_interval: int = ignored(0, "the host is at most one step ahead of a GPU")
    log_memory_interval: int = ignored(0, _MEMORY)
    log_device_memory_used: bool = ignored(False, _MEMORY)
    no_log_loss_scale_to_tensorboard: bool = ignored(
        False, _ALWAYS_WRITTEN, aliases=("disable-log-loss-scale-to-tensorboard",)
    )
    no_log_learnig_rate_to_tensorboard: bool = ignored(False, _ALWAYS_WRITTEN)
    nvtx_ranges: bool = ignored(False, _PROFILER)
    record_shapes: bool = ignored(False, _PROFILER)
    pytorch_profiler_collect_shapes: bool = ignored(False, _PROFILER)
    pytorch_profiler_collect_callstack: bool = ignored(False, _PROFILER)
    pytorch_profiler_collect_chakra: bool = ignored(False, _PROFILER)
    inference_max_seq_length: int = ignored(2560, _INFERENCE)
    inference_max_requests: int = ignored(8, _INFERENCE)
    inference_batch_times_seqlen_threshold: int = ignored(-1, _INFERENCE)
    inference_rng_tracker: bool = ignored(False, _INFERENCE)
