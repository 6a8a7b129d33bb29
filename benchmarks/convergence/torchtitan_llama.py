"""torchtitan's smallest Llama on CPUs, sharded by torchtitan's own function.

Its device is set to the CPU here, its kernels for experts are left out, as they need Triton, and
attention is computed without FlexAttention, which has no backward pass on CPUs.
"""

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeropp.integrations.torchtitan import AttachedParallelize

KERNELS = "torchtitan.distributed.minimal_async_ep"


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attention_masks: object,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    heads = (each.transpose(1, 2) for each in (q, k, v))
    attended = F.scaled_dot_product_attention(
        *heads, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return attended.transpose(1, 2)


def sharded_llama(
    config: dict | None, tensor_size: int = 1, num_layers: int | None = None
) -> tuple[nn.Module, AttachedParallelize | None]:
    """The smallest Llama, split by tensor parallelism and sharded, and what attached it.

    `num_layers` leaves out the last ones of its 6 layers.
    """
    sys.modules.setdefault(KERNELS, MagicMock())
    from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.llama3 import model_registry

    parallel_dims.device_type = "cpu"
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:num_layers]
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=dist.get_world_size() // tensor_size,
        tensor_parallel_degree=tensor_size,
        spmd_backend="partial_dtensor",
    )
    dims = parallel_dims.ParallelDims.from_config(parallelism, dist.get_world_size())
    parallelize = spec.parallelize_fn
    if config is not None:
        parallelize = AttachedParallelize(parallelize, config)
    with torch.device("meta"):
        model = spec.model.build()
    for block in model.layers.values():
        block.attention.inner_attention.forward = attend
    model = parallelize(
        model, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism, compile_config=CompileConfig(), ac_config=None, dump_folder="",
    )  # fmt: skip
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo cannot multiply by torchtitan's factor
            module.set_force_sum_reduction_for_comms(True)
    return model, None if config is None else parallelize
