"""Megatron's flags that are accepted and have no effect, each with the reason."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, flag

_SAME_RESULT = "the kernels are PyTorch's own, and the result is the same"
_OVERLAP = "communication overlaps with computation wherever the device allows it"
_SDPA = "attention always runs in PyTorch's fused kernels"
_NO_TENSOR_PARALLEL = "no layer is split over ranks"
_FORMAT = "there is one format, torch.distributed.checkpoint"
_MAPPED = "datasets are always memory-mapped, page by page as they are read"


@dataclass(frozen=True, kw_only=True)
class IgnoredFlags(Section):
    """Flags that scripts for Megatron carry and that have no effect here."""

    local_rank: int = flag(0, "rank in the node", no_effect="it is taken from torchrun's environment")
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
        aliases=("use-flash-attn-v1", "use-flash-attn-v2", "use-flash-attn-triton"),
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
