"""The ledger: bytes this rank sent, by purpose and by hop, counted where a collective is called.

It counts payload only, without the headers of collectives and of the network. An all-gather is
counted as a ring in rank order (what gloo does, and NCCL for large messages), an all-to-all as
direct messages between its members.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

PURPOSES = ("weights_forward", "weights_backward", "gradients")
HOPS = ("in_node", "across_nodes")

Sent = Mapping[tuple[str, str], float]  # (purpose, hop) -> bytes


@dataclass
class Coding:
    """Whether messages are coded; that may change between passes, on all ranks alike."""

    is_on: bool = False
    is_tried: bool = False  # by steps of training, whether it takes less time
    sends_lengths: bool = False  # before messages, which only gloo receives otherwise


class CodedMessages(NamedTuple):
    """What coded messages held, weights and gradients, and the bytes that they took."""

    weights: int = 0
    weight_bytes: int = 0
    gradients: int = 0
    gradient_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes

    def plus(self, other: "CodedMessages") -> "CodedMessages":
        """Return both together."""
        return CodedMessages(*map(sum, zip(self, other, strict=True)))


class Traffic:
    """Bytes this rank has sent since the ledger was made, or since `take` was last called."""

    def __init__(self, purposes: tuple[str, ...] = PURPOSES) -> None:
        self._purposes = purposes
        self._sent: Counter[tuple[str, str]] = Counter()
        self._coded = CodedMessages()

    @property
    def sent(self) -> dict[tuple[str, str], int]:
        """Bytes by (purpose, hop), zeros included."""
        keys = ((purpose, hop) for purpose in self._purposes for hop in HOPS)
        return {key: self._sent[key] for key in keys}

    def add(self, purpose: str, by_hop: Mapping[str, int]) -> None:
        """Enter what one collective sends, `by_hop`, in bytes."""
        assert purpose in self._purposes, purpose
        for hop, num_bytes in by_hop.items():
            self._sent[purpose, hop] += num_bytes

    def add_coded(self, purpose: str, numbers: int, num_bytes: int) -> None:
        """Note what coded messages hold, whose bytes `add` has entered."""
        is_gradient = purpose == "gradients"
        added = (0, 0, numbers, num_bytes) if is_gradient else (numbers, num_bytes, 0, 0)
        self._coded = self._coded.plus(CodedMessages(*added))

    def take_coded(self) -> CodedMessages:
        """Return what coded messages held since this was last called."""
        coded, self._coded = self._coded, CodedMessages()
        return coded

    def take(self) -> dict[tuple[str, str], int]:
        """Return `sent` and reset the counts to zero."""
        sent = self.sent
        self._sent.clear()
        return sent


class JoinedTraffic:
    """The ledgers of several models, read as one."""

    def __init__(self, ledgers: Iterable[Traffic]) -> None:
        self._ledgers = tuple(ledgers)

    @property
    def sent(self) -> dict[tuple[str, str], int]:
        """Bytes by (purpose, hop), zeros included."""
        return _total(each.sent for each in self._ledgers)

    def take(self) -> dict[tuple[str, str], int]:
        """Return `sent` and reset the counts to zero."""
        return _total([each.take() for each in self._ledgers])

    def take_coded(self) -> CodedMessages:
        """Return what coded messages held since this was last called."""
        each = (ledger.take_coded() for ledger in self._ledgers)
        return reduce(CodedMessages.plus, each, CodedMessages())


def _total(ledgers: Iterable[Sent]) -> dict[tuple[str, str], int]:
    total: Counter[tuple[str, str]] = Counter()
    for sent in ledgers:
        total.update(sent)
    return dict(total)
