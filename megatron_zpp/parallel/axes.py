"""What the ranks of an axis over which a GPT is split send each other, as its layers need it.

Over the tensor axis each rank has a part of each matrix, over the context axis a part of each
sequence. Attention alone looks at tokens of other parts:

| `--cp-comm-type` | a rank has            | attention                                             |
|------------------|-----------------------|-------------------------------------------------------|
| a2a              | a run of tokens       | ranks exchange rows of all heads for all rows of some |
|                  |                       | heads before it, and back after it                    |
| allgather        | parts c and 2C-1-c of | ranks gather keys and values; each part attends to    |
|                  | 2C, equal work on all | what comes before it                                  |

Sources: tensor: Shoeybi et al. 2019; rows: sequence parallelism (Korthikanti et al. 2022); a2a:
Ulysses (Jacobs et al. 2023); allgather: Llama 3 (Grattafiori et al. 2024), 3.3.2.
T and C ranks; B batch, S sequence, H hidden, N query heads, K key-value heads of D channels.
"""

from math import gcd

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megatron_zpp.parallel.collectives import (
    gather_rows,
    heads_of_own_rows,
    keep,
    moved,
    rows_of_own_heads,
    sum_rows,
    sum_whole,
)
from zeropp.wire import RankGroup


def part_of(parameter: nn.Parameter, dim: int, size: int, mesh: DeviceMesh | None) -> nn.Parameter:
    """Return one of `size` equal parts of a parameter without values, split in `dim`.

    With the mesh of the ranks that have the parts, it is a DTensor of the whole shape.
    """
    shape = list(parameter.shape)
    shape[dim] //= size
    part = parameter.new_empty(shape)
    if mesh is not None:
        part = DTensor.from_local(
            part,
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return nn.Parameter(part)


def enter(x: Tensor, tensor: RankGroup, splits_rows: bool) -> Tensor:
    """Return x [B, S, H] for layers that are split by columns, on ranks of the tensor axis.

    With `splits_rows` each has rows [B, S/T, H] of it.
    """
    if splits_rows:
        return moved(x, tensor, gather_rows, sum_rows)
    return moved(x, tensor, keep, sum_whole)


def leave(x: Tensor, tensor: RankGroup, splits_rows: bool = False) -> Tensor:
    """Return the sum over ranks of x [B, S, H], or this rank's rows of it.

    It is what layers return that are split by rows.
    """
    if splits_rows:
        return moved(x, tensor, sum_rows, gather_rows)
    return moved(x, tensor, sum_whole, keep)


def parts_of_sequence(context: RankGroup, gathers_keys: bool) -> tuple[int, ...]:
    """Return the numbers of this rank's parts of a sequence, of as many as all ranks have."""
    size, place = context.size, context.index
    return (place, 2 * size - 1 - place) if gathers_keys else (place,)


def own_tokens(
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    context: RankGroup,
    gathers_keys: bool,
) -> tuple[Tensor, ...]:
    """Return this rank's part of arguments [B, S], [B, S/C] each, and the weight of its loss.

    With that weight, the mean over ranks of their mean losses is that of whole sequences.
    """
    if position_ids is None:
        position_ids = torch.arange(tokens.shape[1], device=tokens.device)
    if mask is None:
        mask = torch.ones(tokens.shape, device=tokens.device)
    parts, own = parts_of_sequence(context, gathers_keys), []
    for each in (tokens, labels, mask, position_ids):
        chunks = each.expand(tokens.shape).chunk(len(parts) * context.size, dim=1)
        own.append(torch.cat([chunks[part] for part in parts], dim=1))
    num_own, num_tokens = (each.sum(dtype=torch.float32) for each in (own[2], mask))
    return *own, context.size * num_own / num_tokens.clamp(min=1)


def exchange_rows(q: Tensor, k: Tensor, v: Tensor, context: RankGroup) -> list[Tensor]:
    """Return all rows of this rank's heads, of queries, keys and values [B, S/C, heads, D].

    Key-value heads are repeated where C does not divide them.
    """
    times = context.size // gcd(context.size, k.shape[2])
    if times > 1:
        k, v = (each.repeat_interleave(times, dim=2) for each in (k, v))
    return [moved(x, context, rows_of_own_heads, heads_of_own_rows) for x in (q, k, v)]


def exchange_heads(attended: Tensor, context: RankGroup) -> Tensor:
    """Return all heads [B, S/C, N, D] of this rank's rows: the opposite of `exchange_rows`."""
    return moved(attended, context, heads_of_own_rows, rows_of_own_heads)


def gather_keys(k: Tensor, v: Tensor, context: RankGroup) -> tuple[Tensor, ...]:
    """Return keys [B, S, K, D] and values [B, S, K, V] of all tokens, in their order."""
    gathered = moved(torch.cat((k, v), dim=-1), context, gather_rows, sum_rows)
    first, second = gathered.unflatten(1, (context.size, 2, -1)).unbind(2)
    in_order = torch.cat((first.flatten(1, 2), second.flip(1).flatten(1, 2)), dim=1)
    return in_order.split((k.shape[-1], v.shape[-1]), dim=-1)
