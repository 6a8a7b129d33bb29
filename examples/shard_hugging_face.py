"""Train a Hugging Face GPT-2 from scratch on bytes of Python source, with all of ZeRO++.

    zeropp --num_ranks 4 --ranks_per_node 2 examples/shard_hugging_face.py

Four ranks form two nodes of two ranks: weights cross nodes as INT8 and once per step, gradients as
INT4. The last lines show how many bytes rank 0 sent.
"""

import argparse
import logging
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from standard_library import StandardLibrary
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

import zeropp
from zeropp.ranks.process_group import pick_device, start_process_group
from zeropp.ranks.topology import Environment

LENGTH, SAMPLES = 64, 4  # bytes per sample, samples per rank and step
SHAPE = dict(n_layer=2, n_head=4, n_embd=96, n_positions=LENGTH, vocab_size=256)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
NO_WORDS = dict(bos_token_id=None, eos_token_id=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--config", default=Path(__file__).with_name("ds_hugging_face.json"))
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    environment = Environment.read()
    device = pick_device(environment)
    start_process_group(environment, device, timedelta(minutes=10))
    if environment.rank == 0:
        logging.basicConfig(level=logging.INFO, format="%(message)s")

    torch.manual_seed(0)  # the same weights on every rank
    with zeropp.zero.Init():
        model = GPT2LMHeadModel(GPT2Config(**SHAPE, **NO_DROPOUT, **NO_WORDS))
    mesh = init_device_mesh(device.type, (environment.world_size,))
    sharding = zeropp.shard(model, mesh, zeropp.ZeroConfig.from_json(args.config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)

    text = StandardLibrary(LENGTH)
    sampler = DistributedSampler(text, environment.world_size, environment.rank, drop_last=True)
    batches = iter(DataLoader(text, SAMPLES, sampler=sampler))
    for step in range(1, args.steps + 1):
        inputs = next(batches)[0].to(device)
        with sharding.micro_step(last=True):
            loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
            loss.backward()
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
