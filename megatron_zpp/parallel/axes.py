"""The axes over which a GPT is split, as its layers use them: their ranks, and what these send.

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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megatron_zpp.parallel.collectives import (
    gather_columns,
    gather_rows,
    heads_of_own_rows,
    keep,
    moved,
    own_rows,
    rows_of_own_heads,
    sum_columns,
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


@dataclass(frozen=True, kw_only=True)
class TensorAxis:
    """The ranks that each have a part of each matrix.

    What enters layers that are split by columns is whole on every rank, and what leaves layers that
    are split by rows is summed. Parameters are DTensors on `mesh`, so that names and shapes in a
    checkpoint do not depend on the number of ranks. Ranks that are only planned have no mesh.
    """

    group: RankGroup
    sequence_parallel: bool
    mesh: DeviceMesh | None = None

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def place(self) -> int:
        return self.group.index

    def splits(self, tokens: Tensor) -> bool:
        """Whether a pass with a loss splits the rows of tokens [B, S]; logits are of whole rows."""
        return self.sequence_parallel and tokens.shape[1] % self.size == 0

    def part(self, parameter: nn.Parameter, dim: int) -> nn.Parameter:
        """Return this rank's part of a parameter without values, split in `dim`."""
        return part_of(parameter, dim, self.size, self.mesh)

    def enter(self, x: Tensor, splits_rows: bool) -> Tensor:
        """Return all rows of x, [B, S, H]; with `splits_rows` each rank has [B, S/T, H] of them."""
        if splits_rows:
            return moved(x, self.group, gather_rows, sum_rows)
        return moved(x, self.group, keep, sum_whole)

    def leave(self, x: Tensor, splits_rows: bool = False) -> Tensor:
        """Return the sum over ranks of x [B, S, H], or this rank's rows of it."""
        if splits_rows:
            return moved(x, self.group, sum_rows, gather_rows)
        return moved(x, self.group, sum_whole, keep)

    def all_columns(self, x: Tensor) -> Tensor:
        """Return the columns [B, S, H] of all ranks, which have [B, S, H/T] each."""
        return moved(x, self.group, gather_columns, sum_columns)

    def own_rows(self, x: Tensor) -> Tensor:
        """Return this rank's rows [B, S/T, H] of x [B, S, H]."""
        return moved(x, self.group, own_rows, gather_rows)

    @contextmanager
    def own_random_numbers(self, device: torch.device) -> Iterator[None]:
        """Use this rank's own random numbers inside, and afterwards again the same on all ranks."""
        seed = self.group.own_seed()
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            torch.manual_seed(seed)
            yield


@dataclass(frozen=True, kw_only=True)
class ContextAxis:
    """The ranks that each have a part of each sequence, with all layers.

    gathers_keys: attention gathers keys and values, instead of exchanging heads for rows.
    """

    group: RankGroup
    gathers_keys: bool

    @property
    def parts(self) -> tuple[int, ...]:
        """The numbers of this rank's parts of a sequence, of as many as all ranks have."""
        size, place = self.group.size, self.group.index
        return (place, 2 * size - 1 - place) if self.gathers_keys else (place,)

    def own_part(
        self, tokens: Tensor, labels: Tensor, mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return this rank's part of arguments [B, S], [B, S/C] each, and the weight of its loss.

        With that weight, the mean over ranks of their mean losses is that of whole sequences.
        """
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        if mask is None:
            mask = torch.ones(tokens.shape, device=tokens.device)
        whole = (each.expand(tokens.shape) for each in (tokens, labels, mask, position_ids))
        own = [self._own_tokens(each) for each in whole]
        num_own, num_tokens = (each.sum(dtype=torch.float32) for each in (own[2], mask))
        return *own, self.group.size * num_own / num_tokens.clamp(min=1)

    def exchange_rows(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return all rows of this rank's heads, of queries, keys and values [B, S/C, heads, D].

        Key-value heads are repeated where C does not divide them.
        """
        times = self.group.size // gcd(self.group.size, k.shape[2])
        if times > 1:
            k, v = (each.repeat_interleave(times, dim=2) for each in (k, v))
        return [moved(x, self.group, rows_of_own_heads, heads_of_own_rows) for x in (q, k, v)]

    def exchange_heads(self, attended: Tensor) -> Tensor:
        """Return all heads [B, S/C, N, D] of this rank's rows: the opposite of `exchange_rows`."""
        return moved(attended, self.group, heads_of_own_rows, rows_of_own_heads)

    def gather_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return keys [B, S, K, D] and values [B, S, K, V] of all tokens, in their order."""
        gathered = moved(torch.cat((k, v), dim=-1), self.group, gather_rows, sum_rows)
        first, second = gathered.unflatten(1, (self.group.size, 2, -1)).unbind(2)
        in_order = torch.cat((first.flatten(1, 2), second.flip(1).flatten(1, 2)), dim=1)
        return in_order.split((k.shape[-1], v.shape[-1]), dim=-1)

    def _own_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens [B, S/C] of x [B, S]."""
        chunks = x.chunk(len(self.parts) * self.group.size, dim=1)
        return torch.cat([chunks[part] for part in self.parts], dim=1)
