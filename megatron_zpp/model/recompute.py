"""Activation checkpointing and compilation of a GPT's blocks.

Both are applied before the model is sharded, and inside the blocks, so that the hooks that sharding
puts on a block stay outside. Recomputation replays the random numbers of dropout: losses and
gradients are bitwise equal to those without it.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.layers import Block
from megatron_zpp.model.loss import logits_to_gradient, whole_cross_entropy
from megatron_zpp.settings.config import RecomputeConfig


def recompute(model: GPT, config: RecomputeConfig) -> None:
    """Make the model discard activations in forward and recompute them in backward, in place.

    Full recomputation stores only inputs: with the uniform method, of each group of
    `recompute_num_layers` blocks; with the block method, of each of the first
    `recompute_num_layers` blocks, while the others store everything. Selective recomputation
    discards the activations of the core attention. Without a granularity nothing changes.
    """
    num_layers, blocks = config.recompute_num_layers, _own_blocks(model)
    if config.recompute_granularity == "selective":
        for block in blocks:
            block.attention.call = call_checkpointed
    elif config.recompute_granularity == "full":
        is_block_method = config.recompute_method == "block"
        if not is_block_method and num_layers > 1:
            model.call = call_checkpointed
            model.blocks_per_call = num_layers
            return
        for block in blocks[: num_layers if is_block_method else None]:
            block.call = call_checkpointed


def compile_blocks(model: GPT, backend: str = "inductor") -> None:
    """Compile the computation of each block, and the cross-entropy, with torch.compile.

    Blocks of one shape share their code. Compilation, and its errors, happen in the first forward
    pass.
    """
    for block in _own_blocks(model):
        block.compute = torch.compile(block.compute, backend=backend)
    kernel = torch.compile(logits_to_gradient, backend=backend)
    model.cross_entropy = partial(whole_cross_entropy, kernel=kernel)


def call_checkpointed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return `function(*arguments)`; its intermediate results are recomputed for backward."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=True)


def _own_blocks(model: GPT) -> list[Block]:
    """Return the blocks of a model that may be a stage of a pipeline, without the others."""
    return [block for block in model.blocks if isinstance(block, Block)]
