"""Flags that are no settings of their own: they speak of the JSON's keys, or have no effect here.

They are declared as all others are, and never reach a `Config`: `arguments` turns what they say
into settings, and tells once why a flag that was typed does nothing.
"""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, flag

_BLOCKWISE = "FSDP2 gathers and reduces block by block, from one buffer per block"
_RECOMPUTE = "activations are recomputed by torch.utils.checkpoint, which has no such setting"
_SAME_RESULT = "the kernels are PyTorch's own, and the result is the same"
_OVERLAP = "communication overlaps with computation wherever the device allows it"
_SDPA = "attention always runs in PyTorch's fused kernels"
_NO_TENSOR_PARALLEL = "no layer is split over ranks"
_FORMAT = "there is one format, torch.distributed.checkpoint"
_MAPPED = "datasets are always memory-mapped, page by page as they are read"


@dataclass(frozen=True, kw_only=True)
class Shorthand:
    """A flag without a value that is another word for `dest` = `value`."""

    name: str
    dest: str
    value: str
    help: str


SHORTHANDS = (
    Shorthand(
        name="checkpoint-activations",
        dest="recompute_granularity",
        value="full",
        help="the same as --recompute-granularity full",
    ),
    Shorthand(
        name="deepspeed-activation-checkpointing",
        dest="recompute_granularity",
        value="full",
        help="the same as --recompute-granularity full",
    ),
    Shorthand(
        name="recompute-activations",
        dest="recompute_granularity",
        value="selective",
        help="the same as --recompute-granularity selective",
    ),
    Shorthand(
        name="use-rotary-position-embeddings",
        dest="position_embedding_type",
        value="rope",
        help="the same as --position-embedding-type rope",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ZeroFlags(Section):
    """What Megatron-DeepSpeed says on the command line about the JSON and its keys."""

    deepspeed_config: str | None = flag(None, "the DeepSpeed-style JSON")
    zero_stage: int | None = flag(
        None,
        "ZeRO stage: 0 replicas, 1 optimizer, 2 + gradients, 3 + weights sharded (default: the "
        "JSON's, else 0)",
        kind=int,
        minimum=0,
        maximum=3,
    )
    use_distributed_optimizer: bool = flag(
        False, "shard the optimizer: ZeRO stage 1 if no stage is given"
    )
    cpu_optimizer: bool = flag(
        False, "optimizer state and step on the CPU", names=("optimizer-cpu-offload",)
    )
    remote_device: str = flag(
        "none", "where sharded weights are kept", choices=("none", "cpu", "nvme")
    )
    use_pin_memory: bool = flag(False, "page-locked memory for what is offloaded")
    deepspeed: bool = flag(
        False, "use DeepSpeed", no_effect="ZeRO is built in; --zero-stage or the JSON sets it up"
    )
    zero_reduce_scatter: bool = flag(
        False, "reduce-scatter gradients", no_effect="stages 1 to 3 always do"
    )
    zero_contigious_gradients: bool = flag(
        False,
        "copy gradients into one buffer",
        no_effect=_BLOCKWISE,
        names=("zero-contiguous-gradients",),
    )
    zero_reduce_bucket_size: int = flag(0, "bucket size", minimum=0, no_effect=_BLOCKWISE)
    zero_allgather_bucket_size: int = flag(0, "bucket size", minimum=0, no_effect=_BLOCKWISE)
    partition_activations: bool = flag(
        False, "split kept activations over tensor ranks", no_effect=_NO_TENSOR_PARALLEL
    )
    contigious_checkpointing: bool = flag(
        False,
        "kept activations in one buffer",
        no_effect=_RECOMPUTE,
        names=("contiguous-checkpointing",),
    )
    checkpoint_in_cpu: bool = flag(
        False, "kept activations on the CPU", no_effect="kept activations stay on the device"
    )
    synchronize_each_layer: bool = flag(False, "synchronize each layer", no_effect=_RECOMPUTE)
    profile_backward: bool = flag(False, "time the backward pass", no_effect=_RECOMPUTE)


@dataclass(frozen=True, kw_only=True)
class ModelFlags(Section):
    """Megatron's switches that belong to another flag's value."""

    group_query_attention: bool = flag(
        False, "key-value heads are shared: one for all unless --num-query-groups says more"
    )
    no_position_embedding: bool = flag(
        False, "no learned positions; needs --position-embedding-type rope or none"
    )


@dataclass(frozen=True, kw_only=True)
class IdleFlags(Section):
    """Flags of Megatron's that scripts carry and that change nothing here."""

    local_rank: int = flag(0, "rank in the node", no_effect="torchrun's environment tells it")
    no_pipeline_parallel: bool = flag(
        False, "no pipeline", no_effect="there is no pipeline parallelism yet"
    )
    overlap_grad_reduce: bool = flag(False, "overlap gradients", no_effect=_OVERLAP)
    overlap_param_gather: bool = flag(False, "overlap gathers", no_effect=_OVERLAP)
    DDP_impl: str = flag(
        "local", "data parallelism", no_effect="the ZeRO stage decides how gradients are averaged"
    )
    use_cpu_initialization: bool = flag(
        False,
        "draw weights on the CPU",
        no_effect="a seed gives the same weights on every device and number of ranks",
    )
    no_async_tensor_model_parallel_allreduce: bool = flag(
        False, "no overlap in tensor-parallel layers", no_effect=_NO_TENSOR_PARALLEL
    )
    distribute_saved_activations: bool = flag(
        False, "split kept activations", no_effect=_NO_TENSOR_PARALLEL
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "accumulate gradients in fp32", no_effect="gradients always accumulate in fp32"
    )
    data_impl: str = flag(
        "infer", "kind of dataset", choices=("infer", "mmap", "lazy", "cached"), no_effect=_MAPPED
    )
    mmap_warmup: bool = flag(False, "read the dataset once before", no_effect=_MAPPED)
    no_mmap_bin_files: bool = flag(False, "read, do not map", no_effect=_MAPPED)
    no_create_attention_mask_in_dataloader: bool = flag(
        False, "no mask in the batch", no_effect="attention is causal without a mask"
    )
    ckpt_format: str = flag("torch_dist", "kind of checkpoint", no_effect=_FORMAT)
    auto_detect_ckpt_format: bool = flag(False, "detect it", no_effect=_FORMAT)
    use_flash_attn: bool = flag(
        False,
        "flash attention",
        no_effect=_SDPA,
        names=("use-flash-attn-v1", "use-flash-attn-v2", "use-flash-attn-triton"),
    )
    attention_backend: str = flag("auto", "attention kernels", no_effect=_SDPA)
    no_masked_softmax_fusion: bool = flag(False, "unfused softmax", no_effect=_SDPA)
    no_bias_dropout_fusion: bool = flag(False, "unfused dropout", no_effect=_SAME_RESULT)
    no_bias_swiglu_fusion: bool = flag(False, "unfused SwiGLU", no_effect=_SAME_RESULT)
    no_rope_fusion: bool = flag(False, "unfused rotary positions", no_effect=_SAME_RESULT)
    no_gradient_accumulation_fusion: bool = flag(
        False, "unfused accumulation", no_effect=_SAME_RESULT
    )
    cross_entropy_loss_fusion: bool = flag(False, "fused loss", no_effect=_SAME_RESULT)
    use_mcore_models: bool = flag(False, "megatron-core's model", no_effect=_SAME_RESULT)
    transformer_impl: str = flag("local", "whose layers", no_effect=_SAME_RESULT)
