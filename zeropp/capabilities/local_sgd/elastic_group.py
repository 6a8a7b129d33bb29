"""The ranks of one index in all replicas of an elastic run: an `OuterGroup` of the present members.

round n:  quorum  ->  new connections if membership has changed  ->  work  ->  commit, or repeat
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from zeropp.capabilities.local_sgd.entry import Entering, Entry, Saved
from zeropp.capabilities.local_sgd.outer_group import PURPOSE, OuterError, OuterGroup
from zeropp.capabilities.local_sgd.rounds import Members, ReplicaPulse, Rounds, liveness
from zeropp.capabilities.local_sgd.sync_store import open_sync_store, reported_store
from zeropp.errors import InputError
from zeropp.ranks.coordination import broadcast_object
from zeropp.ranks.groups import set_backend_time_limit
from zeropp.ranks.topology import Environment
from zeropp.wire.traffic import Traffic

CONNECT_LIMIT = timedelta(seconds=15)  # all members are there when they connect
WAITING_SHARE = 0.9  # of the time limit, as the other ranks of a node wait in a collective
MOST_FAILURES = 3  # of exchanges in a row, with all members alive


Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """Where replicas find each other, and with how many a run begins.

    settings: what must be equal on all of them, texts by their names; `advice` is added to the
    error if it is not. saved_by: identifies the checkpoint from which replica `number` resumes.
    """

    address: str
    num_nodes: int
    settings: Mapping[str, str]
    advice: str
    saved_by: Callable[[int], Saved]


def join_elastic_group(
    options: ElasticOptions, environment: Environment, timeout: timedelta
) -> "ElasticGroup":
    """Enter a run as an initial member, or as a replica that will join it.

    All ranks of the replica call it. Raises InputError on all of them if settings differ from those
    of the others, NetworkError if there is no store or too few replicas enter.
    """
    limit = timeout.total_seconds()
    entry = pulse = None
    if environment.rank == 0:
        try:
            store = open_sync_store(options.address, timeout)
            name = uuid.uuid4().hex
            pulse = ReplicaPulse(store, name)
            with reported_store():
                entry = _enter(options, store, name, limit * WAITING_SHARE)
        except InputError as error:
            entry = error
    entry = broadcast_object(entry)
    if isinstance(entry, InputError):
        raise entry
    if environment.rank:
        store = open_sync_store(options.address, timeout)
    lives = liveness(store)
    store = dist.PrefixStore(str(entry.epoch), store)
    rounds = Rounds(store, entry.own, environment.rank, environment.world_size, lives, limit)
    if not entry.joins:
        rounds.begin(entry.members)
    return ElasticGroup(
        store.clone(), rounds, options.num_nodes, timeout, pulse, entry.iteration, entry.launch
    )


def _enter(options: ElasticOptions, store: dist.Store, name: str, limit: float) -> Entry:
    return Entering(
        store=store,
        name=name,
        liveness=liveness(store),
        num_nodes=options.num_nodes,
        settings=options.settings,
        advice=options.advice,
        saved_by=options.saved_by,
        limit=limit,
    ).enter()


class ElasticGroup(OuterGroup):
    """An `OuterGroup` whose members may change: those of the last committed round.

    iteration: of the checkpoint from which this replica resumes; 0 without one. All ranks of all
    members call `hold` in the same order.
    """

    def __init__(
        self,
        store: dist.Store,
        rounds: Rounds,
        planned: int,
        timeout: timedelta,
        pulse: ReplicaPulse | None = None,
        iteration: int = 0,
        launch: str = "",
    ) -> None:
        self.rounds, self.planned, self.iteration = rounds, planned, iteration
        self.number, self.launch = rounds.own.number, launch  # its index may change
        self.traffic = Traffic((PURPOSE,))
        self.members, index = rounds.members, rounds.members.place(rounds.own.name)
        self.node, self.size = 1, 2  # until it has joined, as the second of two
        if index is not None:
            self.node, self.size = index, len(self.members.nodes)
        self._watch, self._store, self._timeout, self._pulse = rounds.wait, store, timeout, pulse
        self._names: tuple[str, ...] | None = None  # of the members whose connections hold
        self._broken: list[tuple] = []  # gloo would wait for their messages to delete them

    @property
    def joins(self) -> bool:
        """Whether this replica has yet to get the others' weights."""
        return self.members.place(self.rounds.own.name) is None

    def join(self) -> None:
        """Wait until this replica is admitted to a round, which the caller then holds.

        All its ranks call it when they are ready. Raises NobodyLeftError.
        """
        with reported_store():
            if self.rounds.rank == 0:
                self.rounds.announce()
            self.rounds.wait_for_admission()

    def hold(self, work: Callable[[Members], Result], *, admits: bool = False) -> Result:
        """Run `work` with all members; return its result once all of them have theirs.

        If a member ends, `work` is repeated with the remaining ones, so it must change nothing.
        With `admits`, replicas may join. Raises ExcludedError; OuterError if it fails repeatedly
        while all members are alive.
        """
        failures, last = 0, self.members
        while True:
            error = result = None
            with reported_store():
                members = self.rounds.arrive(admits=admits)
            try:
                self._connect_to(members)
                result = work(members)
            except OuterError as reason:
                error = reason
            with reported_store():
                is_done = self.rounds.conclude(succeeded=error is None)
            if is_done:
                self.members = members.settled
                return result
            self._disconnect()
            failures = failures + 1 if members == last else 1
            last = members
            if failures == MOST_FAILURES:
                raise error or OuterError(f"an exchange of {members} has failed {failures} times")

    def close(self) -> None:
        """Say that this replica leaves."""
        if self._pulse is not None:
            self._pulse.close()

    def _connect_to(self, members: Members) -> None:
        if self._names == members.names:
            return
        self._disconnect()
        number, place = self.rounds.number, members.place(self.rounds.own.name)
        store = dist.PrefixStore(f"connections/{number}/{self.rounds.rank}", self._store)
        try:
            self._connect(store, place, len(members.nodes), CONNECT_LIMIT)
        except RuntimeError as error:
            raise OuterError(f"cannot connect to {members}: {error}") from error
        self._names = members.names
        for group in (self._messages, self._numbers):
            set_backend_time_limit(group, self._timeout)

    def _disconnect(self) -> None:
        if self._names is not None and self._last is not None:
            self._broken.append((self._last, self._messages, self._numbers))
        self._names = None
        self._broken = [each for each in self._broken if not each[0].is_completed()]
