"""Flags about how the model is computed: kernels, CUDA graphs, formats, memory, initial values."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, ignored

_SAME_RESULT = "the kernels are PyTorch's own, and the result is the same"
_SDPA = "attention always runs in PyTorch's fused kernels"
_GRAPHS = "no CUDA graphs are captured, and the result is the same"
_STATE_IN_FP32 = "weights, gradients and Adam's moments are kept in fp32"
_ONLY_FP32 = f"{_STATE_IN_FP32}: leave it out"
_NO_8_BITS = "nothing is computed in 8 bits"
_ZERO_3 = "ZeRO stage 3 holds one block at a time, each layer of it whole"
_ALLOCATOR = "PyTorch's allocator frees what it keeps before memory runs out"


@dataclass(frozen=True, kw_only=True)
class ComputingFlags(Section):
    """Kernels, formats and memory."""

    use_flash_attn: bool = ignored(
        False, _SDPA, aliases=("use-flash-attn-v1", "use-flash-attn-v2", "use-flash-attn-triton")
    )
    use_flash_attn_builder: bool = ignored(False, _SDPA)
    flash_attention_version: int = ignored(0, _SDPA)
    attention_backend: str = ignored("auto", _SDPA)
    no_create_attention_mask_in_dataloader: bool = ignored(
        False, "attention is causal without a mask"
    )
    no_masked_softmax_fusion: bool = ignored(False, _SDPA)
    no_bias_dropout_fusion: bool = ignored(False, _SAME_RESULT)
    no_bias_swiglu_fusion: bool = ignored(False, _SAME_RESULT)
    no_rope_fusion: bool = ignored(False, _SAME_RESULT)
    no_gradient_accumulation_fusion: bool = ignored(False, _SAME_RESULT)
    no_gradient_reduce_div_fusion: bool = ignored(False, _SAME_RESULT)
    no_persist_layer_norm: bool = ignored(False, _SAME_RESULT)
    fused_residual_rmsnorm: bool = ignored(False, _SAME_RESULT)
    cross_entropy_loss_fusion: bool = ignored(False, _SAME_RESULT)
    cross_entropy_fusion_impl: str = ignored("native", _SAME_RESULT)
    use_fused_weighted_squared_relu: bool = ignored(False, _SAME_RESULT)
    use_te_activation_func: bool = ignored(False, _SAME_RESULT)
    use_transformer_engine_op_fuser: bool = ignored(False, _SAME_RESULT)
    use_grouped_gemm_for_dense_mlp: bool = ignored(False, _SAME_RESULT)
    no_clone_scatter_output_in_embedding: bool = ignored(
        False, _SAME_RESULT, aliases=("disable-clone-scatter-output-in-embedding",)
    )
    disable_jit_fuser: bool = ignored(False, _SAME_RESULT)
    disable_mem_efficient_ln: bool = ignored(False, _SAME_RESULT)
    use_mcore_models: bool = ignored(False, _SAME_RESULT)
    use_legacy_models: bool = ignored(False, _SAME_RESULT)
    transformer_impl: str = ignored("local", _SAME_RESULT)
    ds_fused_adam: bool = ignored(False, "the fastest Adam of the device is used")
    enable_experimental: bool = ignored(False, "nothing here is switched on as an experiment")
    te_rng_tracker: bool = ignored(False, "dropout follows from the seed and the samples")
    enable_cuda_graph: bool = ignored(False, _GRAPHS)
    external_cuda_graph: bool = ignored(False, _GRAPHS)
    cuda_graph_impl: str = ignored("none", _GRAPHS)
    cuda_graph_scope: tuple[str, ...] = ignored((), _GRAPHS)
    cuda_graph_modules: tuple[str, ...] = ignored((), _GRAPHS)
    cuda_graph_warmup_steps: int = ignored(3, _GRAPHS)
    optimizer_cuda_graph: bool = ignored(False, _GRAPHS)
    accumulate_allreduce_grads_in_fp32: bool = ignored(False, "gradients always accumulate in fp32")
    ddp_param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ignored(
        (), "gradients always accumulate in fp32"
    )
    fp16_lm_cross_entropy: bool = ignored(False, "the loss is computed in fp32")
    use_precision_aware_optimizer: bool = ignored(False, _STATE_IN_FP32)
    main_grads_dtype: str = ignored(
        "fp32", _STATE_IN_FP32, choices=("fp32",), why_no_others=_ONLY_FP32
    )
    main_params_dtype: str = ignored(
        "fp32", _STATE_IN_FP32, choices=("fp32",), why_no_others=_ONLY_FP32
    )
    exp_avg_dtype: str = ignored(
        "fp32", _STATE_IN_FP32, choices=("fp32",), why_no_others=_ONLY_FP32
    )
    exp_avg_sq_dtype: str = ignored(
        "fp32", _STATE_IN_FP32, choices=("fp32",), why_no_others=_ONLY_FP32
    )
    megatron_fsdp_main_params_dtype: str = ignored(
        "fp32", _STATE_IN_FP32, choices=("auto", "fp32"), why_no_others=_ONLY_FP32
    )
    megatron_fsdp_main_grads_dtype: str = ignored(
        "auto", _STATE_IN_FP32, choices=("auto", "fp32"), why_no_others=_ONLY_FP32
    )
    no_pin_cpu_grads: bool = ignored(False, "--use-pin-memory decides it")
    no_pin_cpu_params: bool = ignored(False, "--use-pin-memory decides it")
    first_last_layers_bf16: bool = ignored(False, _NO_8_BITS)
    num_layers_at_start_in_bf16: int = ignored(1, _NO_8_BITS)
    num_layers_at_end_in_bf16: int = ignored(1, _NO_8_BITS)
    empty_unused_memory_level: int = ignored(0, _ALLOCATOR, minimum=0, maximum=2)
    split_transformers: bool = ignored(False, _ZERO_3)
    scattered_embeddings: bool = ignored(False, _ZERO_3)
    memory_centric_tiled_linear: bool = ignored(False, _ZERO_3)
    tile_factor: int = ignored(1, _ZERO_3, minimum=1)
    use_cpu_initialization: bool = ignored(
        False, "a seed gives the same weights on every device and number of ranks"
    )
    init_model_with_meta_device: bool = ignored(False, "every model is built on the meta device")
    no_initialization: bool = ignored(
        False, "weights are drawn in place, and those that are loaded replace them"
    )
    data_parallel_random_init: bool = ignored(False, "replicas begin with the same weights")
    no_check_for_nan_in_loss_and_grad: bool = ignored(
        False, "the check costs no waiting, and an update that is not finite would end the training"
    )
    check_for_nan_in_loss_and_grad: bool = ignored(False, "it is always done")
    check_for_spiky_loss: bool = ignored(False, "a loss far above those before is always reported")
    check_for_large_grads: bool = ignored(
        False, "a norm that is not finite ends the run, and others are in the log"
    )
    rerun_mode: str = ignored(
        "validate_results",
        "no step is computed twice: one that is not finite ends the run before the update",
        choices=("disabled", "validate_results"),
        why_no_others="no step is computed twice to compare the results; leave it out",
    )
    softmax_type: str = ignored(
        "vanilla",
        "it is the only softmax",
        choices=("vanilla",),
        why_no_others="attention here has no sink beside the softmax, as in gpt-oss; leave it out",
    )
    recompute_modules: tuple[str, ...] = ignored(
        ("core_attn",),
        "selective recomputation is that of the attention",
        choices=("core_attn",),
        why_no_others="--recompute-granularity selective recomputes the attention alone; "
        "--recompute-granularity full recomputes whole blocks",
    )


_DENSE = "the model is dense"


@dataclass(frozen=True, kw_only=True)
class ExpertFlags(Section):
    """Mixtures of experts, which a script for a dense model mentions."""

    num_experts: tuple[int, ...] = ignored(
        (1,),
        "one expert is a dense model",
        choices=(1,),
        why_no_others="there is no mixture of experts here; leave it out to train a dense model",
    )
    mlp_type: str = ignored(
        "standard",
        _DENSE,
        choices=("standard",),
        why_no_others="there is no mixture of experts here; leave it out to train a dense model",
    )
    moe_expert_parallel_size: int = ignored(1, _DENSE)
    moe_loss_coeff: float = ignored(0.1, _DENSE)
    moe_train_capacity_factor: float = ignored(1.0, _DENSE)
    moe_eval_capacity_factor: float = ignored(1.0, _DENSE)
    moe_min_capacity: int = ignored(4, _DENSE)
    disable_moe_token_dropping: bool = ignored(False, _DENSE)
    create_moe_param_group: bool = ignored(False, _DENSE)
    enable_expert_tensor_parallelism: bool = ignored(False, _DENSE)
    use_tutel: bool = ignored(False, _DENSE)
    topk: int = ignored(1, _DENSE)
    expert_interval: int = ignored(2, _DENSE)
    expert_model_parallel_size: int = ignored(1, _DENSE)
    expert_tensor_parallel_size: int = ignored(1, _DENSE)
