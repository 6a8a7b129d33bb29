"""Membership: which replicas take part, the longest-serving one first, and which live.

Each has a heartbeat in the store, which the others watch.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from zeropp.ranks.pulse import LEFT, Liveness, Pulse


@dataclass(frozen=True, kw_only=True)
class Member:
    """A replica: each launch has a unique `name`; `number` may be that of one that has ended.

    is_fresh: it has no weights yet, and will get those of a member.
    """

    name: str
    number: int
    is_fresh: bool = False


@dataclass(frozen=True)
class Members:
    """Replicas in the order in which they joined, which gives their indices."""

    nodes: tuple[Member, ...]

    @classmethod
    def of_text(cls, text: str | bytes) -> "Members":
        """Read what `text` has returned."""
        return cls(tuple(Member(**each) for each in json.loads(text)))

    @property
    def text(self) -> str:
        """As text for the store."""
        return json.dumps([asdict(each) for each in self.nodes])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.nodes)

    @property
    def settled(self) -> "Members":
        """The same replicas, all with weights."""
        return Members(tuple(replace(each, is_fresh=False) for each in self.nodes))

    @property
    def with_weights(self) -> tuple[int, ...]:
        """The indices of replicas that have weights."""
        return tuple(place for place, each in enumerate(self.nodes) if not each.is_fresh)

    def place(self, name: str) -> int | None:
        """Return the index of a replica; None if it is no member."""
        return self.names.index(name) if name in self.names else None

    def without(self, names: Iterable[str]) -> "Members":
        """Return the others than these."""
        gone = set(names)
        return Members(tuple(each for each in self.nodes if each.name not in gone))

    def __str__(self) -> str:
        numbers = [str(each.number) for each in self.nodes]
        return f"node{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


class ReplicaPulse:
    """The heartbeat of the replica `name` until `close`, which says that it has left."""

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name, self._count = store.clone(), name, 0
        self._store.set(_key(name), "0")
        self._pulse = Pulse(self._beat)

    def close(self) -> None:
        """Let the others go on without this replica at once."""
        self._pulse.close()
        with suppress(RuntimeError):  # nobody is left who would read it
            self._store.set(_key(self._name), LEFT)

    def _beat(self) -> None:
        self._count += 1
        with suppress(RuntimeError):  # the main thread meets the lost store, and says so
            self._store.set(_key(self._name), str(self._count))


def liveness(store: dist.Store) -> Liveness:
    """Return which replicas live, by their heartbeats in a store."""

    def read(name: str) -> str:
        return store.get(_key(name)).decode() if store.check([_key(name)]) else ""

    return Liveness(read)


def _key(name: str) -> str:
    return f"pulse/{name}"
