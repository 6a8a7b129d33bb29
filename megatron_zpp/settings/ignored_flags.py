"""Megatron's flags that are accepted and have no effect, each with the reason."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, ignored

_SAME_RESULT = "the kernels are PyTorch's own, and the result is the same"
_OVERLAP = "communication overlaps with computation wherever the device allows it"
_SDPA = "attention always runs in PyTorch's fused kernels"
_FORMAT = "there is one format, torch.distributed.checkpoint"
_MAPPED = "datasets are always memory-mapped, page by page as they are read"


@dataclass(frozen=True, kw_only=True)
class IgnoredFlags(Section):
    """Flags that scripts for Megatron carry and that have no effect here."""

    local_rank: int = ignored(0, "it is taken from torchrun's environment")
    no_pipeline_parallel: bool = ignored(
        False, "--pipeline-model-parallel-size says whether there is a pipeline"
    )
    overlap_grad_reduce: bool = ignored(False, _OVERLAP)
    overlap_param_gather: bool = ignored(False, _OVERLAP)
    DDP_impl: str = ignored("local", "the ZeRO stage decides how gradients are averaged")
    use_cpu_initialization: bool = ignored(
        False, "a seed gives the same weights on every device and number of ranks"
    )
    no_async_tensor_model_parallel_allreduce: bool = ignored(
        False, "sums over tensor-parallel ranks do not overlap with computation"
    )
    distribute_saved_activations: bool = ignored(
        False, "use --sequence-parallel, which splits activations over tensor-parallel ranks"
    )
    accumulate_allreduce_grads_in_fp32: bool = ignored(False, "gradients always accumulate in fp32")
    data_impl: str = ignored("infer", _MAPPED, choices=("infer", "mmap", "lazy", "cached"))
    mmap_warmup: bool = ignored(False, _MAPPED)
    no_mmap_bin_files: bool = ignored(False, _MAPPED)
    no_create_attention_mask_in_dataloader: bool = ignored(
        False, "attention is causal without a mask"
    )
    ckpt_format: str = ignored("torch_dist", _FORMAT)
    auto_detect_ckpt_format: bool = ignored(False, _FORMAT)
    use_flash_attn: bool = ignored(
        False, _SDPA, aliases=("use-flash-attn-v1", "use-flash-attn-v2", "use-flash-attn-triton")
    )
    attention_backend: str = ignored("auto", _SDPA)
    no_masked_softmax_fusion: bool = ignored(False, _SDPA)
    no_bias_dropout_fusion: bool = ignored(False, _SAME_RESULT)
    no_bias_swiglu_fusion: bool = ignored(False, _SAME_RESULT)
    no_rope_fusion: bool = ignored(False, _SAME_RESULT)
    no_gradient_accumulation_fusion: bool = ignored(False, _SAME_RESULT)
    cross_entropy_loss_fusion: bool = ignored(False, _SAME_RESULT)
    use_mcore_models: bool = ignored(False, _SAME_RESULT)
    transformer_impl: str = ignored("local", _SAME_RESULT)
