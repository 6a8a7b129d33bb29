"""Train a Hugging Face Llama under plain FSDP2, and let it send what ZeRO++ sends.

    zeropp --num_ranks 4 --ranks_per_node 2 examples/attach_fsdp2.py

The loop is that of any program that calls `fully_shard`; one line is new. At the end it prints what
a rank has sent per step, and what it would have sent without that line.
"""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from standard_library import StandardLibrary
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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
CONFIG = {
    "zero_optimization": {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 2,  # the ranks of a node
        "zero_quantized_gradients": True,
    }
}


def main() -> None:
    """Train, and print losses and bytes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    environment = Environment.read()
    device = pick_device(environment)
    start_process_group(environment, device, timedelta(minutes=10))
    mesh = init_device_mesh(device.type, (environment.world_size,))

    torch.manual_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **NO_WORDS)).to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    attached = zeropp.attach(model, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    text = StandardLibrary(LENGTH)
    sampler = DistributedSampler(text, drop_last=True)
    batches = iter(DataLoader(text, SAMPLES, sampler=sampler))
    for step in range(1, args.steps + 1):
        for index in range(MICRO_BATCHES):
            inputs = next(batches)[0].to(device)
            model.set_requires_gradient_sync(index == MICRO_BATCHES - 1)
            loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
            (loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if environment.rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}, loss {loss.item():.3f}")
    if environment.rank == 0:
        plain = attached.plain_traffic(MICRO_BATCHES)
        for (purpose, hop), num_bytes in attached.traffic.sent.items():
            per_step, without = num_bytes / args.steps / 2**10, plain[purpose, hop] / 2**10
            print(f"sent per step, {purpose}, {hop}: {per_step:.1f} KiB instead of {without:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
