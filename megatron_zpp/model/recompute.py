"""What is computed again instead of kept (activation checkpointing), and blocks compiled.

Both are chosen before the model is sharded and act inside the blocks, so that the hooks of
sharding on a block stay outside. Recomputation replays the random numbers of dropout: losses and
gradients are bit for bit those without it.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.loss import at_once, turn_logits
from megatron_zpp.settings.config import RecomputeConfig


def recompute(model: GPT, config: RecomputeConfig) -> None:
    """Make the model drop activations in forward and compute them again in backward.

    Full and uniform keeps only the input of each group of `recompute_num_layers` blocks; full and
    block keeps only the input of each of the first so many blocks; selective drops what lies inside
    the core attention. Changes the model in place; without a granularity nothing is changed.
    """
    count = config.recompute_num_layers
    if config.recompute_granularity == "selective":
        for block in model.blocks:
            block.attention.call = checkpointed
    elif config.recompute_granularity == "full":
        if config.recompute_method != "block" and count > 1:
            model.call = checkpointed
            model.blocks_per_call = count
            return
        last = count if config.recompute_method == "block" else len(model.blocks)
        for block in model.blocks[:last]:
            block.call = checkpointed


def compile_blocks(model: GPT, backend: str = "inductor") -> None:
    """Compile with torch.compile each block's computation, of which those of one shape share code,
    and the cross-entropy.

    Raises what torch.compile raises, at the first forward pass, not here.
    """
    for block in model.blocks:
        block.compute = torch.compile(block.compute, backend=backend)
    model.cross_entropy = partial(at_once, turn=torch.compile(turn_logits, backend=backend))


def checkpointed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Call `function` and forget its intermediate results until the backward pass needs them."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=True)
