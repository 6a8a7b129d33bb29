"""What the ranks of a pipeline send their neighbours: activations onward, gradients back.

Each directed link has a process group of its own, so that on no communicator two ranks wait for
each other. Messages of a link arrive in the order in which they were sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.parallel.peers import Peers
from zeropp.wire.link import traced


@dataclass(frozen=True)
class Link:
    """One end of a link: the other rank, by its global number, and the two as peers."""

    peer: int
    peers: Peers

    def send(self, x: Tensor) -> "Message":
        """Begin to send x."""
        x = x.detach().contiguous()
        self.peers.count_exchange(x.nbytes)
        with traced("send", self.peers.purpose, self.peers.hop):
            return Message(x, dist.isend(x, self.peer, group=self.peers.group))

    def expect(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "Message":
        """Begin to receive a tensor."""
        x = torch.empty(*shape, dtype=dtype, device=device)
        return Message(x, dist.irecv(x, self.peer, group=self.peers.group))


@dataclass(frozen=True)
class Message:
    """A tensor on its way."""

    _tensor: Tensor
    _work: dist.Work

    def wait(self) -> Tensor:
        """Return the tensor when it has arrived, or may be written again."""
        self._work.wait()
        return self._tensor


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links of a rank with the ranks before and after it in a pipeline; None at an end."""

    activations_in: Link | None
    activations_out: Link | None
    gradients_in: Link | None
    gradients_out: Link | None


def connect(ranks: Ranks, *, is_ring: bool) -> Links:
    """Connect this rank with its neighbours in the pipeline; all ranks call it.

    In a ring, the last sends activations to the first, which has several stages.
    """
    line, place = ranks.pipeline, ranks.pipeline_place
    links: dict[str, Link] = dict.fromkeys(field.name for field in fields(Links))
    for index in range(len(line) if is_ring else len(line) - 1):
        following = (index + 1) % len(line)
        for what, end, other_end in (("activations", "out", "in"), ("gradients", "in", "out")):
            for own, peer, way in ((index, following, end), (following, index, other_end)):
                if own == place:  # the members meet here, in the same order on every rank
                    members = line[index], line[following]
                    peers = ranks.peers("pipeline", members, name=f"{what} {index}")
                    dist.barrier(group=peers.group)  # else it may connect at the first message
                    links[f"{what}_{way}"] = Link(line[peer], peers)
    return Links(**links)
