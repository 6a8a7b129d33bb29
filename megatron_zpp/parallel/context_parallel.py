"""Context parallelism: ranks that see the same samples share out the tokens of each sequence.

Every rank has a run of S/C tokens of each sequence, with all layers. Attention alone looks at other
tokens: before it, ranks exchange rows of all heads for all rows of some heads, and after it back
(Ulysses, Jacobs et al. 2023). Heads attend to whole sequences, so that documents, dropout and
kernels stay what they are. C ranks; B batch, S sequence, N query heads, K key-value heads.
"""

from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.model.gpt import GPT
from megatron_zpp.parallel.collectives import heads_of_own_rows, moved, rows_of_own_heads
from megatron_zpp.parallel.mesh import Ranks
from zeropp.ranks.groups import shared_group

ROWS = ("tokens", "labels", "loss_mask", "position_ids")  # arguments of the model, [B, S] each


@dataclass
class ContextAxis:
    """The ranks that share sequences, and whether they split them in the current pass."""

    group: dist.ProcessGroup
    splits: bool = field(default=False, init=False)
    share: Tensor | None = field(default=None, init=False)  # of the loss's tokens, times C


def split_sequences(model: GPT, ranks: Ranks) -> None:
    """Let a model take this rank's part of each sequence that it is given with labels."""
    axis = ContextAxis(context_group(ranks))
    model.register_forward_pre_hook(partial(_take_own_part, axis), with_kwargs=True)
    model.loss = partial(_weighted_loss, axis, model.loss)
    for block in model.blocks:
        block.attention.attend = partial(_attend, axis, block.attention.attend)


def context_group(ranks: Ranks) -> dist.ProcessGroup:
    """Return the ranks that share sequences with this one."""
    data = ranks.data.mesh.tolist()
    first = ranks.replica * ranks.context_size
    return shared_group("context", data[first : first + ranks.context_size], data)


def _take_own_part(
    axis: ContextAxis, model: nn.Module, inputs: tuple, options: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Split what the model is called with, if it is to compute a loss; generation is not split."""
    arguments = dict(zip((*ROWS, "edges"), inputs, strict=False)) | options
    axis.splits = arguments.get("labels") is not None
    if not axis.splits:
        return None
    tokens, mask = arguments["tokens"], arguments.get("loss_mask")
    if arguments.get("position_ids") is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        arguments["position_ids"] = positions.expand(tokens.shape)
    if mask is None:
        mask = arguments["loss_mask"] = torch.ones(tokens.shape, device=tokens.device)
    size, place = axis.group.size(), axis.group.rank()
    for name in ROWS:
        arguments[name] = arguments[name].expand(tokens.shape).chunk(size, dim=1)[place]
    own, whole = (each.sum(dtype=torch.float32) for each in (arguments["loss_mask"], mask))
    axis.share = size * own / whole.clamp(min=1)
    return (), arguments


def _weighted_loss(axis: ContextAxis, loss: Any, *inputs: Any) -> Tensor:
    """Weight this rank's mean, so that the mean over ranks is that of the whole sequences."""
    mean = loss(*inputs)
    return mean * axis.share if axis.splits else mean


def _attend(
    axis: ContextAxis, attend: Any, q: Tensor, k: Tensor, v: Tensor, edges: Tensor | None = None
) -> Tensor:
    """Map q [B, S/C, N, D], k and v [B, S/C, K, D] to [B, S/C, N, D]."""
    if not axis.splits:
        return attend(q, k, v, edges)
    size = axis.group.size()
    times = size // gcd(size, k.shape[2])  # so that each rank has whole key-value heads
    if times > 1:
        k, v = (each.repeat_interleave(times, dim=2) for each in (k, v))
    q, k, v = (moved(each, axis.group, rows_of_own_heads, heads_of_own_rows) for each in (q, k, v))
    return moved(attend(q, k, v, edges), axis.group, heads_of_own_rows, rows_of_own_heads)
