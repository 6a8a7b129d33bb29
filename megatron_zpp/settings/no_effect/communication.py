"""Flags about how ranks communicate, and how they are started and watched."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, ignored

_OVERLAP = "communication overlaps with computation wherever the device allows it"
_UNITS = "FSDP2 gathers and reduces block by block, from one buffer per block"
_TENSOR = "sums over tensor-parallel ranks do not overlap with computation"
_SCHEDULE = "the pipeline has one schedule, 1F1B, which gives the same result"
_SPLIT = "use --sequence-parallel, which splits activations over tensor-parallel ranks"
_NCCL = "NCCL is used as PyTorch sets it up; the variables of its environment hold here too"
_GROUPS = "one mesh has all groups of ranks"
_AUTORESUME = "a job that is started again with the same --save and --load goes on by itself"
_RESTARTS = "zeropp --max_restarts starts the ranks again after a failure"
_STRAGGLERS = "a rank that hangs is named with its line of code; slow ones are not looked for"
_ONE_LOGGER = "NVIDIA's own service for logs is not used"
_TRACING = "no traces are sent; --profile writes one to a folder"


@dataclass(frozen=True, kw_only=True)
class CommunicationFlags(Section):
    """Overlap, buffers, groups of ranks."""

    overlap_grad_reduce: bool = ignored(False, _OVERLAP)
    overlap_param_gather: bool = ignored(False, _OVERLAP)
    overlap_param_gather_with_optimizer_step: bool = ignored(False, _OVERLAP)
    overlap_cpu_optimizer_d2h_h2d: bool = ignored(False, _OVERLAP)
    high_priority_stream_groups: tuple[str, ...] = ignored((), _OVERLAP)
    ddp_bucket_size: int = ignored(0, _UNITS)
    ddp_num_buckets: int = ignored(0, _UNITS)
    ddp_pad_buckets_for_high_nccl_busbw: bool = ignored(False, _UNITS)
    no_align_grad_reduce: bool = ignored(False, _UNITS, aliases=("disable-align-grad-reduce",))
    no_align_param_gather: bool = ignored(False, _UNITS)
    no_contiguous_buffers_in_local_ddp: bool = ignored(False, _UNITS)
    no_use_layer_wise_param_layout: bool = ignored(False, _UNITS)
    suggested_communication_unit_size: int = ignored(0, _UNITS)
    use_nccl_ub: bool = ignored(False, _UNITS)
    fsdp_double_buffer: bool = ignored(False, _UNITS)
    fsdp_db_use_persist_buf_on_alloc_fail: bool = ignored(False, _UNITS)
    fsdp_manual_registration: bool = ignored(False, _UNITS)
    disable_symmetric_registration: bool = ignored(False, _UNITS)
    megatron_fsdp_version: int = ignored(1, _UNITS)
    megatron_fsdp_max_pool_double_buffer: bool = ignored(False, _UNITS)
    megatron_fsdp_enable_fine_grained_param_gather: bool = ignored(False, _UNITS)
    ddp_average_in_collective: bool = ignored(
        False, "gradients are averaged exactly, without an overflow on the way"
    )
    ddp_reduce_scatter_with_fp32_accumulation: bool = ignored(False, "gradients are summed in fp32")
    DDP_impl: str = ignored("local", "the ZeRO stage decides how gradients are averaged")
    num_distributed_optimizer_instances: int = ignored(
        1,
        "the optimizer is sharded over all replicas",
        choices=(1,),
        why_no_others="the optimizer is sharded over all replicas; zero_hpz_partition_size of the "
        "JSON keeps a copy of the weights in each node",
    )
    outer_dp_sharding_strategy: str = ignored(
        "no_shard",
        "the optimizer is sharded over all replicas",
        choices=("no_shard",),
        why_no_others="there is one level of sharding, over all replicas; zero_hpz_partition_size "
        "of the JSON keeps a copy of the weights in each node",
    )
    no_async_tensor_model_parallel_allreduce: bool = ignored(False, _TENSOR)
    tp_comm_overlap: bool = ignored(False, _TENSOR)
    tp_comm_overlap_cfg: str = ignored("", _TENSOR)
    tp_comm_bootstrap_backend: str = ignored("nccl", _TENSOR)
    tp_comm_overlap_rs_dgrad: bool = ignored(False, _TENSOR)
    no_tp_comm_overlap_ag: bool = ignored(False, _TENSOR, aliases=("disable-tp-comm-overlap-ag",))
    no_tp_comm_overlap_rs: bool = ignored(False, _TENSOR, aliases=("disable-tp-comm-overlap-rs",))
    no_tp_comm_split_ag: bool = ignored(False, _TENSOR, aliases=("disable-tp-comm-split-ag",))
    no_tp_comm_split_rs: bool = ignored(False, _TENSOR, aliases=("disable-tp-comm-split-rs",))
    no_tp_comm_bulk_dgrad: bool = ignored(False, _TENSOR, aliases=("disable-tp-comm-bulk-dgrad",))
    no_tp_comm_bulk_wgrad: bool = ignored(False, _TENSOR, aliases=("disable-tp-comm-bulk-wgrad",))
    symmetric_ar_type: str = ignored("", _NCCL)
    delay_wgrad_compute: bool = ignored(False, _OVERLAP)
    distribute_saved_activations: bool = ignored(False, _SPLIT)
    distribute_checkpointed_activations: bool = ignored(False, _SPLIT)
    no_pipeline_parallel: bool = ignored(
        False, "--pipeline-model-parallel-size says whether there is a pipeline"
    )
    enable_zbh1_pipeline: bool = ignored(False, _SCHEDULE)
    enable_zbh1_exact_semantics: bool = ignored(False, _SCHEDULE)
    overlap_p2p_communication: bool = ignored(
        False, _SCHEDULE, shorthands={"no-overlap-p2p-communication": False}
    )
    overlap_p2p_communication_warmup_flush: bool = ignored(False, _SCHEDULE)
    microbatch_group_size_per_virtual_pipeline_stage: int = ignored(0, _SCHEDULE)
    defer_embedding_wgrad_compute: bool = ignored(False, _SCHEDULE)
    wgrad_deferral_limit: int = ignored(0, _SCHEDULE)
    no_scatter_gather_tensors_in_pipeline: bool = ignored(False, _SCHEDULE)
    use_ring_exchange_p2p: bool = ignored(False, _SCHEDULE)
    pipeline_model_parallel_comm_backend: str = ignored("nccl", _SCHEDULE)
    force_ds_sequence_parallel: bool = ignored(
        False, "--context-parallel-size above 1 splits sequences, and 1 does not"
    )
    use_tp_pp_dp_mapping: bool = ignored(False, _GROUPS)
    create_all_gather_group: bool = ignored(False, _GROUPS)
    disable_gloo_process_groups: bool = ignored(False, _GROUPS)
    lazy_mpu_init: str = ignored("", _GROUPS)
    distributed_timeout_seconds_after_init: int = ignored(
        0, "--distributed-timeout-minutes holds from the start to the end"
    )
    nccl_communicator_config_path: str = ignored("", _NCCL)
    use_sharp: bool = ignored(False, _NCCL)
    sharp_enabled_group: str = ignored("", _NCCL)


@dataclass(frozen=True, kw_only=True)
class LauncherFlags(Section):
    """Launchers, restarts and services that watch a run."""

    local_rank: int = ignored(0, "it is taken from torchrun's environment")
    adlr_autoresume: bool = ignored(False, _AUTORESUME)
    adlr_autoresume_interval: int = ignored(1000, _AUTORESUME)
    enable_ft_package: bool = ignored(False, _RESTARTS)
    calc_ft_timeouts: bool = ignored(False, _RESTARTS)
    ft_num_warmup_iters: int = ignored(5, _RESTARTS)
    inprocess_restart: bool = ignored(False, _RESTARTS)
    inprocess_max_iterations: int = ignored(0, _RESTARTS)
    inprocess_monitor_thread_interval: float = ignored(1.0, _RESTARTS)
    inprocess_monitor_process_interval: float = ignored(1.0, _RESTARTS)
    inprocess_progress_watchdog_interval: float = ignored(1.0, _RESTARTS)
    inprocess_heartbeat_interval: float = ignored(30.0, _RESTARTS)
    inprocess_heartbeat_timeout: float = ignored(60.0, _RESTARTS)
    inprocess_soft_timeout: float = ignored(60.0, _RESTARTS)
    inprocess_hard_timeout: float = ignored(90.0, _RESTARTS)
    inprocess_barrier_timeout: float = ignored(120.0, _RESTARTS)
    inprocess_completion_timeout: float = ignored(120.0, _RESTARTS)
    inprocess_last_call_wait: float = ignored(1.0, _RESTARTS)
    inprocess_termination_grace_time: float = ignored(1.0, _RESTARTS)
    inprocess_granularity: str = ignored("node", _RESTARTS)
    inprocess_active_world_size: int = ignored(1, _RESTARTS)
    inprocess_empty_cuda_cache: bool = ignored(False, _RESTARTS)
    exit_signal: str = ignored(
        "SIGTERM",
        "--exit-signal-handler handles both of these signals",
        choices=("SIGTERM", "SIGINT"),
        why_no_others="--exit-signal-handler saves and stops on SIGTERM and SIGINT; send one of "
        "them",
    )
    exit_signal_handler_for_dataloader: bool = ignored(
        False, "processes that read samples leave signals to their rank"
    )
    log_straggler: bool = ignored(False, _STRAGGLERS)
    disable_straggler_on_startup: bool = ignored(False, _STRAGGLERS)
    straggler_ctrlr_port: int = ignored(65535, _STRAGGLERS)
    straggler_minmax_count: int = ignored(1, _STRAGGLERS)
    no_one_logger: bool = ignored(False, _ONE_LOGGER)
    one_logger_project: str = ignored("megatron-lm", _ONE_LOGGER)
    one_logger_run_name: str = ignored("", _ONE_LOGGER)
    one_logger_async: bool = ignored(False, _ONE_LOGGER)
    app_tag_run_name: str = ignored("", _ONE_LOGGER)
    app_tag_run_version: str = ignored("0.0.0", _ONE_LOGGER)
    otel_enabled: bool = ignored(False, _TRACING)
    otel_service_name: str = ignored("", _TRACING)
    otel_span_groups: str = ignored("", _TRACING)
