"""How a replica enters a run: it takes a number, and is an initial member or will join.

    epoch                        counts how often all replicas had ended; the keys below are of one
    <epoch>/settings             the settings of all replicas, written by the first one
    <epoch>/number/<number>      the replica that has a number
    <epoch>/candidate/<i>        the replicas present, and which checkpoints they have
    <epoch>/refused              why they cannot begin
    <epoch>/members/0            the initial members: those present with the newest checkpoint

Called by one rank of each replica.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import NamedTuple

import torch.distributed as dist

from zeropp.capabilities.local_sgd.rounds import (
    Member,
    Members,
    close_rounds,
    names_with_weights,
    pauses,
)
from zeropp.errors import InputError, NetworkError, first_lines
from zeropp.ranks.pulse import Liveness

MOST_SHOWN = 8  # differences in an error message
MOST_SAVED = 64  # numbers that are looked at


class Saved(NamedTuple):
    """Identifies a replica's checkpoint: its iteration (0: none) and the launch that saved it.

    place: the replica's index when it was saved.
    """

    iteration: int = 0
    launch: str = ""
    place: int = 0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The result of entering: `own` is one of the initial `members`, or will join them.

    iteration: of the checkpoint from which it resumes; 0 without one. launch: identifies the epoch
    on all its replicas.
    """

    epoch: int
    own: Member
    members: Members
    iteration: int = 0
    launch: str = ""

    @property
    def joins(self) -> bool:
        return self.own.is_fresh


@dataclass(frozen=True, kw_only=True)
class Entering:
    """A replica that enters, under a unique `name`.

    num_nodes: with how many replicas a run begins. settings: what must be equal on all of them,
    texts by their names. saved_by: identifies the checkpoint of replica `number`. limit: seconds
    to wait for the others.
    """

    store: dist.Store
    name: str
    liveness: Liveness
    num_nodes: int
    settings: Mapping[str, str]
    advice: str
    saved_by: Callable[[int], Saved]
    limit: float

    def enter(self) -> Entry:
        """Return when the run has begun, with or without this replica.

        Raises InputError for other settings than those of the others, and for checkpoints that no
        launch has saved together; NetworkError if too few replicas enter.
        """
        began, members = time.monotonic(), None
        while members is None:
            epoch = self._epoch()
            store = dist.PrefixStore(str(epoch), self.store)
            first = self._require_same(store)
            own = Member(name=self.name, number=self._take_number(store))
            iteration = _announce(store, own, self.saved_by(own.number)).iteration
            members = self._begin(store, epoch, began)
        if members.place(own.name) is None:
            own, iteration = replace(own, is_fresh=True), 0
        launch = f"{first}-{epoch}"
        return Entry(epoch=epoch, own=own, members=members, iteration=iteration, launch=launch)

    def _epoch(self) -> int:
        """Return the present epoch; begin one if all replicas of the one before have ended."""
        number = self.store.compare_set("epoch", "", "0")
        while True:
            store = dist.PrefixStore(number.decode(), self.store)
            names = _names_in(store)
            if not names or self._any_alive(names):
                return int(number)
            if store.check(["members/0"]) and not close_rounds(store):
                continue  # one of them was only silent
            following = str(int(number) + 1)
            number = self.store.compare_set("epoch", number.decode(), following)

    def _any_alive(self, names: Sequence[str]) -> bool:
        for _ in pauses():
            verdicts = [self.liveness.verdict(name) for name in names]
            if True in verdicts or None not in verdicts:
                return True in verdicts
        raise AssertionError

    def _require_same(self, store: dist.Store) -> str:
        """Return the name of the first replica, which has the same settings."""
        own = json.dumps([self.name, dict(self.settings)])
        name_of_first, first = json.loads(store.compare_set("settings", "", own))
        differing = [
            f"{name} is {self.settings.get(name, 'absent')} on this node and "
            f"{first.get(name, 'absent')} on the first one"
            for name in dict.fromkeys((*first, *self.settings))
            if first.get(name) != self.settings.get(name)
        ]
        if differing:
            raise InputError(f"{first_lines(differing, MOST_SHOWN)}: {self.advice}")
        return name_of_first

    def _take_number(self, store: dist.Store) -> int:
        """Return the number of the newest checkpoint that no living replica has, or the lowest."""
        saved = sorted(range(MOST_SAVED), key=lambda number: -self.saved_by(number).iteration)
        for number in chain(saved, count(MOST_SAVED)):
            key = f"number/{number}"
            holder = store.compare_set(key, "", self.name).decode()
            while holder != self.name and not self._any_alive([holder]):
                holder = store.compare_set(key, holder, self.name).decode()
            if holder == self.name:
                return number
        raise AssertionError

    def _begin(self, store: dist.Store, epoch: int, began: float) -> Members | None:
        """Return the initial members once they are decided; None if another epoch has begun."""
        for _ in pauses():
            if store.check(["members/0"]):
                break
            if int(self.store.get("epoch")) != epoch:
                return None
            if store.check(["refused"]):
                raise InputError(store.get("refused").decode())
            here = [each for each in _candidates(store) if self.liveness.is_alive(each[0].name)]
            if len(here) >= self.num_nodes:
                self._propose(store, here)
            if time.monotonic() - began > self.limit:
                raise NetworkError(
                    f"{len(here)} of zeropp.sync_nodes {self.num_nodes} nodes have come within "
                    f"{self.limit:.0f} s: start the others, with the same zeropp.sync_store"
                )
        return Members.of_text(store.get("members/0"))

    def _propose(self, store: dist.Store, here: Sequence[tuple[Member, Saved]]) -> None:
        """Propose the replicas with the newest checkpoint, in the order that they had.

        Nobody begins if several launches have saved these, as their weights differ.
        """
        furthest = max(saved.iteration for _, saved in here)
        members = [
            (saved.place, each.number, saved.launch, each)
            for each, saved in here
            if saved.iteration == furthest
        ]
        if len({launch for _, _, launch, _ in members}) > 1:
            numbers = ", ".join(str(number) for number in sorted(each[1] for each in members))
            problem = (
                f"--load: the nodes {numbers} have checkpoints of iteration {furthest} that they "
                "have not saved together, in one launch: move away those of the nodes that "
                "are to get the weights of the others"
            )
            store.compare_set("refused", "", problem)
            return
        members.sort(key=lambda each: each[:2])
        store.compare_set("members/0", "", Members(tuple(each for *_, each in members)).text)


def _announce(store: dist.Store, own: Member, saved: Saved) -> Saved:
    text = json.dumps([own.name, own.number, *saved])
    for place in count():
        if store.compare_set(f"candidate/{place}", "", text).decode() == text:
            return saved
    raise AssertionError


def _names_in(store: dist.Store) -> Sequence[str]:
    """Return the replicas with weights in an epoch or, before it has begun, those present."""
    names = names_with_weights(store)
    if names:
        return names
    first = [json.loads(store.get("settings"))[0]] if store.check(["settings"]) else []
    return [*first, *(each.name for each, _ in _candidates(store))]


def _candidates(store: dist.Store) -> Iterator[tuple[Member, Saved]]:
    """Yield the replicas present, with the checkpoints that they have."""
    for place in count():
        if not store.check([f"candidate/{place}"]):
            return
        name, number, *saved = json.loads(store.get(f"candidate/{place}"))
        yield Member(name=name, number=number), Saved(*saved)
