"""torchtitan's Qwen3 with experts on CPUs, made small, and sharded by torchtitan's own function.

Its experts compute in fp32 here. In bf16, as by default, they round weights that differ in their
last bits to others now and then, so that runs are the same but for that.
"""

import sys
from functools import partial
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from benchmarks.convergence.torchtitan_llama import KERNELS, attend
from tests.zeropp.sharding.near import copy_shards
from zeropp.integrations.torchtitan import AttachedParallelize

sys.modules.setdefault(KERNELS, MagicMock())  # needs Triton

from torchtitan.config.configs import (  # noqa: E402
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed import parallel_dims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.qwen3 import model_registry  # noqa: E402
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402

LAYERS, WIDTH = 2, 32
BACKEND = "partial_dtensor"  # others need a later FSDP2 than that of torch 2.14


def small_spec(num_experts: int) -> ModelSpec:
    """The model of torchtitan's tests with fewer layers, and with experts of a small width."""
    spec = model_registry("debugmodel_moe", attn_backend="flex")
    del spec.model.layers[LAYERS:]
    for layer in spec.model.layers:
        moe = layer.moe
        inner, router = moe.routed_experts.inner_experts, moe.router
        dispatcher = moe.routed_experts.token_dispatcher
        moe.num_experts = inner.num_experts = router.num_experts = num_experts
        dispatcher.num_experts = router.gate.out_features = num_experts
        dispatcher.top_k = router.top_k = 2
        inner.hidden_dim = WIDTH
    return spec


def compute(experts: nn.Module, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Map rows [R, D], one expert's after another's, to their outputs [R, D]."""
    weights = (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF)
    own = (each.to_local() if isinstance(each, DTensor) else each for each in weights)
    of_experts = zip(x.split(counts.tolist()), *(each.unbind() for each in own), strict=True)
    parts = [F.silu(rows @ gate.T) * (rows @ up.T) @ down.T for rows, gate, up, down in of_experts]
    return torch.cat(parts)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give all weights but those of norms random values.

    On CPUs torchtitan's own are the same on all ranks, so that experts have equal scores.
    """
    model.init_weights(buffer_device=None)
    generator = torch.Generator().manual_seed(0)
    weights = {name: each for name, each in model.named_parameters() if each.ndim > 1}
    for name, weight in weights.items():
        values = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
        copy_shards({name: weight}, {name: values})


def sharded_qwen3(
    config: dict | None, expert_size: int = 2, num_experts: int = 8
) -> tuple[nn.Module, AttachedParallelize | None]:
    """The model, whose experts `expert_size` ranks split, and what attached it."""
    parallel_dims.device_type = "cpu"
    set_spmd_backend(BACKEND)
    spec, size = small_spec(num_experts), dist.get_world_size()
    set_qwen3_sharding_config(spec.model, enable_sp=False, enable_ep=expert_size > 1)
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=size,
        expert_parallel_degree=expert_size,
        spmd_backend=BACKEND,
    )
    dims = parallel_dims.ParallelDims.from_config(parallelism, size)
    parallelize = spec.parallelize_fn
    if config is not None:
        parallelize = AttachedParallelize(parallelize, config)
    with torch.device("meta"):
        model = spec.model.build()
    for block in model.layers.values():
        block.attention.inner_attention.forward = attend
        experts = block.moe.routed_experts.inner_experts
        experts.forward = partial(compute, experts)
    model = parallelize(
        model, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism, compile_config=CompileConfig(), ac_config=None, dump_folder="",
    )  # fmt: skip
    model.to_empty(device="cpu")
    fill(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo cannot multiply by torchtitan's factor
            module.set_force_sum_reduction_for_comms(True)
    return model, None if config is None else parallelize
