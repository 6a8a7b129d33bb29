"""torchtitan's Llama on CPUs, sharded by its own function, with and without ZeRO++.

Its device is set to the CPU here, its kernels for experts are left out, as they need Triton, and
attention is computed without FlexAttention, which has no backward pass on CPUs.
"""

import sys
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.ranks import ranks
from zeropp.integrations.torchtitan import AttachedParallelize

pytest.importorskip("torchtitan", exc_type=ImportError)
PLAIN = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 2}}
ZERO = {
    "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
}  # fmt: skip
KERNELS = "torchtitan.distributed.minimal_async_ep"
STEPS = 3


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


def llama(tensor_size: int, config: dict | None) -> tuple[nn.Module, AttachedParallelize | None]:
    """The smallest Llama, split by tensor parallelism and sharded, and what attached it."""
    sys.modules.setdefault(KERNELS, MagicMock())
    from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.llama3 import model_registry

    parallel_dims.device_type = "cpu"
    spec = model_registry("debugmodel", attn_backend="flex")
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


def losses(model: nn.Module, tensor_size: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank() // tensor_size)
    measured = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 2000, (2, 17), generator=generator)
        logits = model(tokens[:, :-1], torch.arange(16).expand(2, 16))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        measured.append(loss.item())
    return measured


@pytest.mark.parametrize("tensor_size", [1, 2])
@ranks(4, timeout=120)
def test_unquantized_it_learns_the_same_and_with_zeropp_it_sends_less(tensor_size):
    expected = losses(llama(tensor_size, None)[0], tensor_size)
    sent = []
    for config in (PLAIN, PLAIN | {"zero_optimization": ZERO}):
        model, parallelize = llama(tensor_size, config)
        measured = losses(model, tensor_size)
        if config is PLAIN:
            assert measured == pytest.approx(expected, rel=1e-6)
        assert measured[0] == pytest.approx(expected[0], rel=5e-3)  # what INT8 may move a loss by
        (attached,) = parallelize.attached
        assert attached.traffic.sent == {
            key: STEPS * num_bytes for key, num_bytes in attached.expected_traffic().items()
        }
        crossing = (n for (_, hop), n in attached.traffic.sent.items() if hop == "across_nodes")
        total = torch.tensor(sum(crossing))
        dist.all_reduce(total)
        sent.append(total.item())
    assert 5 * sent[1] < sent[0]
