"""What the ranks of a pipeline send their neighbours: activations onward, gradients back.

Each direction has a process group of its own, so that on no communicator two ranks wait for each
other. The tensors of a channel arrive in the order in which they were sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.parallel.mesh import Ranks
from zeropp.wire.rank_group import EXCHANGE, RankGroup


@dataclass(frozen=True)
class Channel:
    """One end of a channel: the other rank, by its global rank, and the group of the two."""

    peer: int
    group: RankGroup

    def send(self, x: Tensor) -> "Transfer":
        """Begin to send x."""
        x = x.detach().contiguous()
        self.group.count(EXCHANGE, x.nbytes)
        with self.group.traced("send"):
            return Transfer(x, dist.isend(x, self.peer, group=self.group.group))

    def expect(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "Transfer":
        """Begin to receive a tensor."""
        x = torch.empty(*shape, dtype=dtype, device=device)
        return Transfer(x, dist.irecv(x, self.peer, group=self.group.group))


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way."""

    _tensor: Tensor
    _work: dist.Work

    def wait(self) -> Tensor:
        """Return the tensor when it has arrived, or may be written again."""
        self._work.wait()
        return self._tensor


@dataclass(frozen=True, kw_only=True)
class Channels:
    """The channels of a rank to the ranks before and after it in a pipeline; None at an end."""

    activations_in: Channel | None
    activations_out: Channel | None
    gradients_in: Channel | None
    gradients_out: Channel | None


def connect(ranks: Ranks, *, is_ring: bool) -> Channels:
    """Connect this rank with its neighbours in the pipeline; all ranks call it.

    In a ring, the last sends activations to the first, which has several stages.
    """
    line, place = ranks.pipeline, ranks.pipeline_place
    channels: dict[str, Channel] = dict.fromkeys(field.name for field in fields(Channels))
    for index in range(len(line) if is_ring else len(line) - 1):
        following = (index + 1) % len(line)
        for what, end, other_end in (("activations", "out", "in"), ("gradients", "in", "out")):
            for own, peer, way in ((index, following, end), (following, index, other_end)):
                if own == place:  # the members meet here, in the same order on every rank
                    members = line[index], line[following]
                    group = ranks.rank_group("pipeline", members, name=f"{what} {index}")
                    dist.barrier(group=group.group)  # else it may connect at the first message
                    channels[f"{what}_{way}"] = Channel(line[peer], group)
    return Channels(**channels)
