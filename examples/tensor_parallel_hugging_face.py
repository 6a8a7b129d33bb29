"""Train a Hugging Face Llama that PyTorch splits within nodes, with all of ZeRO++ across them.

    zeropp --num_ranks 4 --ranks_per_node 2 examples/tensor_parallel_hugging_face.py

The two ranks of a node hold a half each of every attention and every MLP (tensor parallelism, by
`parallelize_module`) and see the same samples. The ranks with the same half, one in each node,
share it out by ZeRO stage 3: each node keeps its weights as INT8 while a step lasts, and gradients
cross as INT4, once per step of two micro-batches.
"""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from standard_library import StandardLibrary
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

import zeropp
from zeropp.ranks.process_group import pick_device, start_process_group
from zeropp.ranks.topology import Environment

LENGTH, SAMPLES, MICRO_BATCHES = 64, 4, 2  # bytes per sample; samples per micro-batch
SHAPE = dict(
    num_hidden_layers=2, hidden_size=96, intermediate_size=256, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH, vocab_size=256,
)  # fmt: skip
NO_WORDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
BY_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
BY_COLUMNS += ("mlp.gate_proj", "mlp.up_proj")
BY_ROWS = ("self_attn.o_proj", "mlp.down_proj")
CONFIG = {
    "zero_optimization": {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 2,  # the ranks of a node: each keeps its half
        "zero_quantized_gradients": True,
    },
    "zeropp": {"reduce_gradients_once": True},
}


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the matrices of each layer over the ranks of `mesh`, in place."""
    plan = {name: ColwiseParallel() for name in BY_COLUMNS}
    plan |= {name: RowwiseParallel() for name in BY_ROWS}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    environment = Environment.read()
    device = pick_device(environment)
    start_process_group(environment, device, timedelta(minutes=10))
    in_node = environment.local_world_size
    shape = (environment.world_size // in_node, in_node)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))

    torch.manual_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **NO_WORDS)).to(device)
    split(model, mesh["tensor"])
    config = zeropp.ZeroConfig.from_json(CONFIG)
    sharding = zeropp.shard(model, mesh, config, axis="data")
    optimizer = zeropp.FusedAdam(model.parameters(), lr=2e-3)

    text = StandardLibrary(LENGTH)
    sampler = DistributedSampler(text, shape[0], mesh["data"].get_local_rank(), drop_last=True)
    batches = iter(DataLoader(text, SAMPLES, sampler=sampler))
    for step in range(1, args.steps + 1):
        for index in range(MICRO_BATCHES):
            inputs = next(batches)[0].to(device)
            with sharding.micro_step(last=index == MICRO_BATCHES - 1):
                loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
                (loss / MICRO_BATCHES).backward()
        result = zeropp.optimizer_step(optimizer, sharding, clip_grad=1.0)
        if environment.rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}, loss {loss.item():.3f}, gradient norm {result.grad_norm:.3f}")
    if environment.rank == 0:
        for (purpose, hop), num_bytes in sharding.traffic.sent.items():
            per_step = num_bytes / args.steps / 2**10
            print(f"sent per step, {purpose}, {hop}: {per_step:.1f} KiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
