"""What mixtures of experts declare: their settings, and what follows from these elsewhere."""

from typing import Any

from megatron_zpp.capabilities.experts.model_settings import (
    ExpertFlags,
    ExpertParallelConfig,
    MoeConfig,
    without_unused,
)


def step_key(config: Any) -> dict[str, Any]:
    """Return on which of these settings the time of a step depends, if there are experts.

    The configuration says how many ranks split them.
    """
    model = config.model
    if not model.has_experts:
        return {}
    return {
        "expert_ranks": config.parallel.expert_model_parallel_size,
        "experts": [model.num_experts, model.moe_router_topk, model.expert_ffn_size],
        "moe_layers": sum(model.moe_layers),
        "shared_ffn": model.moe_shared_expert_intermediate_size,
    }


MODEL, MODEL_FLAGS, PARALLEL = (MoeConfig,), (ExpertFlags,), (ExpertParallelConfig,)
TOPICS = {"experts": MoeConfig}  # of --help
SIZES = ("expert_model_parallel_size",)
BEFORE_DEFAULTS = (without_unused,)
STEP_KEYS = (step_key,)
NOT_ARCHITECTURE = ("moe_router_dtype",)
OF_FINE_TUNING = (
    *("moe_router_topk", "moe_router_topk_scaling_factor", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_group_best"),
)
OBSTACLES = {
    "expert_parallel.autoep_size = {config.zero.expert_ranks} is for models of "
    "zeropp.initialize: leave the section out, and give --expert-model-parallel-size": (
        lambda c: c.zero.expert_parallel.enabled and c.zero.expert_ranks > 1
    )
}
