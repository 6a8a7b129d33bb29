"""Quorum and commit of an elastic run, in rounds: each has its members and one outcome for all.

Both are keys of the store, set by compare-and-set: the first writer decides. A round is given up if
a member dies in it, and repeated with the remaining members: nobody may keep anything of it.

    here/<round>/<node>/<rank>   this rank has arrived at the round
    members/<round>              the quorum: all that have arrived, when the others have ended;
                                 empty if all were taken for dead and a new epoch has begun
    admitted/<node>              the first round of a replica that joins
    voted/<round>/<node>/<rank>  this rank has its result of the round
    outcome/<round>              DONE once all ranks have voted, or GIVEN_UP
    joins/<i>                    the replicas that ask to join, in order
    latest                       a round that has begun, perhaps not the last one

Every rank of every replica reads these keys for itself, and so comes to the same answers.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from zeropp.errors import NetworkError
from zeropp.ranks.pulse import LEFT, Liveness, Pulse

DONE, GIVEN_UP = b"done", b"given up"
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks at the store


class NodeLostError(RuntimeError):
    """A member has ended, or another one has given the round up."""


class ExcludedError(NetworkError):
    """The other replicas have gone on without this one, as they took it for dead."""


class NobodyLeftError(NetworkError):
    """All replicas that have the weights have ended, and this one waited to get them."""


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


class Rounds:
    """The rounds of a rank, one of `num_ranks` of the replica `own`.

    `limit`: seconds to wait for a replica that lives and does not arrive. All ranks of all replicas
    call the same methods in the same order.
    """

    def __init__(
        self,
        store: dist.Store,
        own: Member,
        rank: int,
        num_ranks: int,
        lives: Liveness,
        limit: float,
    ) -> None:
        self.own, self.rank = own, rank
        self.number = 1  # round 0 decides the initial members
        self.members = Members(())  # of the last round
        self._store, self._lives, self._limit = store, lives, limit
        self._ranks = range(num_ranks)
        self._num_looked_at = 0  # requests to join that have been read
        self._waiting: list[Member] = []

    def begin(self, members: Members) -> None:
        """Take part from round 1 on, with these members."""
        self.members = members

    def announce(self) -> None:
        """Ask to join, when all ranks of this replica are ready; one of them calls it."""
        text, number = Members((self.own,)).text, 0
        while self._store.compare_set(f"joins/{number}", "", text).decode() != text:
            number += 1

    def wait_for_admission(self) -> None:
        """Return when the others have admitted this replica to the round that follows.

        Raises NobodyLeftError.
        """
        for _ in pauses():
            if self._store.check([f"admitted/{self.own.name}"]):
                break
            if not any(map(self._lives.is_alive, names_with_weights(self._store))):
                raise NobodyLeftError(
                    f"node {self.own.number} waited to join, and all others have ended: start the "
                    "nodes again, which go on from their last checkpoints"
                )
        self.number = int(self._store.get(f"admitted/{self.own.name}"))
        self.members = self._read_members()

    def arrive(self, *, admits: bool) -> Members:
        """Arrive at the next round; return its members.

        `admits`: replicas may join in it. Raises ExcludedError.
        """
        if self.own.is_fresh and self.members == self._decided():
            return self.members  # it was admitted to this round
        self._store.set(self._key("here", self.own, self.rank), "")
        began = time.monotonic()
        for _ in pauses():
            if self._decided() is not None:
                break
            absent = self._absent()
            late = time.monotonic() - began > self._limit
            if late or not any(self._lives.is_alive(each.name) for each in absent):
                self._propose(absent, admits=admits)
        self.members = self._read_members()
        if self.members.place(self.own.name) is None:
            others = f"as {self.members}" if self.members.nodes else "in a new run"
            raise ExcludedError(
                f"node {self.own.number} had not been heard of for so long that the others went on "
                f"{others}: start it again, and it joins them"
            )
        self._store.set("latest", str(self.number))
        for member in self.members.nodes:
            if member.is_fresh:
                self._store.set(f"admitted/{member.name}", str(self.number))
        return self.members

    def conclude(self, *, succeeded: bool) -> bool:
        """End the round; return whether all ranks of all members have succeeded in it."""
        key = f"outcome/{self.number}"
        if succeeded:
            self._store.set(self._key("voted", self.own, self.rank), "")
        else:
            self._first(key, GIVEN_UP)
        everybody = [
            self._key("voted", member, rank)
            for member in self.members.nodes
            for rank in self._ranks
        ]
        began = time.monotonic()
        for _ in pauses():
            if self._store.check([key]):
                break
            if self._store.check(everybody):
                self._first(key, DONE)
            elif self._lost() or time.monotonic() - began > self._limit:
                self._first(key, GIVEN_UP)
        is_done = self._store.get(key) == DONE
        for kind in ("here", "voted"):  # only ranks in an earlier round read these
            self._delete(kind, self.number - 1)
        self.number += 1
        if is_done:
            self.members = self.members.settled
        return is_done

    def require_going(self) -> None:
        """Raise NodeLostError if the round will be given up; called while this rank waits."""
        if self._store.check([f"outcome/{self.number}"]):
            raise NodeLostError("another node has given this exchange up")
        if lost := self._lost():
            raise NodeLostError(f"{lost} has ended")

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait for something in a round; raises NodeLostError if it will be given up."""
        began, looked = time.monotonic(), time.monotonic()
        for _ in pauses():
            if is_over():
                return
            if time.monotonic() - looked > LONGEST_PAUSE:
                looked = time.monotonic()
                self.require_going()
            if time.monotonic() - began > self._limit:
                raise NodeLostError(f"nothing has come for {self._limit:.0f} s")

    def _absent(self) -> list[Member]:
        return [
            member
            for member in self.members.nodes
            if not self._store.check([self._key("here", member, rank) for rank in self._ranks])
        ]

    def _propose(self, absent: list[Member], *, admits: bool) -> None:
        present = self.members.without(each.name for each in absent)
        joining = tuple(self._joining(present)) if admits else ()
        if not present.with_weights:
            raise NobodyLeftError("all nodes that have the weights have ended: start them again")
        self._first(f"members/{self.number}", Members((*present.nodes, *joining)).text.encode())

    def _joining(self, present: Members) -> Iterator[Member]:
        """Yield the replicas that ask to join, and live."""
        while self._store.check([f"joins/{self._num_looked_at}"]):
            text = self._store.get(f"joins/{self._num_looked_at}")
            self._waiting += Members.of_text(text).nodes
            self._num_looked_at += 1
        self._waiting = [
            each
            for each in self._waiting
            if self._lives.is_alive(each.name)
            and not self._store.check([f"admitted/{each.name}"])
            and present.place(each.name) is None
        ]
        yield from self._waiting

    def _lost(self) -> Members | None:
        ended = [each for each in self.members.nodes if not self._lives.is_alive(each.name)]
        return Members(tuple(ended)) if ended else None

    def _decided(self) -> Members | None:
        key = f"members/{self.number}"
        return Members.of_text(self._store.get(key)) if self._store.check([key]) else None

    def _read_members(self) -> Members:
        return Members.of_text(self._store.get(f"members/{self.number}"))

    def _first(self, key: str, value: bytes) -> None:
        self._store.compare_set(key, "", value.decode())

    def _delete(self, kind: str, number: int) -> None:
        self._store.delete_key(f"{kind}/{number}/{self.own.name}/{self.rank}")

    def _key(self, kind: str, member: Member, rank: int) -> str:
        return f"{kind}/{self.number}/{member.name}/{rank}"


def names_with_weights(store: dist.Store) -> list[str]:
    """Return the replicas with weights after the last begun round; none before the first."""
    number = _last_round(store)
    if not store.check([f"members/{number}"]):
        return []
    members = Members.of_text(store.get(f"members/{number}"))
    outcome = f"outcome/{number}"
    if store.check([outcome]) and store.get(outcome) == DONE:
        members = members.settled
    return [members.names[place] for place in members.with_weights]


def close_rounds(store: dist.Store) -> bool:
    """Close the round after the last one; return False if it has begun already.

    Members that arrive at it afterwards were taken for dead, and end.
    """
    nobody = Members(()).text
    key = f"members/{_last_round(store) + 1}"
    return store.compare_set(key, "", nobody).decode() == nobody


def _last_round(store: dist.Store) -> int:
    """Return the number of the last round that has begun; 0 before the first."""
    number = int(store.get("latest")) if store.check(["latest"]) else 0
    while store.check([f"members/{number + 1}"]):
        number += 1
    return number


def pauses() -> Iterator[None]:
    """Yield with exponential backoff, for polling the store."""
    pause = FIRST_PAUSE
    while True:
        yield
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
