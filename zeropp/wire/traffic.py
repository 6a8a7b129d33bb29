"""The ledger: bytes this rank sent, by purpose and by hop, counted where a collective is called.

It counts payload only, without the headers of collectives and of the network. An all-gather is
counted as a ring in rank order (what gloo does, and NCCL for large messages), an all-to-all as
direct messages between its members.
"""

from collections import Counter
from collections.abc import Mapping

PURPOSES = ("weights_forward", "weights_backward", "gradients")
HOPS = ("in_node", "across_nodes")

Sent = Mapping[tuple[str, str], float]  # (purpose, hop) -> bytes


class Traffic:
    """Bytes this rank has sent since the ledger was made, or since `take` was last called."""

    def __init__(self) -> None:
        self._sent: Counter[tuple[str, str]] = Counter()

    @property
    def sent(self) -> dict[tuple[str, str], int]:
        """Bytes by (purpose, hop), zeros included."""
        return {(purpose, hop): self._sent[purpose, hop] for purpose in PURPOSES for hop in HOPS}

    def add(self, purpose: str, by_hop: Mapping[str, int]) -> None:
        """Enter what one collective sends, `by_hop`, in bytes."""
        assert purpose in PURPOSES, purpose
        for hop, num_bytes in by_hop.items():
            self._sent[purpose, hop] += num_bytes

    def take(self) -> dict[tuple[str, str], int]:
        """Return `sent` and reset the counts to zero."""
        sent = self.sent
        self._sent.clear()
        return sent
