"""A replica's persistent buffers, which outer steps average: statistics, biases of routers.

They change without gradients, so that they have no outer momentum, and cross unrounded.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor

from zeropp.capabilities.local_sgd.outer_group import OuterGroup
from zeropp.capabilities.local_sgd.trained_weights import HeldModel
from zeropp.fsdp_adapter import local_part

OUTER = "outer."  # prefix of the names of local SGD's state in checkpoints


@dataclass(kw_only=True, eq=False)
class AveragedBuffers:
    """The buffers of this rank, exchanged with the fragment `number`; methods are as `Fragment`'s.

    `agreed` are those after the last outer step, by name: means of floats, formed in fp64; of other
    types, those of the first replica.
    """

    model: HeldModel
    group: OuterGroup | None = None
    number: int = 0
    agreed: dict[str, Tensor] = field(init=False)
    merges_at: int = field(init=False, default=0)
    running: Future[list[Tensor]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.agree()

    @property
    def beginning(self) -> dict[str, int]:
        """Checksums by name of the global buffers."""
        parts = zip(self.agreed, self._bytes(), strict=True)
        return {name: crc32(part.numpy()) for name, part in parts}

    def message(self) -> Tensor:
        """Return the buffers as uint8 [bytes] on the host."""
        return torch.cat([*self._bytes(), torch.empty(0, dtype=torch.uint8)])

    def take(self, messages: Sequence[Tensor]) -> None:
        """Set the global buffers to the means of those in the messages of several replicas."""
        sizes = [each.nbytes for each in self.agreed.values()]
        rows = zip(*(message.split(sizes) for message in messages if sizes), strict=True)
        for agreed, row in zip(self.agreed.values(), rows, strict=True):
            first, *others = (each.clone().view(agreed.dtype).view(agreed.shape) for each in row)
            if agreed.is_floating_point():
                first = sum((each.double() for each in others), first.double()) / len(row)
            agreed.copy_(first)

    def average(self) -> None:
        self.start(0)
        self.merge(0.0)

    def agree(self) -> None:
        self.agreed = {name: each.clone() for name, each in self._buffers().items()}

    def start(self, merges_at: int) -> None:
        self.agree()
        if self.agreed:
            messages = [self.message()] * self.group.size
            content = crc32(repr([*self.agreed]).encode())
            self.running = self.group.start(lambda: self.group.exchange(messages, content))
            self.merges_at = merges_at

    @torch.no_grad()
    def merge(self, mixing: float) -> None:
        """As in `Fragment`, except that mixing leaves what is no float as it is."""
        self._receive()
        for name, own in self._buffers().items():
            agreed = self.agreed.get(name, own)
            if own.is_floating_point() or not mixing:  # -inf of a mask stays
                own.copy_(agreed.lerp(own, mixing).where(agreed != own, own) if mixing else agreed)
        self.merges_at = 0

    def state(self) -> dict[str, Tensor]:
        self._receive()
        agreed = {f"{OUTER}{name}.agreed": each for name, each in self.agreed.items()}
        merges_at = torch.tensor(self.merges_at)
        return agreed | {f"{OUTER}{name}.merges_at": merges_at.clone() for name in self.agreed}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._receive()
        for name, agreed in self.agreed.items():
            agreed.copy_(state[f"{OUTER}{name}.agreed"])
            self.merges_at = int(state[f"{OUTER}{name}.merges_at"])

    def _receive(self) -> None:
        if self.running is not None:
            self.take(self.running.result())
            self.running = None

    def _buffers(self) -> dict[str, Tensor]:
        """Return the buffers that checkpoints hold now, as modules may have put others there."""
        kept = {id(each) for each in self.model.model.state_dict(keep_vars=True).values()}
        named = self.model.model.named_buffers()
        return {name: local_part(each.detach()) for name, each in named if id(each) in kept}

    def _bytes(self) -> list[Tensor]:
        return [each.cpu().reshape(-1).view(torch.uint8) for each in self._buffers().values()]
