"""Estimates of the memory that a model's states take, by DeepSpeed's names.

For each weight the ranks have 16 bytes: of an fp32 weight, its gradient and two moments. Computing
takes 2 for each weight that is gathered: all at stage 2, the largest layer's at stage 3.
"""

import sys
from functools import partial

from torch import nn

SHARD_BYTES, COMPUTE_BYTES, GB = 16, 2, 2**30


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what a GPU needs, and a node's CPU with offload: the shards, times a factor."""
    of_node = SHARD_BYTES * total_params / num_nodes
    compute = COMPUTE_BYTES * largest_layer_params
    sys.stdout.write(
        f"{total_params / 1e6:.0f}M weights on {num_nodes} x {num_gpus_per_node} GPUs, of each\n"
        f"{(compute + of_node / num_gpus_per_node) / GB:.2f} GB; with offload_optimizer "
        f"{compute / GB:.2f} GB, and {of_node * additional_buffer_factor / GB:.2f} GB of each CPU\n"
    )


def estimate_zero2_model_states_mem_needs_all_cold(total_params: int, *more: int, **k: int) -> None:
    """Print the same at stage 2, for numbers of GPUs per node and nodes."""
    estimate_zero3_model_states_mem_needs_all_cold(total_params, total_params, *more, **k)


def _all_live(model: nn.Module, *more: int, stage: int, **k: int) -> None:
    total = sum(each.numel() for each in model.parameters())
    layers = ([*module.parameters(recurse=False)] for module in model.modules())
    largest = total if stage == 2 else max(sum(each.numel() for each in own) for own in layers)
    estimate_zero3_model_states_mem_needs_all_cold(total, largest, *more, **k)


estimate_zero2_model_states_mem_needs_all_live = partial(_all_live, stage=2)
estimate_zero3_model_states_mem_needs_all_live = partial(_all_live, stage=3)
