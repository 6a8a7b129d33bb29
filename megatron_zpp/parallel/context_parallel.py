"""Context parallelism: ranks that see the same samples share out the tokens of each sequence.

Every rank has S/C tokens of each sequence, with all layers. Attention alone looks at other tokens:

| `--cp-comm-type` | a rank has            | attention                                             |
|------------------|-----------------------|-------------------------------------------------------|
| a2a              | a run of tokens       | ranks exchange rows of all heads for all rows of some |
|                  |                       | heads before it, and back after it                    |
| allgather        | parts c and 2C-1-c of | ranks gather keys and values; each part attends to    |
|                  | 2C, equal work on all | what comes before it                                  |

Sources: a2a: Ulysses (Jacobs et al. 2023); allgather: Llama 3 (Grattafiori et al. 2024), 3.3.2.
C ranks; B batch, S sequence, N query heads, K key-value heads, D channels of a head.
"""

from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.model.document_attention import attend_documents
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.layers import Attention
from megatron_zpp.model.prefix_attention import attend_last
from megatron_zpp.parallel.collectives import (
    gather_rows,
    heads_of_own_rows,
    moved,
    rows_of_own_heads,
    sum_rows,
)
from megatron_zpp.parallel.peers import Peers

ROWS = ("tokens", "labels", "loss_mask", "position_ids")  # arguments of the model, [B, S] each


@dataclass
class ContextAxis:
    """The ranks that share sequences, and whether they split them in the current pass."""

    peers: Peers
    gathers_keys: bool  # instead of exchanging heads
    splits: bool = field(default=False, init=False)
    share: Tensor | None = field(default=None, init=False)  # of the loss's tokens, times C

    @property
    def parts(self) -> tuple[int, ...]:
        """The numbers of this rank's parts of a sequence, of as many as all ranks have."""
        size, place = self.peers.size, self.peers.place
        return (place, 2 * size - 1 - place) if self.gathers_keys else (place,)

    def own_rows(self, x: Tensor) -> Tensor:
        """Return this rank's rows of x [B, S]."""
        chunks = x.chunk(len(self.parts) * self.peers.size, dim=1)
        return torch.cat([chunks[part] for part in self.parts], dim=1)


def split_sequences(model: GPT, peers: Peers, communication: str) -> ContextAxis:
    """Let a model take this rank's part of each sequence that it is given with labels.

    `communication` is "a2a" or "allgather". Returns the axis, which the model's attention asks.
    """
    axis = ContextAxis(peers, gathers_keys=communication == "allgather")
    model.register_forward_pre_hook(partial(_take_own_part, axis), with_kwargs=True)
    model.loss = partial(_weighted_loss, axis, model.loss)
    for block in model.blocks:
        attention = block.attention
        if axis.gathers_keys:
            attention.attend = partial(_attend_gathered, axis, attention, attention.attend)
        else:
            attention.attend = partial(_attend_exchanged, axis, attention.attend)
    return axis


def _take_own_part(
    axis: ContextAxis, model: GPT, inputs: tuple, options: dict[str, Any]
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
    for name in ROWS:
        arguments[name] = axis.own_rows(arguments[name].expand(tokens.shape))
    own, whole = (each.sum(dtype=torch.float32) for each in (arguments["loss_mask"], mask))
    axis.share = axis.peers.size * own / whole.clamp(min=1)
    return (), arguments


def _weighted_loss(axis: ContextAxis, loss: Any, *inputs: Any) -> Tensor:
    """Weight this rank's mean, so that the mean over ranks is that of the whole sequences."""
    mean = loss(*inputs)
    return mean * axis.share if axis.splits else mean


def _attend_exchanged(
    axis: ContextAxis, attend: Any, q: Tensor, k: Tensor, v: Tensor, edges: Tensor | None = None
) -> Tensor:
    """Map q [B, S/C, N, D], k and v [B, S/C, K, D] to [B, S/C, N, D].

    Heads attend to whole sequences: documents, dropout and kernels stay what they are.
    """
    if not axis.splits:
        return attend(q, k, v, edges)
    size = axis.peers.size
    times = size // gcd(size, k.shape[2])  # so that each rank has whole key-value heads
    if times > 1:
        k, v = (each.repeat_interleave(times, dim=2) for each in (k, v))
    q, k, v = (moved(each, axis.peers, rows_of_own_heads, heads_of_own_rows) for each in (q, k, v))
    return moved(attend(q, k, v, edges), axis.peers, heads_of_own_rows, rows_of_own_heads)


def _attend_gathered(
    axis: ContextAxis,
    attention: Attention,
    attend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: Tensor | None = None,
) -> Tensor:
    """Map q [B, S/C, N, D], k and v [B, S/C, K, D] to [B, S/C, N, D]."""
    if not axis.splits:
        return attend(q, k, v, edges)
    keys_and_values = moved(torch.cat((k, v), dim=2), axis.peers, gather_rows, sum_rows)
    first, second = keys_and_values.unflatten(1, (axis.peers.size, 2, -1)).unbind(2)
    in_order = torch.cat((first.flatten(1, 2), second.flip(1).flatten(1, 2)), dim=1)
    keys, values = in_order.split(k.shape[2], dim=2)  # [B, S, K, D] each
    dropout = attention.dropout if attention.training else 0.0
    scores = attention.scores
    attended = []
    for number, part in zip(axis.parts, q.chunk(2, dim=1), strict=True):
        first, end = number * part.shape[1], (number + 1) * part.shape[1]
        if edges is None:
            prefix = (each[:, :end].transpose(1, 2) for each in (keys, values))
            attended.append(
                attend_last(part.transpose(1, 2), *prefix, dropout, scores).transpose(1, 2)
            )
        else:
            attended.append(attend_documents(part, keys, values, edges, dropout, first, scores))
    return torch.cat(attended, dim=1)
