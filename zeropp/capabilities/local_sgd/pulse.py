"""Which replicas live: each counts in the store, and the others watch it count."""

from contextlib import suppress

import torch.distributed as dist

from zeropp.ranks.pulse import LEFT, Liveness, Pulse


class ReplicaPulse:
    """Counts for the replica `name` until `close`, which says that it has left."""

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
    """Return what is known of the lives of replicas that count in a store."""

    def read(name: str) -> str:
        return store.get(_key(name)).decode() if store.check([_key(name)]) else ""

    return Liveness(read)


def _key(name: str) -> str:
    return f"pulse/{name}"
